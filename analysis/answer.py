"""The answer in words and as settings to paste. Pure: frames in, text out."""

from __future__ import annotations

import json
import math
import textwrap
from typing import Any

import pandas as pd

from analysis.accounting import SearchCost, search_cost, search_fraction
from analysis.confirmation import of_trial
from analysis.controls import RANDOM_STOPS, accuracy_when_shorter, beats_shorter, control_line
from analysis.layout import StudyInfo
from analysis.ranking import ROUNDING
from trainables.config import TrialConfig, field_kinds
from trainables.gradskip.settings import BY_NAME, Settings


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal.

    >>> percent(0.1493)
    '14.9 %'
    """
    return f"{100 * fraction:.1f} %"


def points(fraction: float) -> str:
    """A difference of accuracies in points with two decimals.

    >>> points(0.0017)
    '0.17 points'
    """
    return f"{100 * fraction:.2f} points"


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "trial"), plural(0, "trial")
    ('1 trial', '0 trials')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def trials_for_trainings(trials: int, trainings: float) -> str:
    """So many trials for the compute of so many dense trainings.

    >>> trials_for_trainings(100, 11.83)
    '100 trials for 11.8 trainings'
    """
    said = f"{trainings:.1f}"
    return f"{plural(trials, 'trial')} for {said} training{'' if said == '1.0' else 's'}"


def search_cost_line(cost: SearchCost) -> str:
    """One sentence: what the search executed, and what its trials would have alone where that is more."""
    line = f"Search cost: {trials_for_trainings(cost.trials, cost.dense_equivalents)}"
    alone, executed = f"{cost.own_equivalents:.1f}", f"{cost.dense_equivalents:.1f}"
    if cost.own_equivalents > cost.dense_equivalents and alone != executed:
        line += f"; alone, each from its start, they would have been {alone}"
    return line + "."


def config_of(row: pd.Series) -> TrialConfig:
    """The configuration of a row of `analysis.load`."""
    return TrialConfig(**_hyperparameters(row))


def _hyperparameters(row: pd.Series) -> dict[str, Any]:
    """The fields that are set in a row, each in its own type."""
    values = {}
    for name, kind in field_kinds().items():
        value = row.get(name)  # a study of an earlier version may lack a column
        if value is None or pd.isna(value):
            continue
        # By the field's type, not the column's: pandas holds integers beside missing values as floats.
        values[name] = tuple(json.loads(value)) if kind is tuple else kind(value)
    return values


def headline(
    ranking: pd.DataFrame,
    best: pd.Series | None,
    allowed_drop: float,
    *,
    confirmation: pd.DataFrame | None = None,
    line: pd.DataFrame | None = None,
) -> str:
    """What can be skipped at what drop, or that nothing can; how sure that is; whether training shorter does it, too.

    Args:
        ranking: from `analysis.rank`.
        best: the recommended trial.
        allowed_drop: accuracy that may be lost, a fraction.
        confirmation: from `analysis.confirm_table`; None where none was begun.
        line: from `analysis.control_line`; None where nothing is compared with shorter training.
    """
    if len(ranking) == 0:
        return "No trial has completed, so there is nothing to rank."
    if not (ranking["role"] == "baseline").any():
        return "The baseline did not complete, so no drop in accuracy can be stated and nothing is recommended."
    if best is None or best["compute_saved"] <= 0:
        return f"No setting tried saves compute within the allowed drop of {points(allowed_drop)}."
    again = of_trial(confirmation, best["trial"])
    if again is not None and again["confirmed"]:
        text = (
            f"You can skip {percent(again['compute_saved'])} of the training compute {_at(again['accuracy_drop'])} in "
            f"test accuracy (allowed: {points(allowed_drop)}); confirmed over {plural(again['seeds'], 'seed')}: the "
            f"drop is at most {points(again['drop_high'])} with {again['confidence']:.0%} confidence."
        )
    else:
        text = (
            f"You can skip {percent(best['compute_saved'])} of the training compute {_at(best['accuracy_drop'])} in "
            f"validation accuracy (allowed: {points(allowed_drop)}). One seed, {_not_confirmed(again)}."
        )
    shorter = _shorter_does_it(best, line)
    return f"{text} {shorter}" if shorter else text


def _at(drop: float) -> str:
    if drop > 0:
        return f"at a drop of {points(drop)}"
    return "at no drop" if drop == 0 else f"at no drop ({points(-drop)} better)"


def _not_confirmed(again: pd.Series | None) -> str:
    if again is None:
        return "not confirmed"
    return (
        f"not confirmed: over {plural(again['seeds'], 'fresh seed')} the drop in test accuracy is "
        f"{points(again['accuracy_drop'])} and may be {points(again['drop_high'])}"
    )


def _shorter_does_it(best: pd.Series, line: pd.DataFrame | None) -> str:
    """A sentence where the best setting does not beat training shorter for the same compute, or cannot be compared."""
    if line is None or len(line) == 0:
        return ""
    reached = float(accuracy_when_shorter(line, [best["compute_saved"]])[0])
    if math.isnan(reached) or best["accuracy"] > reached + ROUNDING:
        return ""
    return (
        f"It does not beat simply training shorter: {percent(1 - best['compute_saved'])} of the epochs reach "
        f"{reached:.4f}, this setting {best['accuracy']:.4f}."
    )


def best_env(
    info: StudyInfo, best: pd.Series | None, allowed_drop: float, *, confirmation: pd.DataFrame | None = None
) -> str:
    """The best settings as lines that a POSIX shell can source; comments say what was confirmed, and on what."""
    lines = [
        f"# tune_cac: {info.workload}, {info.epochs} epochs, space {info.space}, seed {info.seed}",
    ]
    if best is None or best["method"] == "none" or best["compute_saved"] <= 0:
        lines.append(f"# Nothing tried saves compute within the allowed drop of {points(allowed_drop)}: off.")
        settings = Settings(start_thr=-1)
    else:
        config = config_of(best)
        settings = config.gradskip_settings()
        lines.append(
            f"# trial {best['trial']}: compute saved {percent(best['compute_saved'])}, validation accuracy "
            f"{best['accuracy']:.4f}, drop {points(best['accuracy_drop'])} (allowed {points(allowed_drop)})"
        )
        again = of_trial(confirmation, best["trial"])
        if again is not None and again["confirmed"]:
            lines.append(
                f"# Confirmed on {plural(again['seeds'], 'fresh seed')} and the test split: drop "
                f"{points(again['accuracy_drop'])}, at most {points(again['drop_high'])} with "
                f"{again['confidence']:.0%} confidence."
            )
        else:
            lines.append(f"# One seed, {_not_confirmed(again)}.")
        lines.append("# Iterations are those of a run of this length.")
        if config.forward_cache_mb:
            lines.append(f"# The trial had forward_cache_mb={config.forward_cache_mb}, which no variable sets.")
    environment = settings.to_environment()
    ours = [name for name in environment if not BY_NAME[name].published]
    if ours:
        lines.append("# Unknown to the published library, read by tune_cac.gradskip, which wants model= for them:")
        lines += textwrap.wrap(", ".join(ours), width=110, initial_indent="#   ", subsequent_indent="#   ")
    # One left over in the shell could win over the answer, or be refused beside it.
    unset = [name for name in BY_NAME if name not in environment]
    lines += textwrap.wrap(" ".join(unset), width=110, initial_indent="unset ", subsequent_indent="unset ")
    lines += [f"export {name}={value}" for name, value in environment.items()]
    return "\n".join(lines) + "\n"


def settings_text(row: pd.Series) -> str:
    """The method's variables of a row in short: ``START_THR=0.97 SAMPLES=5 ...``; ``-`` for the baseline.

    The prefix common to all of them is left out. Lists and flags are written as the variables take them.
    """
    if row["method"] == "none":
        return "-"
    return " ".join(
        f"{name.removeprefix('CAC_').removeprefix('VAR_')}={_short(value)}"
        for name, value in _hyperparameters(row).items()
        if name in BY_NAME
    )


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def confirmation_lines(confirmation: pd.DataFrame | None) -> list[str]:
    """The section on fresh seeds in Markdown; nothing where none was begun."""
    if confirmation is None:
        return []
    lines = [
        "", "## Confirmation", "",
        "Retrained with the baseline on seeds that the search never saw; drops are in test accuracy, in points, with "
        "intervals that hold together.", "",
        "| trial | seeds | compute saved | drop | from | to | confirmed |", "|--:|--:|--:|--:|--:|--:|:--|",
    ]  # fmt: skip
    for _, row in confirmation.iterrows():
        drops = " | ".join(f"{100 * row[name]:+.2f}" for name in ("accuracy_drop", "drop_low", "drop_high"))
        lines.append(
            f"| {row['candidate']} | {row['seeds']} | {percent(row['compute_saved'])} | {drops} | "
            f"{'yes' if row['confirmed'] else 'no'} |"
        )
    return lines


def control_lines(trials: pd.DataFrame, line: pd.DataFrame) -> list[str]:
    """The section on controls in Markdown; nothing where there are none."""
    stops = trials[(trials["status"] == "completed") & (trials["role"] == "control")]
    stops = stops[stops["control"] == RANDOM_STOPS] if len(stops) else stops
    if len(line) == 0 and len(stops) == 0:
        return []
    lines = ["", "## Controls", "", "| trained | compute saved | accuracy |", "|:--|--:|--:|"]
    for _, row in line.iterrows():
        lines.append(f"| {plural(row['epochs'], 'epoch')} | {percent(row['compute_saved'])} | {row['accuracy']:.4f} |")
    for _, row in stops.iterrows():
        lines.append(f"| {settings_text(row)} | {percent(row['compute_saved'])} | {row['accuracy']:.4f} |")
    return lines


def ranked_table(
    ranking: pd.DataFrame, *, top: int | None = None, test: bool = False, beats: pd.Series[Any] | None = None
) -> list[list[str]]:
    """The ranked table as text cells, header first.

    ``GFLOPs`` is the trial's own compute, as if it had been trained alone; ``search cost`` what the search executed for
    it, as a fraction of a dense run.

    Args:
        ranking: from `analysis.rank`.
        top: rows to show; None for all. The baseline is always among them.
        test: add the test accuracy, which a search must not choose by.
        beats: from `analysis.beats_shorter`, on the ranking's index: a column says who beats training shorter.
    """
    header = [
        "rank", "trial", "accuracy", "drop", "saved", "GFLOPs", "search cost", "time s", "within", "front",
        "configuration",
    ]  # fmt: skip
    if test:
        header.insert(4, "test acc.")
    compared = beats is not None and bool(beats.notna().any())
    if compared:
        header.insert(-1, "beats shorter")
    table = [header]
    for (position, row), fraction in zip(ranking.iterrows(), search_fraction(ranking), strict=True):
        baseline = row["role"] == "baseline"
        if top is not None and int(str(position)) >= top and not baseline:
            continue
        cells = [
            str(row["rank"]),
            f"{row['trial']}{' (baseline)' if baseline else ' (published)' if row['role'] == 'published' else ''}",
            f"{row['accuracy']:.4f}",
            "-" if pd.isna(row["accuracy_drop"]) else f"{row['accuracy_drop']:+.4f}",
            percent(row["compute_saved"]),
            f"{row['executed_flops'] / 1e9:.2f}",
            "-" if pd.isna(fraction) else f"{fraction:.2f}",
            f"{row['train_time_s']:.2f}",
            "yes" if row["within_drop"] else "no",
            "yes" if row["on_front"] else "",
            settings_text(row),
        ]
        if beats is not None and compared:
            value = beats.loc[position]  # type: ignore[call-overload]
            cells.insert(-1, "" if pd.isna(value) else "yes" if value else "no")
        if test:
            cells.insert(4, "-" if pd.isna(row["test_accuracy"]) else f"{row['test_accuracy']:.4f}")
        table.append(cells)
    return table


def report_markdown(info: StudyInfo, trials: pd.DataFrame, ranking: pd.DataFrame, best: pd.Series | None,
                    allowed_drop: float, *, top: int = 20, picture: str | None = None,
                    confirmation: pd.DataFrame | None = None) -> str:  # fmt: skip
    """The report: headline, the best trial on the test split, settings, ranked table, failures, versions.

    Args:
        info: what was searched.
        trials: from `analysis.load`.
        ranking: from `analysis.rank`.
        best: from `analysis.best`.
        allowed_drop: accuracy that may be lost, a fraction.
        top: rows of the ranked table.
        picture: file name of the stage tree's picture, beside the report; None without one.
        confirmation: from `analysis.confirm_table`; None where none was begun.
    """
    line = control_line(trials)
    said = headline(ranking, best, allowed_drop, confirmation=confirmation, line=line)
    lines = [f"# {info.space} on {info.workload}", "", said, ""]
    lines += [search_cost_line(search_cost(trials)), ""]
    counts = trials["status"].value_counts()
    lines.append(
        f"{info.epochs} epochs, seed {info.seed}; trials: " + ", ".join(f"{n} {s}" for s, n in counts.items()) + "."
    )
    if info.hold:
        held = " ".join(f"{name}={_short(value)}" for name, value in info.hold.items())
        lines.append(f"Held in every trial but the baseline: {held}.")
    if best is not None and best["compute_saved"] > 0:
        lines += [
            "",
            "## Best settings",
            "",
            "```sh",
            best_env(info, best, allowed_drop, confirmation=confirmation).rstrip(),
            "```",
        ]
        baseline = ranking[ranking["role"] == "baseline"].iloc[0]
        lines += [
            "",
            f"On the test split, which no choice was made by: {best['test_accuracy']:.4f}, "
            f"baseline {baseline['test_accuracy']:.4f}.",
            f"Backward FLOPs saved: {percent(best['backward_saved'])}. "
            f"Training time saved in this run: {percent(best['time_saved'])} (one measurement, beside other trials).",
        ]
        events = json.loads(best["stop_events"])
        if events:
            lines += ["", "| iteration | layer | name | rule | variance / peak |", "|--:|--:|:--|:--|--:|"]
            for event in events:
                ratio = "" if event["ratio"] is None else f"{event['ratio']:.4f}"
                lines.append(
                    f"| {event['iteration']} | {event['layer']} | {event['name']} | {event['rule']} | {ratio} |"
                )
    lines += confirmation_lines(confirmation) + control_lines(trials, line)
    table = ranked_table(ranking, top=top, test=True, beats=beats_shorter(ranking, line))
    lines += ["", "## Ranking", "", "| " + " | ".join(table[0]) + " |", "|" + "--|" * len(table[0])]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table[1:]]
    if picture is not None:
        lines += [
            "",
            "## Stage tree",
            "",
            "Every bar is a stretch of training that begins where its trials did something that the others did not; "
            "what trials have in common was trained once and is drawn once.",
            "",
            f"![stage tree]({picture})",
        ]
    failed = trials[trials["status"] == "failed"]
    if len(failed):
        lines += ["", "## Failed trials", ""]
        lines += [f"- trial {row['trial']}: {row['error']}" for _, row in failed.iterrows()]
    lines += ["", "Versions: " + ", ".join(f"{k} {v}" for k, v in info.versions.items()) + ".", ""]
    return "\n".join(lines)
