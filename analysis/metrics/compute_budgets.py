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
    names = distinct_names(found)
    check_budgets(budgets)
    epochs = {name: history(source.path) for name, source in zip(names, found, strict=True)}
    qualities = {name: quality_in(frame.attrs["quality"]) for name, frame in epochs.items()}
    quality = next(iter(qualities.values()))
    if any(other.name != quality.name for other in qualities.values()):
        shown = ", ".join(f"{other.name} ({name})" for name, other in qualities.items())
        raise UserError(f"studies can be compared if their metric is the same, got {shown}: leave out what differs")
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
        within = {name: _last_within(frame, budget * dense[name], quality) for name, frame in epochs.items()}
        baselines = {name: _best(frame[frame["role"] == "baseline"], quality) for name, frame in within.items()}
        rows += [
            _row(budget, name, frame[frame["role"] != "baseline"], baselines[name], quality, dense[name])
            for name, frame in within.items()
        ]
        first = next((name for name, best in baselines.items() if best is not None), None)
        every = within[first][within[first]["role"] == "baseline"] if first is not None else pd.DataFrame()
        own = (None, None) if first is None else (baselines[first], dense[first])
        rows.append(_row(budget, DENSE, every, own[0], quality, own[1]))
    dtypes = {"budget": "float64", "study": "string", "trials": "int64", "trial": "Int64", "epoch": "Int64",
              "executed": "float64", quality.name: "float64", "gain": "float64"}  # fmt: skip
    return pd.DataFrame(rows).astype(dtypes)


def _last_within(epochs: pd.DataFrame, flops: float, quality: Quality) -> pd.DataFrame:
    """Return the last epoch within so many FLOPs of every trial that is no control."""
    own = epochs[~is_control(epochs) & epochs[quality.name].notna()]
    fits = own[own["executed_flops"] <= flops * (1 + _TOLERANCE)]
    return fits.sort_values("epoch", kind="stable").drop_duplicates("trial", keep="last")


def _best(rows: pd.DataFrame, quality: Quality) -> Any:
    if rows.empty:
        return None
    values = rows[quality.name]
    return rows.iloc[int((quality.sign * values).to_numpy().argmax())]


def _row(
    budget: float, name: str, rows: pd.DataFrame, dense: Any, quality: Quality, dense_flops: float | None
) -> dict[str, Any]:
    best = _best(rows, quality)
    row: dict[str, Any] = {"budget": budget, "study": name, "trials": len(rows)}
    if best is None:
        return {**row, "trial": None, "epoch": None, "executed": None, quality.name: None, "gain": None}
    return {
        **row,
        "trial": best["trial"],
        "epoch": best["epoch"],
        "executed": best["executed_flops"] / dense_flops,
        quality.name: best[quality.name],
        "gain": None if dense is None else quality.sign * (best[quality.name] - dense[quality.name]),
    }
