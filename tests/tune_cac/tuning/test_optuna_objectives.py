"""What Optuna is told: the objectives by which a study ranks, and what is feasible."""

from __future__ import annotations

from typing import Any

import optuna
import pandas as pd
import pytest

from analysis.metrics.saving import saved_of
from tune_cac.tuning.study_trials import saved_of_baseline, tell_complete

BASELINE = {"quality": 0.9, "compute_saved": 0.0, "executed_flops": 1000, "dense_flops": 1000, "inference_saved": 0.0}


def row(accuracy: float, executed: int = 800, inference: float | None = 0.5, dense: int = 1000) -> dict[str, Any]:
    return {
        "quality": accuracy, "compute_saved": 1 - executed / dense, "executed_flops": executed, "dense_flops": dense,
        "inference_saved": inference,
    }  # fmt: skip


def told(
    found: dict[str, Any], baseline: dict[str, Any] | None = BASELINE, *, drop: float = 0.01, **attrs: Any
) -> optuna.trial.FrozenTrial:
    study = optuna.create_study(directions=["maximize", "maximize"])
    study.enqueue_trial({}, user_attrs=attrs)
    trial = study.ask()
    tell_complete(study, trial, found, baseline, drop)
    (frozen,) = study.trials
    return frozen


@pytest.mark.parametrize(("saving", "expected"), [(None, 0.2), ("training", 0.2), ("inference", 0.5), ("both", 0.35)])
def test_a_study_is_told_what_it_ranks_by(saving: str | None, expected: float) -> None:
    assert told(row(0.9), config={"saving": saving}).values == pytest.approx([0.9, expected])
    frame = pd.DataFrame([{**row(0.9), "saving": saving}])
    assert saved_of(frame)[0] == pytest.approx(expected)  # as the ranking says it


def constraints(frozen: optuna.trial.FrozenTrial) -> dict[str, float]:
    return dict(frozen.constraints)


@pytest.mark.parametrize(
    ("accuracy", "excess"), [(0.9, -0.01), (0.95, -0.06), (0.89, 0.0), (0.89 + 1e-12, 0.0), (0.88, 0.01)]
)
def test_the_drop_beyond_the_allowed_one_is_a_constraint(accuracy: float, excess: float) -> None:
    found = constraints(told(row(accuracy)))
    assert found == {"accuracy_drop": pytest.approx(excess, abs=1e-9)}
    assert (found["accuracy_drop"] <= 0) == (excess <= 0)


def test_a_shorter_run_saves_of_the_baselines_budget() -> None:
    half = row(0.9, executed=500, dense=500)
    assert half["compute_saved"] == 0.0
    assert saved_of_baseline(half, BASELINE) == 0.5
    assert told(half).values == pytest.approx([0.9, 0.5])
    assert told(half, config={"saving": "both"}).values == pytest.approx([0.9, 0.5])
    # Of a script nothing is known.
    unknown = {**half, "executed_flops": None, "dense_flops": None, "compute_saved": 0.3}
    assert saved_of_baseline(unknown, BASELINE) == 0.3
    # A teacher costs more than the budget.
    assert saved_of_baseline(row(0.9, executed=1500), BASELINE) == -0.5
