"""Quality that studies had reached for the same compute, beside the dense run cut at the same point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.io.studies import distinct_names, history, sources
from analysis.metrics.ranking import is_control
from trainables.errors import UserError
from trainables.quality import Quality, quality_in

#: Budgets as shares of the dense run's FLOPs.
BUDGETS = (0.25, 0.5, 0.75, 1.0)
#: Name of the row of the run without a method.
DENSE = "dense, cut"
#: Sums of FLOPs that are this much above a budget, relative to it, still fit.
_TOLERANCE = 1e-9


def equal_compute(paths: str | Path | Iterable[str | Path], budgets: Sequence[float] = BUDGETS) -> pd.DataFrame:
    """Return what each study's best trial had reached when it had executed a share of the dense run's FLOPs.

    A trial counts with its last epoch within the budget, as it was then: its learning rates were scheduled for the full
    run, and so were those of the dense run that stands beside it. A method that saves compute is further in its run at
    the same budget, one that costs more is not as far. The best of several trials is flattered by the choice.

    Args:
        paths: folders of studies of the same training.
        budgets: shares of the dense run's FLOPs, above 0; above 1 for methods that cost more than it.

    Returns:
        One row per budget and study, and one of the dense run (`DENSE`), in this order: ``budget``, ``study``,
        ``trials`` (that had trained an epoch within it), ``trial`` (the best), ``epoch``, ``executed`` (share of the
        dense FLOPs that it had executed), the metric, and ``gain`` (how much better than the dense run of the same
        study at this budget; negative where worse). Missing where no trial had trained an epoch.

    Raises:
        UserError: a budget that is not above 0, or studies of different metrics or dense FLOPs.
    """
    found = sources(paths)
    check_budgets(budgets)
    frames = [history(source.path) for source in found]
    epochs = dict(zip(distinct_names(found), frames, strict=True))
    qualities = {name: quality_in(frame.attrs["quality"]) for name, frame in epochs.items()}
    if len({quality.name for quality in qualities.values()}) > 1:
        shown = ", ".join(f"{quality.name} ({name})" for name, quality in qualities.items())
        raise UserError(f"studies can be compared if their metric is the same, got {shown}: leave out what differs")
    quality = next(iter(qualities.values()))
    return reached_within(epochs, quality, budgets)


def check_budgets(budgets: Iterable[Any]) -> None:
    """Raise UserError for a budget that is not a number above 0."""
    for budget in budgets:
        if not isinstance(budget, (int, float)) or not 0 < budget < float("inf"):
            raise UserError(f"a budget must be a share of the dense run's FLOPs above 0, such as 0.5, got {budget!r}")


def reached_within(
    epochs: Mapping[str, pd.DataFrame], quality: Quality, budgets: Sequence[float] = BUDGETS
) -> pd.DataFrame:
    """Return `equal_compute` of rows of epochs.

    Args:
        epochs: of `analysis.history`, by the study's name.
        quality: the metric.
        budgets: as for `equal_compute`.

    Raises:
        UserError: studies of different dense FLOPs.
    """
    dense = {name: frame["dense_flops"].dropna().max() for name, frame in epochs.items()}
    if len({round(float(flops)) for flops in dense.values() if pd.notna(flops)}) > 1:
        shown = ", ".join(f"{flops:.6g} ({name})" for name, flops in dense.items())
        raise UserError(
            f"studies can be compared at equal compute if their dense runs cost the same, got {shown} FLOPs: leave out "
            "what differs"
        )
    rows = []
    for budget in budgets:
        cut = None  # the dense run of the first study that has one
        for name, frame in epochs.items():
            own = frame[~is_control(frame) & frame[quality.name].notna()]
            own = own[own["executed_flops"] <= budget * dense[name] * (1 + _TOLERANCE)]
            last = own.sort_values("epoch", kind="stable").drop_duplicates("trial", keep="last")
            is_dense = last["role"] == "baseline"
            baseline = _best(last[is_dense], quality)
            rows.append(_row(budget, name, last[~is_dense], baseline, quality, dense[name]))
            if cut is None and baseline is not None:
                cut = _row(budget, DENSE, last[is_dense], baseline, quality, dense[name])
        rows.append(cut or _row(budget, DENSE, pd.DataFrame(), None, quality, 0.0))
    dtypes = {"budget": "float64", "study": "string", "trials": "int64", "trial": "Int64", "epoch": "Int64",
              "executed": "float64", quality.name: "float64", "gain": "float64"}  # fmt: skip
    return pd.DataFrame(rows, columns=list(dtypes)).astype(dtypes)


def _best(rows: pd.DataFrame, quality: Quality) -> pd.Series | None:
    return None if rows.empty else rows.iloc[int((quality.sign * rows[quality.name]).to_numpy().argmax())]


def _row(
    budget: float, name: str, rows: pd.DataFrame, baseline: pd.Series | None, quality: Quality, dense_flops: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"budget": budget, "study": name, "trials": len(rows)}
    if (best := _best(rows, quality)) is None:
        return row
    gain = None if baseline is None else quality.sign * (best[quality.name] - baseline[quality.name])
    executed = best["executed_flops"] / dense_flops
    reached = {quality.name: best[quality.name], "gain": gain}
    return {**row, "trial": best["trial"], "epoch": best["epoch"], "executed": executed, **reached}
