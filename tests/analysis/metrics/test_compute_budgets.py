"""Quality at equal compute, against numbers by hand and a loop over trials."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from analysis.metrics.compute_budgets import DENSE, check_budgets, reached_within
from trainables.errors import UserError
from trainables.quality import ACCURACY, Quality


def epochs(quality: Quality, *trials: tuple[int, str, list[tuple[float, float]]], dense: int = 1000) -> pd.DataFrame:
    """Rows of epochs of trials: number, role, share executed and metric after each epoch."""
    rows = [
        {"trial": number, "role": role, "epoch": epoch, "executed_flops": round(share * dense), "dense_flops": dense,
         quality.name: value}
        for number, role, told in trials
        for epoch, (share, value) in enumerate(told, start=1)
    ]  # fmt: skip
    return pd.DataFrame(rows)


BASELINE = (0, "baseline", [(0.25, 0.5), (0.5, 0.7), (0.75, 0.8), (1.0, 0.85)])
SKIPPING = epochs(
    ACCURACY, BASELINE,
    (1, "published", [(0.2, 0.5), (0.4, 0.7), (0.5, 0.78), (0.6, 0.84)]),
    (2, "search", [(0.25, 0.6), (0.49, 0.65), (0.7, 0.7), (0.9, 0.86)]),
    (3, "control", [(0.3, 0.99)]),
)  # fmt: skip
COSTLY = epochs(ACCURACY, BASELINE, (1, "search", [(1.0, 0.6), (2.0, 0.8), (3.0, 0.9), (4.0, 0.95)]))


def table(budget: float, *studies: pd.DataFrame, quality: Quality = ACCURACY) -> list[tuple[Any, ...]]:
    named = {f"s{number}": frame for number, frame in enumerate(studies)}
    found = reached_within(named, quality, [budget])
    rows = found[["study", "trials", "trial", "epoch", "executed", quality.name, "gain"]].astype(object)
    return [tuple(None if pd.isna(v) else v for v in row) for row in rows.itertuples(index=False)]


def test_the_best_within_a_budget_beside_the_dense_run_cut_there() -> None:
    assert table(0.5, SKIPPING, COSTLY) == [
        ("s0", 2, 1, 3, 0.5, 0.78, pytest.approx(0.08)),
        ("s1", 0, None, None, None, None, None),
        (DENSE, 1, 0, 2, 0.5, 0.7, 0.0),
    ]
    assert table(1.0, SKIPPING, COSTLY) == [
        ("s0", 2, 2, 4, 0.9, 0.86, pytest.approx(0.01)),
        ("s1", 1, 1, 1, 1.0, 0.6, pytest.approx(-0.25)),
        (DENSE, 1, 0, 4, 1.0, 0.85, 0.0),
    ]
    assert table(4.0, COSTLY)[0] == ("s0", 1, 1, 4, 4.0, 0.95, pytest.approx(0.1))


def test_a_cut_run_counts_in_the_full_runs_flops_and_a_script_in_those_of_its_end() -> None:
    half = epochs(ACCURACY, (1, "cut", [(0.5, 0.8), (1.0, 0.9)])).assign(dense_flops=500)
    half["executed_flops"] //= 2
    study = pd.concat([epochs(ACCURACY, BASELINE), half])
    assert table(0.5, study)[0] == ("s0", 1, 1, 2, 0.5, 0.9, pytest.approx(0.2))
    assert table(1.0, study)[0] == ("s0", 1, 1, 2, 0.5, 0.9, pytest.approx(0.05))
    # A script's rows tell the FLOPs of the steps so far.
    script = SKIPPING.assign(dense_flops=(SKIPPING["epoch"] * SKIPPING["dense_flops"]) // 4)
    for budget in (0.25, 0.5, 1.0):
        assert table(budget, script) == table(budget, SKIPPING)


def test_a_study_without_baseline_has_no_gain_and_a_metric_that_is_undefined_is_passed_over() -> None:
    alone = SKIPPING[SKIPPING["role"] != "baseline"]
    assert table(0.5, alone) == [("s0", 2, 1, 3, 0.5, 0.78, None), (DENSE, 0, None, None, None, None, None)]
    holes = SKIPPING.assign(accuracy=SKIPPING["accuracy"].where(SKIPPING["epoch"] != 3))
    assert table(0.5, holes)[0][:4] == ("s0", 2, 1, 2)


def test_what_cannot_be_compared_is_one_line() -> None:
    longer = COSTLY.assign(dense_flops=2000)
    with pytest.raises(UserError, match=r"if their dense runs cost the same, got 1000 \(a\), 2000 \(b\) FLOPs: leave"):
        reached_within({"a": SKIPPING, "b": longer}, ACCURACY)
    for wrong in (0, -1, float("nan"), "x"):
        with pytest.raises(UserError, match=r"a budget must be a share of the dense run's FLOPs above 0, such as 0\.5"):
            check_budgets([wrong])
