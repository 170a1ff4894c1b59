"""The ranked table as text. Pure: a frame in, cells out."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.formatting import decimals_above, fixed, percent
from analysis.metrics.accounting import search_fraction
from analysis.metrics.saving import BOTH, SAVED, TRAINING, saving_of
from analysis.presentation.summary_text import settings_text


def ranked_table(
    ranking: pd.DataFrame,
    *,
    top: int | None = None,
    test: bool = False,
    beats: pd.Series[Any] | None = None,
    allowed_drop: float | None = None,
) -> list[list[str]]:
    """Return the ranked table as text cells, header first.

    ``saved`` is the saving that the study ranks by. ``GFLOPs`` is the trial's own training compute without sharing;
    ``search cost`` is the compute that the search executed for it, as a fraction of a dense run. Added if the study
    ranks by inference compute, or by both: ``sparsity``, and ``MACs`` of the nonzero weights as a share of the original
    model's MACs. Added if it ranks by both: ``training saved``.

    Args:
        ranking: from `analysis.rank`.
        top: rows to show; None for all. The baseline is always included.
        test: add the test accuracy, which a search must not choose by.
        allowed_drop: allowed accuracy loss of the ranking; a loss above it gets enough decimals to show that.
        beats: from `analysis.beats_shorter`, on the ranking's index; adds a column with the comparison to a cut
            dense run.
    """
    header = [
        "rank", "trial", "accuracy", "accuracy loss", "saved", "GFLOPs", "search cost", "time s", "within", "front",
        "configuration",
    ]  # fmt: skip
    if test:
        header.insert(4, "test acc.")
    compared = beats is not None and bool(beats.notna().any())
    if compared:
        header.insert(-1, "beats cut dense run")
    saving = saving_of(ranking)
    if saving != TRAINING:
        at = header.index("saved") + 1
        header[at:at] = [*(["training saved"] if saving == BOTH else []), "sparsity", "MACs"]
    table = [header]
    for (position, row), fraction in zip(ranking.iterrows(), search_fraction(ranking), strict=True):
        baseline = row["role"] == "baseline"
        if top is not None and int(str(position)) >= top and not baseline:
            continue
        cells = [
            str(row["rank"]),
            f"{row['trial']}{' (baseline)' if baseline else ' (published)' if row['role'] == 'published' else ''}",
            f"{row['accuracy']:.4f}",
            _drop(row["accuracy_drop"], allowed_drop),
            _known(row.get(SAVED)),
            *([] if saving == TRAINING else _inference_cells(row, saving)),
            f"{row['executed_flops'] / 1e9:.2f}",
            "-" if pd.isna(fraction) else f"{fraction:.2f}",
            f"{row['train_time_s']:.2f}",
            "yes" if row["within_drop"] else "no",
            "yes" if row["on_front"] else "",
            settings_text(row),
        ]
        if beats is not None and compared:
            value = beats.loc[position]  # type: ignore[call-overload]
            cells.insert(-1, "" if pd.isna(value) else str(value))
        if test:
            cells.insert(4, "-" if pd.isna(row["test_accuracy"]) else f"{row['test_accuracy']:.4f}")
        table.append(cells)
    return table


def _inference_cells(row: pd.Series, saving: str) -> list[str]:
    inference = row.get("inference_saved")
    macs = None if inference is None or pd.isna(inference) else 1 - inference
    return [*([_known(row["compute_saved"])] if saving == BOTH else []), _known(row.get("sparsity")), _known(macs)]


def _drop(drop: Any, allowed_drop: float | None) -> str:
    if pd.isna(drop):
        return "-"
    return fixed(drop, 4 if allowed_drop is None else decimals_above(drop, allowed_drop, 4), sign="+")


def _known(fraction: Any) -> str:
    return "-" if fraction is None or pd.isna(fraction) else percent(fraction)
