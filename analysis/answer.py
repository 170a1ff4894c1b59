"""The answer in words and as settings to paste. Pure: frames in, text out."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd

from analysis.accounting import SearchCost, search_fraction
from analysis.confirmation import compared, of_trial
from analysis.controls import accuracy_when_shorter
from analysis.layout import StudyInfo
from analysis.ranking import ROUNDING
from analysis.shell_lines import environment_lines
from trainables.config import TrialConfig, field_kinds
from trainables.gradskip.settings import BY_NAME


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


def search_cost_line(cost: SearchCost, *, of: str = "Search cost") -> str:
    """One sentence: what was executed, and what the trials would have executed alone where that is more."""
    line = f"{of}: {trials_for_trainings(cost.trials, cost.dense_equivalents)}"
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
        return _nothing(ranking, allowed_drop, confirmation)
    again = of_trial(confirmation, best["trial"])
    if again is None:
        text = (
            f"You can skip {percent(best['compute_saved'])} of the training compute {_at(best['accuracy_drop'])} in "
            f"validation accuracy (allowed: {points(allowed_drop)}). One seed, not confirmed."
        )
    elif again["confirmed"]:
        text = (
            f"You can skip {percent(again['compute_saved'])} of the training compute {_at(again['accuracy_drop'])} in "
            f"{compared(again)} (allowed: {points(allowed_drop)}); confirmed over {plural(again['seeds'], 'seed')}: "
            f"{_at_most(again['drop_high'])} with {again['confidence']:.0%} confidence."
        )
    else:
        text = (
            f"No setting was confirmed to stay within the allowed drop of {points(allowed_drop)}. The best on one "
            f"seed skips {percent(best['compute_saved'])} of the training compute {_at(best['accuracy_drop'])} in "
            f"validation accuracy; {_again(again)}."
        )
    parts = [text, _not_retrained(ranking, best, confirmation), _shorter_does_it(best, line)]
    return " ".join(part for part in parts if part)


def _nothing(ranking: pd.DataFrame, allowed_drop: float, confirmation: pd.DataFrame | None) -> str:
    if "worth" in ranking.columns and bool((ranking["within_drop"] & (ranking["compute_saved"] > 0)).any()):
        return "No setting tried is worth more at this price of a point of accuracy than training in full."
    text = f"No setting tried saves compute within the allowed drop of {points(allowed_drop)}."
    refuted = 0 if confirmation is None else int(confirmation["refuted"].sum())
    return f"{text} {plural(refuted, 'setting')} did on one seed and not on fresh ones." if refuted else text


def _at(drop: float) -> str:
    if drop > 0:
        return f"at a drop of {points(drop)}"
    return "at no drop" if drop == 0 else f"at no drop ({points(-drop)} better)"


def _at_most(high: float) -> str:
    return f"the drop is at most {points(high)}" if high > 0 else "nothing is lost"


def _again(again: pd.Series) -> str:
    """What fresh seeds said of a setting that they did not confirm."""
    failed = f"it failed on {plural(again['failed'], 'fresh seed')}" if again["failed"] else ""
    if again["seeds"] == 0:
        return failed or "it was not retrained to the end"
    seeds = plural(again["seeds"], "fresh seed")
    found = (
        f"over {seeds} it skips {percent(again['compute_saved'])} {_at(again['accuracy_drop'])} in {compared(again)}"
    )
    if again["seeds"] >= 2:
        found += f", and {_at_most(again['drop_high'])}"
    return f"{found}; {failed}" if failed else found


def _not_retrained(ranking: pd.DataFrame, best: pd.Series, confirmation: pd.DataFrame | None) -> str:
    """A sentence where another trial saves more than what was confirmed, and was not retrained."""
    if confirmation is None:
        return ""
    others = ranking[ranking["within_drop"] & ~ranking["trial"].isin(confirmation["candidate"])]
    others = others[others["compute_saved"] > best["compute_saved"] + ROUNDING]
    if others.empty:
        return ""
    first = others.iloc[0]
    return f"Trial {first['trial']} saves {percent(first['compute_saved'])} on one seed and was not retrained."


def _shorter_does_it(best: pd.Series, line: pd.DataFrame | None) -> str:
    """A sentence where the best setting does not beat training shorter for the same compute, or cannot be compared."""
    if line is None or len(line) == 0:
        return ""
    reached = float(accuracy_when_shorter(line, [best["compute_saved"]])[0])
    if math.isnan(reached):
        return f"Training so much shorter was not tried: the shortest saves {percent(line['compute_saved'].max())}."
    if best["accuracy"] > reached + ROUNDING:
        return ""
    return (
        f"It does not beat simply training shorter, which reaches {reached:.4f} for the same compute on that seed, "
        f"this setting {best['accuracy']:.4f}."
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
        config = TrialConfig(method="none")
    else:
        config = config_of(best)
        lines.append(
            f"# trial {best['trial']}: compute saved {percent(best['compute_saved'])}, validation accuracy "
            f"{best['accuracy']:.4f}, drop {points(best['accuracy_drop'])} (allowed {points(allowed_drop)})"
        )
        again = of_trial(confirmation, best["trial"])
        if again is None:
            lines.append("# One seed, not confirmed.")
        elif again["confirmed"]:
            lines.append(
                f"# Confirmed on {plural(again['seeds'], 'fresh seed')}{_and_split(best)}: compute saved "
                f"{percent(again['compute_saved'])},"
            )
            lines.append(
                f"#   drop {points(again['accuracy_drop'])}; {_at_most(again['drop_high'])} with "
                f"{again['confidence']:.0%} confidence."
            )
        else:
            lines.append(f"# Not confirmed: {_again(again)}.")
        lines.append("# Iterations are those of a run of this length.")
    return "\n".join(lines + environment_lines(config)) + "\n"


def _and_split(best: pd.Series) -> str:
    return "" if pd.isna(best.get("test_accuracy")) else " and the test split"


def settings_text(row: pd.Series) -> str:
    """The method's variables of a row in short: ``START_THR=0.97 SAMPLES=5 ...``; ``-`` for the baseline.

    The prefix common to all of them is left out. Lists and flags are written as the variables take them.
    """
    if row["method"] == "none":
        return "-"
    return " ".join(
        f"{name.removeprefix('CAC_').removeprefix('VAR_')}={short(value)}"
        for name, value in _hyperparameters(row).items()
        if name in BY_NAME
    )


def short(value: Any) -> str:
    """A value as its variable takes it, numbers to four digits."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
