"""Report of a finished trial to Optuna: two objectives and the constraint on the drop of its metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import optuna

from trainables.metrics import objective_keys
from trainables.quality import ACCURACY, Quality, allowed_amount
from trainables.savings import TIME, ranked_saving, share_saved

#: Constraint violation of a control, larger than any drop.
_NEVER = 1e30


def tell_complete(
    study: optuna.Study,
    trial: optuna.Trial,
    row: dict[str, Any],
    baseline: dict[str, Any] | None,
    allowed_drop: float | str,
    quality: Quality = ACCURACY,
) -> None:
    """Report a finished trial: its objectives, and the loss beyond the allowed one as constraint (<= 0 is feasible).

    The row of a shorter run holds savings relative to its own budget; savings relative to the baseline's budget are
    reported. A control is never feasible: a sampler cannot learn from it, and good controls would displace settings.
    """
    if baseline is not None:
        row = {**row, "compute_saved": saved_of_baseline(row, baseline)}
    row = {**row, "compute_saved": saved_of_row(row, trial.user_attrs.get("config", {}).get("saving"), baseline)}
    if baseline is not None:
        drop = quality.lost(row[quality.key], baseline[quality.key])
        excess = drop - allowed_amount(allowed_drop, baseline[quality.key])
        trial.set_constraint(quality.drop, excess if excess > 1e-9 else min(excess, 0.0))
    if trial.user_attrs.get("role") == "control":
        trial.set_constraint("control", _NEVER)
    study.tell(trial, [row[name] for name in objective_keys(quality)])


def saved_of_baseline(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    """Return a row's savings relative to the baseline's budget, or to its own if one of them has no FLOPs."""
    executed, dense = row["executed_flops"], baseline["dense_flops"]
    own: float = row["compute_saved"]
    return share_saved(executed, dense) if executed is not None and dense and row["dense_flops"] != dense else own


def saved_of_row(row: Mapping[str, Any], saving: str | None, baseline: Mapping[str, Any] | None = None) -> float:
    """Return a row's savings of the compute that its trial is ranked by; time is that of the baseline's row."""
    time = 0.0
    if saving == TIME and baseline is not None:
        time = share_saved(row["train_time_s"], baseline["train_time_s"])
    return ranked_saving(saving, row["compute_saved"], float(row.get("inference_saved") or 0.0), time)


def missing_objectives(row: Mapping[str, Any], quality: Quality) -> list[str]:
    """Return the objectives that are missing from a result row or not finite."""
    missing = [name for name in objective_keys(quality) if not _finite(row.get(name))]
    return [quality.name if name == quality.key else name for name in missing]


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
