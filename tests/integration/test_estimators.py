"""Searches of the gradient estimators' spaces on a real Ray."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from commands_run import run_here
from runs import assert_equals_alone
from thorough import rest_thorough

import analysis
from trainables.config import TrialConfig
from trainables.errors import UserError

pytestmark = pytest.mark.slow

#: A search a space: the workload on which it can act, in a second or two a trial.
SEARCHES = {
    "central_difference": ("--epochs", "3"),
    "discrete_gradient": (
        "--workload", "rosenbrock", "--option", "pairs=2", "--option", "updates=60", "--option", "decay_from=100",
        "--option", "decay_every=40", "--epochs", "3", "--allowed-drop", "1e9",
    ),
    "straight_through": ("--workload", "binary_mlp", "--epochs", "2"),
}  # fmt: skip


@pytest.mark.parametrize("space", rest_thorough(SEARCHES))
def test_a_space_is_searched_and_costs_what_it_executes(space: str, one_ray: None, tmp_path: Path) -> None:
    done = run_here(
        tmp_path, "search", "--space", space, *SEARCHES[space], "--trials", "4", "--name", "s", "--no-controls",
        "--concurrency", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    acting = trials[trials["method"] == space]
    assert len(acting) == 3
    assert (acting["compute_saved"] < 0).all()
    assert (acting["executed_flops"] > acting["dense_flops"]).all()
    # The first steps are those of the baseline where the estimator is switched on later.
    late = acting[acting["gradient_start_itr"].fillna(0) > 0]
    assert (late["search_flops"] < late["executed_flops"]).all()
    for _, row in acting.head(2).iterrows():
        assert_equals_alone(row)
    assert "gradient_start_itr=" in done.stdout
    assert (tmp_path / "results" / "s" / "best.env").is_file()


def test_what_cannot_be_searched_is_one_line_before_anything_begins(tmp_path: Path) -> None:
    for arguments, message in (
        (["--space", "straight_through"], "a straight-through estimator needs a model with BinaryActivation modules"),
        (["--space", "central_difference", "--workers-per-trial", "2"],
         "space central_difference trains in one process, got --workers-per-trial 2"),
        (["--space", "central_difference", "--script", "python train.py"],
         "a script estimates its gradients by itself: space central_difference needs a workload, got --script"),
        (["--space", "central_difference+auto_thresholds"],
         "space central_difference can't be searched together with another, got central_difference+auto_thresholds"),
    ):  # fmt: skip
        done = run_here(tmp_path, "search", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "results").exists()


@pytest.mark.thorough
def test_replay_claims_no_saving_of_an_estimator(one_ray: None, tmp_path: Path) -> None:
    search = ("search", "--space", "central_difference", "--trials", "2", "--epochs", "2", "--name", "s")
    done = run_here(tmp_path, *search, "--no-controls")
    assert done.returncode == 0, done.stderr
    study = str(tmp_path / "results" / "s")
    refused = run_here(tmp_path, "replay", study, "--set", "gradient_epsilon=0.1")
    assert refused.returncode == 2, refused.stdout
    assert "replay predicts Gradient-Skip alone, got settings of " in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    trace = analysis.load_trace(study)
    with pytest.raises(UserError, match="replay predicts Gradient-Skip alone, got a setting with method central_diff"):
        analysis.replay(trace, TrialConfig(method="central_difference", epochs=2))
    # Gradient-Skip's own thresholds are predicted from the same study's dense run.
    assert run_here(tmp_path, "replay", study, "--set", "CAC_VAR_START_THR=0.99").returncode == 0
    frame = pd.DataFrame([{"method": "central_difference", "gradient_epsilon": 0.1}], dtype=object)
    assert analysis.replay(analysis.load_trace(study), frame)["compute_saved"].isna().all()
