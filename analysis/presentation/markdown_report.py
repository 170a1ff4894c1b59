"""A study's report as Markdown. Pure: frames in, text out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import pandas as pd

from analysis.formatting import drop_cell, drop_number, drop_words, percent, plural, value_text, whole_percent
from analysis.io.checked import number_of
from analysis.io.layout import StudyInfo
from analysis.metrics.accounting import SearchCost, search_cost, search_fraction
from analysis.metrics.confirmation import compared, saved_again
from analysis.metrics.ranking import RANDOM_STOPS, allowed_limit, baseline_of, beats_shorter, control_line
from analysis.metrics.saving import quality_of, saved_of_one, saving_of
from analysis.presentation.figures.figure import stop_events
from analysis.presentation.settings_text import RECIPE_NOTE, compresses, recipe_table, without_files
from analysis.presentation.summary_text import (
    best_env,
    compression_of,
    config_of,
    headline,
    settings_text,
    short,
)
from trainables.gradskip.variables import ratio_name
from trainables.quality import ACCURACY, Quality
from trainables.savings import BOTH, SAVED, TIME, TRAINING, saved_words

# --- The ranked table and the table of a trial's stops as text. Pure: frames in, cells out ----------------------------


_ROLES = {"baseline": " (baseline)", "published": " (published)"}


def ranked_table(
    ranking: pd.DataFrame,
    *,
    top: int | None = None,
    test: bool = False,
    beats: pd.Series[Any] | None = None,
    allowed_drop: float | str | None = None,
) -> list[list[str]]:
    """Return the ranked table as text cells, header first.

    ``saved`` is the saving that the study ranks by. ``GFLOPs`` is the trial's own training compute without sharing;
    ``search cost`` is the compute that the search executed for it, as a fraction of a dense run. Added if the study
    ranks by inference compute, or by both: ``sparsity``, and ``MACs`` of the nonzero weights as a share of the original
    model's MACs. Added if it ranks by both: ``training saved``. Added if the study searches options of the workload:
    ``baseline``, the trial of the same options that a trial is compared with. Added if the search has chosen outcomes:
    ``other seeds``, the probability of staying within the allowed loss on another seed.

    Args:
        ranking: from `analysis.rank`.
        top: rows to show; None for all. The baseline is always included.
        test: add the metric on the test split, which a search must not choose by.
        allowed_drop: allowed drop of the ranking; a drop above it gets enough decimals to show that.
        beats: from `analysis.beats_shorter`, on the ranking's index; adds a column with the comparison to a cut
            dense run.
    """
    saving, quality = saving_of(ranking), quality_of(ranking)
    limit = None if allowed_drop is None else allowed_limit(ranking, allowed_drop)
    tested = "test acc." if quality.is_accuracy else quality.test
    compared = beats is not None and bool(beats.notna().any())
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("rank", lambda row: str(row["rank"])),
        ("trial", lambda row: f"{row['trial']}{_ROLES.get(row['role'], '')}"),
        ("baseline", lambda row: _number(row["baseline"], 0)),
        (quality.name, lambda row: value_text(row[quality.name], quality)),
        (drop_words(quality), lambda row: _drop(row[quality.drop], limit, quality)),
        (tested, lambda row: "-" if pd.isna(row[quality.test]) else value_text(row[quality.test], quality)),
        ("saved", lambda row: _share(row.get(SAVED))),
        ("training saved", lambda row: _share(row["compute_saved"])),
        ("sparsity", lambda row: _share(row.get("sparsity"))),
        ("MACs", lambda row: _share(_rest(row.get("inference_saved")))),
        ("GFLOPs", lambda row: f"{row['executed_flops'] / 1e9:.2f}"),
        ("search cost", lambda row: _number(row["search cost"], 2)),
        ("peak MB", lambda row: _number(row["peak_memory_bytes"] / 1e6, 0)),
        ("time s", lambda row: f"{row['train_time_s']:.2f}"),
        ("within", lambda row: "yes" if row["within_drop"] else "no"),
        ("other seeds", lambda row: "" if pd.isna(row["holds"]) else whole_percent(row["holds"])),
        ("front", lambda row: "yes" if row["on_front"] else ""),
        ("beats cut dense run", lambda row: "" if pd.isna(row["beats"]) else str(row["beats"])),
        ("configuration", settings_text),
    ]
    absent = {
        *(() if "baseline" in ranking.columns else ("baseline",)),
        *(() if test else (tested,)),
        *(() if "holds" in ranking.columns else ("other seeds",)),
        *(() if compared else ("beats cut dense run",)),
        *(() if saving == BOTH else ("training saved",)),
        *(() if saving not in (TRAINING, TIME) else ("sparsity", "MACs")),
        *(() if saving == TIME else ("peak MB",)),
    }
    columns = [column for column in columns if column[0] not in absent]
    rows = ranking.assign(**{"search cost": search_fraction(ranking), "beats": beats})
    shown = rows if top is None else rows[(rows.index < top) | (rows["role"] == "baseline")]
    cells = [[cell(row) for _, cell in columns] for _, row in shown.iterrows()]
    return [[name for name, _ in columns], *cells]


def stop_table(row: pd.Series) -> list[list[str]]:
    """Return the stops of a trial as text cells, header first."""
    events = stop_events(row.get("stop_events"))
    table = [["iteration", "layer", "name", "rule", ratio_name(str(events[0].get("rule")) if events else "")]]
    for event in events:
        ratio = event.get("ratio")
        seen = f"{ratio:.4f}" if isinstance(ratio, (int, float)) else ""
        names = [str(event.get(name) or "") for name in ("name", "rule")]
        table.append([str(event["iteration"]), str(event["layer"]), *names, seen])
    return table


def _drop(drop: Any, limit: float | None, quality: Quality) -> str:
    return "-" if pd.isna(drop) else drop_cell(drop, quality, allowed=limit)


def _number(value: Any, decimals: int) -> str:
    return "-" if pd.isna(value) else f"{value:.{decimals}f}"


def _share(fraction: Any) -> str:
    return "-" if fraction is None or pd.isna(fraction) else percent(fraction)


def _rest(saved: Any) -> Any:
    return None if saved is None else 1 - saved


# --- Sparsity and MACs of a trial's model, in total and by layer, as text cells. Pure: a row in, cells out ------------
# Sparsities are fractions of the elements; MACs are multiply-accumulate operations for one sample.

#: Counts among the totals: column, label.
_COUNTS = (
    ("dense_macs", "MACs of a sample, zeros included"),
    ("effective_macs", "MACs of the weights that are not zero"),
    ("parameters", "parameters"),
)
_SHARES = (
    ("sparsity", "sparsity"),
    ("structured_sparsity", "sparsity in whole filters, rows or channels"),
    ("inference_saved", "inference compute saved"),
)


def is_compressed(row: pd.Series | None) -> bool:
    """Return whether a trial used a compression schedule."""
    return row is not None and "compression" in str(row.get("method")).split("+")


def sums(row: pd.Series) -> list[tuple[str, str]]:
    """Return names and values of a model's totals; values that were not measured are left out.

    >>> sums(pd.Series({"sparsity": 0.8, "effective_macs": 51200, "latency_s": 0.0123}))
    [('sparsity', '80.0 %'), ('MACs of the weights that are not zero', '51,200'), ('latency of a batch', '12.30 ms')]
    """
    found = [(said, percent(number_of(row, name))) for name, said in _SHARES if isfinite(number_of(row, name))]
    found += [(said, f"{number_of(row, name):,.0f}") for name, said in _COUNTS if isfinite(number_of(row, name))]
    if isfinite(number_of(row, "latency_s")):
        found.append(("latency of a batch", f"{1000 * number_of(row, 'latency_s'):.2f} ms"))
    return found


def layers(row: pd.Series) -> list[tuple[str, str]]:
    """Return the names of the weights and their sparsities, in the model's order; empty if not measured.

    >>> layers(pd.Series({"layer_sparsity": '{"conv1.weight": 0.25, "fc.weight": 0}'}))
    [('conv1.weight', '25.0 %'), ('fc.weight', '0.0 %')]
    """
    try:
        found: Any = json.loads(row["layer_sparsity"])
    except (KeyError, TypeError, ValueError):
        return []
    if not isinstance(found, dict):
        return []
    return [(name, percent(share)) for name, share in found.items() if isinstance(share, (int, float))]


# --- Sentences on what a search cost. Pure: numbers in, text out ------------------------------------------------------


def full_trainings(equivalents: float) -> str:
    """Return an amount of compute in trainings of the baseline, as text.

    >>> full_trainings(11.83), full_trainings(1.04)
    ('11.8 full trainings', '1.0 full training')
    """
    said = f"{equivalents:.1f}"
    return f"{said} full training{'' if said == '1.0' else 's'}"


def search_cost_line(cost: SearchCost, *, of: str = "Search cost") -> str:
    """Return one sentence on the compute executed, and on the trials' and their outcomes' without sharing if more."""
    line = f"{of}: {full_trainings(cost.dense_equivalents)} for {plural(cost.trials, 'trial')}"
    repeats = cost.outcomes < cost.completed
    line += f" ({plural(cost.outcomes, 'distinct outcome')})" if repeats else ""
    alone, executed = f"{cost.own_equivalents:.1f}", f"{cost.dense_equivalents:.1f}"
    if cost.own_equivalents > cost.dense_equivalents and alone != executed:
        line += f"; trained alone, each from its start, they would have cost {alone}"
        line += f", the outcomes {cost.outcome_equivalents:.1f}" if repeats else ""
    return line + "."


# --- A study's report as Markdown. Pure -------------------------------------------------------------------------------


def report_markdown(info: StudyInfo, trials: pd.DataFrame, ranking: pd.DataFrame, best: pd.Series | None,
                    allowed_drop: float | str, *, top: int = 20,
                    confirmation: pd.DataFrame | None = None) -> str:  # fmt: skip
    """Return the report: headline, best trial on the test split, settings, ranked table, failures, versions.

    Args:
        info: description of the study.
        trials: from `analysis.load`.
        ranking: from `analysis.rank`.
        best: from `analysis.best`.
        allowed_drop: allowed drop of the metric, as for `analysis.rank`.
        top: rows of the ranked table.
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
