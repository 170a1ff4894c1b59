"""A study's report as Markdown. Pure: frames in, text out."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.formatting import percent, plural
from analysis.io.layout import StudyInfo
from analysis.metrics.accounting import search_cost
from analysis.metrics.baseline import baseline_of
from analysis.metrics.confirmation import compared, saved_again
from analysis.metrics.controls import RANDOM_STOPS, beats_shorter, control_line
from analysis.metrics.drops import allowed_limit
from analysis.metrics.quality import quality_of
from analysis.metrics.saving import saved_of_one, saving_of
from analysis.presentation.compression_text import without_files
from analysis.presentation.cost_text import search_cost_line
from analysis.presentation.ranked_table import ranked_table, stop_table
from analysis.presentation.recipe_text import RECIPE_NOTE, recipe_table
from analysis.presentation.schedule_text import compresses
from analysis.presentation.sparsity_text import is_compressed, layers, sums
from analysis.presentation.summary_text import (
    TREE_CAPTION,
    best_env,
    compression_of,
    config_of,
    headline,
    settings_text,
    short,
)
from analysis.quality_words import drop_number, drop_words, value_text
from trainables.quality import ACCURACY, Quality
from trainables.savings import TRAINING, saved_words


def report_markdown(info: StudyInfo, trials: pd.DataFrame, ranking: pd.DataFrame, best: pd.Series | None,
                    allowed_drop: float | str, *, top: int = 20, picture: str | None = None,
                    confirmation: pd.DataFrame | None = None) -> str:  # fmt: skip
    """Return the report: headline, best trial on the test split, settings, ranked table, failures, versions.

    Args:
        info: description of the study.
        trials: from `analysis.load`.
        ranking: from `analysis.rank`.
        best: from `analysis.best`.
        allowed_drop: allowed drop of the metric, as for `analysis.rank`.
        top: rows of the ranked table.
        picture: file name of the stage tree's picture in the report's folder; None without one.
        confirmation: from `analysis.confirm_table`; None if no confirmation was started.
    """
    line = control_line(trials)
    said = headline(
        ranking, best, allowed_drop, confirmation=confirmation, line=line, why_little=info.why_little, sure=info.sure
    )
    lines = [f"# {info.space} on {info.workload}", "", said, ""]
    lines += [search_cost_line(search_cost(trials)), ""]
    counts = trials["status"].value_counts()
    lines.append(
        f"{info.length_text}, seed {info.seed}; trials: " + ", ".join(f"{n} {s}" for s, n in counts.items()) + "."
    )
    if info.hold:
        held = " ".join(f"{name}={short(value)}" for name, value in without_files(info.hold).items())
        lines.append(f"Fixed in every trial but the baseline: {held}.")
    saving, quality = saving_of(trials), info.quality
    if best is not None and saved_of_one(best) > 0:
        env = best_env(info, best, allowed_drop, confirmation=confirmation, line=line)
        lines += ["", "## Best settings", "", "```sh", env.rstrip(), "```"]
        baseline = baseline_of(ranking, best)
        lines += [
            "",
            f"There is no test split, so all {'accuracies' if quality.is_accuracy else 'values'} are those of the "
            "validation split."
            if pd.isna(best[quality.test])
            else f"On the test split{'' if confirmation is not None else ', which no choice was made by'}, "
            f"seed {int(best['seed'])}: {value_text(best[quality.test], quality)}, "
            f"baseline {value_text(baseline[quality.test], quality)}.",
            ("" if pd.isna(best["backward_saved"]) else f"Backward FLOPs saved: {percent(best['backward_saved'])}. ")
            + f"Training time saved in this run: {percent(best['time_saved'])} (one measurement, beside other trials).",
        ]
        if saving != TRAINING and not pd.isna(best["compute_saved"]):
            lines[-1] = f"Training compute saved: {percent(best['compute_saved'])}. {lines[-1]}"
        stops = stop_table(best)
        if len(stops) > 1:
            lines += ["", *_table(stops, "--:|--:|:--|:--|--:")]
        lines += sparsity_lines(best)
    limit = allowed_limit(ranking, allowed_drop)
    lines += confirmation_lines(confirmation, saved_words(saving), limit, quality) + control_lines(trials, line)
    if effects := recipe_table(trials):
        lines += ["", "## What each choice brought", "", RECIPE_NOTE, "", *_table(effects, ":--|--:|--:|--:|--:")]
    table = ranked_table(ranking, top=top, test=True, beats=beats_shorter(ranking, line), allowed_drop=allowed_drop)
    lines += ["", "## Ranking", "", *_table(table, "|".join(["--"] * len(table[0])))]
    if picture is not None:
        lines += ["", "## Stage tree", "", TREE_CAPTION, "", f"![stage tree]({picture})"]
    failed = trials[trials["status"] == "failed"]
    if len(failed):
        lines += ["", "## Failed trials", ""]
        lines += [f"- trial {row['trial']}: {row['error']}" for _, row in failed.iterrows()]
    lines += ["", "Versions: " + ", ".join(f"{k} {v}" for k, v in info.versions.items()) + ".", ""]
    return "\n".join(lines)


def sparsity_lines(best: pd.Series) -> list[str]:
    """Return the Markdown section on the best trial's sparsity; empty if the trial was not compressed."""
    if not is_compressed(best):
        return []
    lines = ["", "## Sparsity", ""]
    if compresses(config_of(best)):
        whole = "The whole schedule is in `best.yaml`."
        lines += [f"Trial {best['trial']} compresses: {compression_of(best)}. {whole}", ""]
    lines += [f"- {name}: {value}" for name, value in sums(best)]
    found = layers(best)
    return [*lines, "", *_table([("layer", "sparsity"), *found], ":--|--:")] if found else lines


def _table(cells: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """Return the lines of a table from its text cells, header first, and the alignment of its columns."""
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return [rows[0], f"|{alignment}|", *rows[1:]]


def confirmation_lines(
    confirmation: pd.DataFrame | None, saved: str, allowed: float, quality: Quality = ACCURACY
) -> list[str]:
    """Return the Markdown section on retraining with fresh seeds; empty if no confirmation was started.

    Args:
        confirmation: from `analysis.confirm_table`.
        saved: the compute saving that the study ranks by, in words.
        allowed: allowed drop in the metric's unit.
        quality: the metric.
    """
    if confirmation is None:
        return []
    lines = [
        "", "## Confirmation", "",
        "Retrained with the baseline on seeds that the search never saw; "
        f"{'accuracy losses are' if quality.is_accuracy else f'each {drop_words(quality)} is'} in "
        f"{compared(confirmation.iloc[0])}{', in points' if quality.is_fraction else ''}, with intervals that hold "
        "together.", "",
    ]  # fmt: skip
    table = [["trial", "seeds", saved, drop_words(quality), "from", "to", "confirmed"]]
    for _, row in confirmation.iterrows():
        drops = [
            drop_number(row[name], quality, allowed=allowed, sign="+")
            for name in (quality.drop, "drop_low", "drop_high")
        ]
        again = percent(saved_again(row)) if row["seeds"] > 0 else "-"
        found = [str(row["candidate"]), str(row["seeds"]), again, *drops]
        table.append([*found, "yes" if row["confirmed"] else "no"])
    return [*lines, *_table(table, "--:|--:|--:|--:|--:|--:|:--")]


def control_lines(trials: pd.DataFrame, line: pd.DataFrame) -> list[str]:
    """Return the Markdown section on controls; empty if there are none."""
    stops = trials[(trials["status"] == "completed") & (trials["role"] == "control")]
    stops = stops[stops["control"] == RANDOM_STOPS] if len(stops) else stops
    if len(line) == 0 and len(stops) == 0:
        return []
    quality = quality_of(trials)
    rows = [(plural(int(row["epochs"]), "epoch"), row) for _, row in line.iterrows()]
    rows += [(settings_text(row), row) for _, row in stops.iterrows()]
    cells = [[trained, percent(row["compute_saved"]), value_text(row[quality.name], quality)] for trained, row in rows]
    table = [["trained", "compute saved", quality.name], *cells]
    return ["", "## Controls", "", *_table(table, ":--|--:|--:")]
