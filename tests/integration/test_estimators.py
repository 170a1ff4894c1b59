"""Searches of the gradient estimators' spaces on a real Ray: each alone, a grid, one beside Gradient-Skip."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands_run import run_here
from runs import assert_equals_alone

import analysis

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "gradients.md").read_text()
GRID = re.findall(r"```yaml\n(# grid.yaml.*?)```", PAGE, re.DOTALL)[0]
#: A search a space, of a second or two a trial, and whether trials execute more than a dense run (None: it depends).
SEARCHES = {
    "zero_gradients": ((), False),
    "central_difference": ((), True),
    "discrete_gradient": (
        ("--workload", "rosenbrock", "--option", "pairs=2", "--option", "updates=60", "--option", "decay_from=100",
         "--option", "decay_every=40", "--allowed-drop", "1e9"),
        True,
    ),
    "straight_through": (("--workload", "binary_mlp"), True),
    "svrg": ((), True),
    "kfac": ((), True),
    "gradient_clustering": ((), True),
    "importance_sampling": ((), None),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("space", SEARCHES)
def test_a_space_is_searched_and_costs_what_it_executes(space: str, one_ray: None, tmp_path: Path) -> None:
    arguments, costs_more = SEARCHES[space]
    done = run_here(
        tmp_path, "search", "--space", space, "--epochs", "3", "--trials", "3", "--name", "s", "--no-controls",
        "--concurrency", "1", "--allowed-drop", "0.5", *arguments,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    acting = trials[trials["method"] == space]
    assert len(acting) == 2
    if costs_more is not None:
        assert ((acting["executed_flops"] > acting["dense_flops"]) == costs_more).all()
    # The first steps are those of the baseline where the estimator is switched on later.
    late = acting[acting["gradient_start_itr"].fillna(0) > 10]
    assert (late["search_flops"] < late["executed_flops"]).all()
    for _, row in acting.iterrows():
        assert_equals_alone(row)
    assert (tmp_path / "results" / "s" / "best.env").is_file()


def test_what_cannot_be_searched_is_one_line_before_anything_begins(tmp_path: Path) -> None:
    for arguments, message in (
        (["--space", "straight_through"], "a straight-through estimator needs a model with BinaryActivation modules"),
        (["--space", "kfac", "--workload", "rosenbrock"], "kfac needs linear or ungrouped convolution layers"),
        (["--space", "svrg", "--workers-per-trial", "2"], "space svrg trains in one process"),
        (["--space", "svrg", "--script", "python train.py"], "a script estimates its gradients by itself: space svrg"),
        (["--space", "zero_gradients+agp"], "space zero_gradients can be searched together with spaces of Gradient"),
        (["--space", "central_difference+auto_thresholds"],
         "space central_difference can't be searched together with another, got central_difference+auto_thresholds"),
    ):  # fmt: skip
        done = run_here(tmp_path, "search", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "results").exists()


@pytest.mark.thorough
def test_a_grid_and_gradient_skip_beside_it_are_compared_at_equal_compute(one_ray: None, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    common = ("--epochs", "5", "--no-controls", "--concurrency", "1", "--allowed-drop", "0.5")
    done = run_here(
        tmp_path, "search", "--grid", "grid.yaml", "--name", "grid", *common,
        "--set", "statistics_measurements=2", "--set", "statistics_samples=4", "--lengths", "0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--lengths 0.5 has no effect: runs are cut where auto searches Gradient-Skip alone" in done.stderr
    trials = analysis.load(tmp_path / "results" / "grid")
    points = trials[trials["method"] == "zero_gradients"]
    assert {(row["zero_threshold"], row["zero_unbiased"]) for _, row in points.iterrows()} == {
        (threshold, unbiased) for threshold in (0.01, 0.1) for unbiased in (False, True)
    }
    assert sorted(trials.loc[trials["method"] == "svrg", "svrg_alpha"]) == [0.5, 1.0]
    history = analysis.history(tmp_path / "results" / "grid")
    assert history["sgd_normalised_variance"].notna().all()
    assert (history["sgd_normalised_variance"] > 0).all()
    done = run_here(
        tmp_path, "search", "--space", "auto_thresholds+zero_gradients", "--trials", "3", "--name", "both", *common
    )
    assert done.returncode == 0, done.stderr
    both = analysis.load(tmp_path / "results" / "both")
    joined = both[both["method"] == "gradskip+zero_gradients"]
    assert len(joined) == 2
    for _, row in joined.head(2).iterrows():
        assert_equals_alone(row)
    assert "zero_threshold=" in (tmp_path / "results" / "both" / "best.env").read_text()
