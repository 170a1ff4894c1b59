"""Settings to paste: best.env, and best.yaml of a search of compression."""

from __future__ import annotations

import shlex
import textwrap

import pandas as pd

from analysis.formatting import (
    LINE_WIDTH,
    allowed_text,
    drop_words,
    wrapped,
)
from analysis.io.study_files import StudyInfo
from analysis.metrics.confirmation import confirmation_of
from analysis.presentation.settings_text import (
    compresses,
    cut_words,
    estimator_text,
    length_lines,
    recipe_lines,
    recipe_text,
    schedule_text,
)
from analysis.presentation.summary_text import (
    against_shorter,
    answer_sentence,
    config_of,
    is_answer,
    retraining_sentence,
    searched_options,
)
from trainables.config import TrialConfig
from trainables.gradients.fields import estimator_in
from trainables.gradskip.settings import OFF
from trainables.gradskip.variables import BY_NAME
from trainables.script.placeholders import CACHE_VARIABLE, EPOCHS_VARIABLE


def environment_lines(config: TrialConfig, *, schedule: str, is_cut: bool = False) -> list[str]:
    """Return lines for a POSIX shell: comments, ``export`` of the configuration's variables, ``unset`` of all others.

    ``schedule`` is the location of a compression schedule, which no variable can set, for a comment; a trial that only
    compresses has no other lines. ``is_cut`` says whether lines before these set the epochs
    (`settings_text.length_lines`).
    """
    lines = _recipe_comments(config)
    if config.method == "recipe":
        return lines
    estimator = estimator_in(config.method)
    if estimator is not None:
        text = estimator_text(config.to_dict())
        if not config.skips_gradients:
            fields = "".join(f" --set {part}" for part in text.split())
            return [
                *lines,
                f"# It trains by {config.method}, which tune_cac.gradients has and no variable sets:",
                f"#   python -m tune_cac trial --method {config.method}{fields}",
            ]
        lines.append(
            f"# It trains by {estimator}, too, which no variable sets: {text}; see "
            f"python -m tune_cac trial --method {config.method}."
        )
    if compresses(config):
        if not config.skips_gradients:
            return [*lines, f"# It compresses, and no variable says how: the answer is {schedule}."]
        lines.append(f"# It compresses, too, and no variable says how: the schedule is {schedule}.")
    # Without a method no layer stops; the variables express this by turning auto mode off.
    environment = (config.gradskip_settings() if config.skips_gradients else OFF).to_environment()
    if ours := [name for name in environment if not BY_NAME[name].published]:
        lines.append("# Unknown to the published library, read by tune_cac.gradskip, which wants model= for them:")
        lines += textwrap.wrap(", ".join(ours), width=LINE_WIDTH, initial_indent="#   ", subsequent_indent="#   ")
    # A variable left over in the shell could override these or conflict with them.
    beside = {EPOCHS_VARIABLE: is_cut, CACHE_VARIABLE: bool(config.forward_cache_mb)}
    unset = [name for name in BY_NAME if name not in environment] + [
        name for name, is_set in beside.items() if not is_set
    ]
    lines += textwrap.wrap(" ".join(unset), width=LINE_WIDTH, initial_indent="unset ", subsequent_indent="unset ")
    # shlex.quote leaves plain numbers, names and comma lists unquoted.
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    if config.forward_cache_mb:
        lines += [
            "# Outputs of the frozen part were kept, which saved its forward passes: `tune_cac trial` reads this; in a",
            "#   script, `for batch in optimizer.gradskip.cache(loader)` does the same.",
            f"export {CACHE_VARIABLE}={config.forward_cache_mb}",
        ]
    return lines


def _recipe_comments(config: TrialConfig) -> list[str]:
    """Return comments with a trial's training recipe: how to try it, and lines of code to paste."""
    given = config.to_dict()
    if not (text := recipe_text(given)):
        return []
    method = "" if config.skips_gradients else f" --method {config.method}"
    return [
        "# It trains by another recipe, which no variable sets:",
        f"#   python -m tune_cac trial{method}{''.join(f' --set {part}' for part in text.split())}",
        "# In a script of yours:",
        *(f"#   {line}" for line in recipe_lines(given)),
    ]


def best_env(
    info: StudyInfo, best: pd.Series | None, allowed_drop: float | str, *, confirmation: pd.DataFrame | None = None,
    line: pd.DataFrame | None = None, beside: str = "",
) -> str:  # fmt: skip
    """Return the best settings as lines that a POSIX shell can source, with comments on their confirmation.

    Arguments are those of `summary_text.headline`, and what is said beside the settings (`SearchResult.beside`).
    """
    lines = _about_answer(info, best, allowed_drop, confirmation, line) + comment_lines(beside)
    config, is_cut = TrialConfig(method="none"), False
    if best is not None and is_answer(best):
        config, is_cut = config_of(best), bool(cut_words(best))
        lines += length_lines(best)
        if config.skips_gradients:
            lines.append("# Iterations are those of a run of this length.")
    elif info.method == "compression":
        return "\n".join([*lines, "# Compression alone was searched, which no variable sets: no schedule."]) + "\n"
    return "\n".join(lines + environment_lines(config, schedule="best.yaml", is_cut=is_cut)) + "\n"


def best_schedule(
    info: StudyInfo, best: pd.Series | None, allowed_drop: float | str, *, confirmation: pd.DataFrame | None = None,
    line: pd.DataFrame | None = None,
) -> str | None:  # fmt: skip
    """Return the best trial's compression schedule as plain YAML, with the comments of `best_env`; None without one."""
    if best is None or not is_answer(best) or not compresses(config := config_of(best)):
        return None
    about = _about_answer(info, best, allowed_drop, confirmation, line)
    return schedule_text(config, [*about, "# Epochs are those of a run of this length."])


def _about_answer(
    info: StudyInfo, best: pd.Series | None, allowed_drop: float | str, confirmation: pd.DataFrame | None,
    line: pd.DataFrame | None,
) -> list[str]:  # fmt: skip
    """Return the comments at the top of a file with the best settings: their origin and confirmation."""
    study = f"# tune_cac: {info.workload}, {info.length_text}, space {info.space}, seed {info.seed}"
    if best is None or not is_answer(best):
        return [
            study,
            f"# Nothing tried saves compute within the allowed {drop_words(info.quality)} of "
            f"{allowed_text(allowed_drop, info.quality)}: off.",
        ]
    lines = [study, f"# trial {best['trial']}"]
    if options := searched_options(best):
        lines.append(f"# With these options of the workload: {options}")
    again = confirmation_of(confirmation, best)
    lines += comment_lines(answer_sentence(best, allowed_drop, confirmation))
    if again is not None:
        why = retraining_sentence(again)
        lines.append(f"# {'Confirmed' if again['confirmed'] else 'Not confirmed'} on fresh seeds{why and f': {why}'}.")
    return lines + comment_lines(against_shorter(best, line, allowed_drop, confirmation))


def comment_lines(text: str) -> list[str]:
    """Return a sentence as lines of a comment; none for an empty one."""
    return wrapped(text, LINE_WIDTH, initial_indent="# ", subsequent_indent="#   ")
