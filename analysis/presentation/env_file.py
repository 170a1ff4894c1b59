"""A configuration's variables as lines that a POSIX shell can source."""

from __future__ import annotations

import shlex
import textwrap

from analysis.formatting import LINE_WIDTH
from analysis.presentation.settings_text import compresses, estimator_text, recipe_lines, recipe_text
from trainables.config import TrialConfig
from trainables.gradients.fields import estimator_in
from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import BY_NAME
from trainables.script.placeholders import EPOCHS_VARIABLE


def environment_lines(config: TrialConfig, *, schedule: str, is_cut: bool = False) -> list[str]:
    """Return lines for a POSIX shell: comments, ``export`` of the configuration's variables, ``unset`` of all others.

    Args:
        config: configuration of a trial.
        schedule: location of its compression schedule, which no variable can set; mentioned in a comment if the trial
            compresses. A trial that only compresses has no lines to unset or export.
        is_cut: whether lines before these set the epochs of a run (`settings_text.length_lines`).
    """
    lines = recipe_comments(config)
    if config.method == "recipe":
        return lines
    estimator = estimator_in(config.method)
    if estimator is not None and config.skips_gradients:
        lines.append(
            f"# It trains by {estimator}, too, which no variable sets: {estimator_text(config.to_dict())}; see "
            f"python -m tune_cac trial --method {config.method}."
        )
    elif estimator is not None:
        fields = "".join(f" --set {text}" for text in estimator_text(config.to_dict()).split())
        return [
            *lines,
            f"# It trains by {config.method}, which tune_cac.gradients has and no variable sets:",
            f"#   python -m tune_cac trial --method {config.method}{fields}",
        ]
    if compresses(config):
        if not config.skips_gradients:
            return [*lines, f"# It compresses, and no variable says how: the answer is {schedule}."]
        lines.append(f"# It compresses, too, and no variable says how: the schedule is {schedule}.")
    # Without a method no layer stops; the variables express this by turning auto mode off.
    settings = config.gradskip_settings() if config.skips_gradients else Settings(start_thr=-1)
    environment = settings.to_environment()
    if config.forward_cache_mb:
        lines.append(f"# The trial had forward_cache_mb={config.forward_cache_mb}, which no variable sets.")
    ours = [name for name in environment if not BY_NAME[name].published]
    if ours:
        lines.append("# Unknown to the published library, read by tune_cac.gradskip, which wants model= for them:")
        lines += textwrap.wrap(", ".join(ours), width=LINE_WIDTH, initial_indent="#   ", subsequent_indent="#   ")
    # A variable left over in the shell could override these or conflict with them.
    unset = [name for name in (*BY_NAME, *(() if is_cut else (EPOCHS_VARIABLE,))) if name not in environment]
    lines += textwrap.wrap(" ".join(unset), width=LINE_WIDTH, initial_indent="unset ", subsequent_indent="unset ")
    # shlex.quote leaves plain numbers, names and comma lists unquoted.
    return [*lines, *(f"export {name}={shlex.quote(value)}" for name, value in environment.items())]


def recipe_comments(config: TrialConfig) -> list[str]:
    """Return comments with a trial's training recipe: how to try it, and lines of code to paste."""
    given = config.to_dict()
    text = recipe_text(given)
    if not text:
        return []
    sets = "".join(f" --set {part}" for part in text.split())
    method = "" if config.skips_gradients else f" --method {config.method}"
    return [
        "# It trains by another recipe, which no variable sets:",
        f"#   python -m tune_cac trial{method}{sets}",
        "# In a script of yours:",
        *(f"#   {line}" for line in recipe_lines(given)),
    ]
