"""What a search executed: counted from journals written by hand, beside what the trials count for alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from studies import DENSE_FLOPS, result_row, write_study

import analysis
from analysis.io.study_files import Layout
from analysis.metrics.accounting import SearchCost, search_cost
from analysis.presentation.markdown_report import search_cost_line
from trainables.config import TrialConfig


def so_far(search_flops: int, **more: Any) -> dict[str, Any]:
    return {"search_flops": search_flops, "dense_flops": DENSE_FLOPS, "accuracy": 0.5, "epoch": 3, **more}


def setting(start_thr: float) -> dict[str, Any]:
    return TrialConfig(method="gradskip", CAC_VAR_START_THR=start_thr).to_dict()


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    """Five that ended well or badly, one that goes on as another."""
    return write_study(
        tmp_path / "s",
        [
            {"row": result_row()},
            {"row": result_row(saved=0.2, search_flops=100), "config": setting(0.9)},
            {"error": "ValueError: no", "row_so_far": so_far(300)},
            {"error": "interrupted", "continued_by": "a later trial", "row_so_far": so_far(20)},
            {"row": result_row(saved=0.5, search_flops=0), "config": setting(0.8)},
            {"error": "at once", "row_so_far": {}},
        ],
    )


def test_what_did_not_end_counts_in_full_trainings(tmp_path: Path) -> None:
    """Rows of a script tell the dense FLOPs of the steps so far."""
    tenth = {"row_so_far": so_far(100, dense_flops=100, executed_flops=100)}
    trials = analysis.load(write_study(tmp_path / "s", [{"row": result_row()}, tenth, tenth]).root)
    assert trials["status"].tolist() == ["completed", "failed", "failed"]
    assert search_cost(trials).dense_equivalents == pytest.approx(1.2)
    # Of another baseline's options, a full training is that baseline's.
    two = trials.assign(options=["a", "a", "b"])
    two = pd.concat(
        [two, two.iloc[[0]].assign(trial=3, options="b", dense_flops=200, search_flops=200)], ignore_index=True
    )
    assert search_cost(two).dense_equivalents == pytest.approx(1 + 0.1 + 0.5 + 1)


def test_a_script_that_freezes_from_the_start_costs_what_it_executed(tmp_path: Path) -> None:
    """Its process sees nothing of the layers that never train, so its own full budget seems to be what it executed."""
    own = {"dense_flops": DENSE_FLOPS * 3 // 10, "executed_flops": DENSE_FLOPS * 3 // 10}
    frozen = result_row(saved=0.7, search_flops=own["executed_flops"], **own)
    trials = analysis.load(write_study(tmp_path / "s", [{"row": result_row()}, {"row": frozen}]).root)
    assert search_cost(trials).dense_equivalents == pytest.approx(1.3)


def test_a_trial_that_tells_a_saving_alone_and_studies_of_two_workloads(tmp_path: Path) -> None:
    none: dict[str, Any] = dict.fromkeys(("dense_flops", "executed_flops", "search_flops"))
    rows = [{"row": result_row()}, {"row": result_row(saved=0.25, **none)}]
    trials = analysis.load(write_study(tmp_path / "s", rows).root)
    assert search_cost(trials).dense_equivalents == pytest.approx(1.75)
    large = trials.assign(workload="another", dense_flops=10 * DENSE_FLOPS, search_flops=10 * DENSE_FLOPS)
    both = pd.concat([trials.iloc[:1], large.iloc[:1]], ignore_index=True).drop(columns="study", errors="ignore")
    assert search_cost(both).dense_equivalents == pytest.approx(2)


def test_scripts_without_flops_count_by_what_they_saved(tmp_path: Path) -> None:
    none: dict[str, Any] = dict.fromkeys(("dense_flops", "executed_flops", "search_flops"))
    rows = [{"row": result_row(saved=saved, **none)} for saved in (0.0, 0.25)]
    cost = search_cost(analysis.load(write_study(tmp_path / "s", rows).root))
    assert (cost.dense_equivalents, cost.own_equivalents) == (1.75, 1.75)
    assert search_cost_line(cost).startswith("Search cost: 1.8 full trainings for 2 trials")


def test_everything_executed_counts_whoever_has_a_result(study: Layout) -> None:
    trials = analysis.load(study.root)
    assert trials["trial"].tolist() == [0, 1, 2, 3, 4, 5]
    assert trials["status"].tolist() == ["completed", "completed", "failed", "interrupted", "completed", "failed"]
    cost = analysis.search_cost(trials)
    assert cost == SearchCost(
        trials=5,
        search_flops=1000 + 100 + 300 + 20,
        dense_equivalents=pytest.approx(1.42),
        own_equivalents=pytest.approx(1 + 0.8 + 0.5),
        completed=3,
        outcomes=3,
        outcome_equivalents=pytest.approx(1 + 0.8 + 0.5),
    )
    assert search_cost_line(cost) == (
        "Search cost: 1.4 full trainings for 5 trials; trained alone, each from its start, they would have cost 2.3."
    )


def test_what_repeats_an_outcome_is_told_apart(study: Layout) -> None:
    trials = analysis.load(study.root)
    first = trials.iloc[[1]]
    same = first.assign(trial=6, search_flops=0)
    other = same.assign(trial=7, CAC_VAR_START_THR=0.7, train_loss=0.3)
    again = pd.concat([trials, same, other], ignore_index=True)
    cost = analysis.search_cost(again)
    assert (cost.trials, cost.outcomes) == (7, 4)
    assert cost.own_equivalents == pytest.approx(1 + 3 * 0.8 + 0.5)
    assert cost.outcome_equivalents == pytest.approx(1 + 2 * 0.8 + 0.5)
    assert search_cost_line(cost) == (
        "Search cost: 1.4 full trainings for 7 trials (4 distinct outcomes); trained alone, each from its start, "
        "they would have cost 3.9, the outcomes 3.1."
    )
