"""The ranked table and the table of a trial's stops as text. Pure: frames in, cells out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from analysis.formatting import percent, whole_percent
from analysis.metrics.accounting import search_fraction
from analysis.metrics.drops import allowed_limit
from analysis.metrics.quality import quality_of
from analysis.metrics.saving import saving_of
from analysis.presentation.figures.plain_columns import stop_events
from analysis.presentation.summary_text import settings_text
from analysis.quality_words import drop_cell, drop_words, value_text
from trainables.gradskip.variables import ratio_name
from trainables.quality import Quality
from trainables.savings import BOTH, SAVED, TIME, TRAINING

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
