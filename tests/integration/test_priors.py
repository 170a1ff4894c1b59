"""A search that starts from an earlier study, by command: its rows are its own, and it goes on without that study."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands_run import run_here
from runs import assert_equals_alone

import analysis
from analysis.io.layout import Layout

pytestmark = pytest.mark.slow

#: Of both searches.
SHORT = ("--space", "manual_layers", "--epochs", "6", "--allowed-drop", "0.05", "--concurrency", "2", "--no-controls")


@pytest.fixture(scope="module")
def results(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier study, and one of another seed and length that starts from it."""
    folder = tmp_path_factory.mktemp("priors")
    for arguments in (
        ("--name", "earlier", "--trials", "8", "--lengths", "1.0,0.6"),
        ("--name", "later", "--trials", "3", "--seed", "1", "--prior", "earlier", "--lengths", "1.0"),
    ):
        done = run_here(folder, "search", *SHORT, *arguments)
        assert done.returncode == 0, done.stderr
    return folder / "results"


def test_the_first_outcome_is_what_the_prior_expects_to_be_best(results: Path) -> None:
    info = Layout(results / "later").read_info()
    assert info.prior == ["earlier"]
    (prior,) = info.prior_runs
    earlier = analysis.load(results / "earlier")
    ended = earlier[earlier["role"] != "baseline"]
    assert prior["study"] == "earlier"
    assert [run["ended"] for run in prior["runs"]] == (ended["epochs"] / 6).tolist()
    assert [run["loss"] for run in prior["runs"]] == pytest.approx((ended["accuracy_drop"] / 0.05).tolist())
    later = analysis.load(results / "later")
    assert len(later) == 3  # no row of the earlier study
    chosen = later.iloc[2:]
    assert len(chosen) == 1
    # Bisection would have begun in the middle; the prior knows what the best saves.
    best = analysis.rank(earlier[earlier["of_epochs"].isna()], allowed_drop=0.05).iloc[0]["compute_saved"]
    assert chosen["compute_saved"].iloc[0] > 0.5 * best
    for _, row in later.iterrows():
        assert_equals_alone(row)
    cost = analysis.search_cost(later)
    assert cost.trials == 3
    assert cost.dense_equivalents < 3


def test_a_recommendation_has_the_error_that_both_studies_give(results: Path) -> None:
    before = sorted(path.name for path in results.iterdir())
    arguments = ("--workload", "digits", "--epochs", "8", "--seed", "3", "--prior", "earlier", "later")
    done = run_here(results.parent, "recommend", *arguments, "--space", "manual_layers", "--allowed-drop", "0.05")
    assert done.returncode == 0, done.stderr
    assert "From earlier, later and the first 2 dense epochs: trained 0.25 full trainings." in done.stdout
    assert done.stderr.count("dense epoch") == 2
    assert "Left out in turn, 2 of these studies had the saving of such a setting predicted with" in done.stdout
    (saved,) = re.findall(r"compute saved ([\d.]+) %", done.stdout)
    assert float(saved) > 0
    # What is printed can be sourced, and trains as it says.
    given = dict(re.findall(r"export (CAC_\w+)=(\S+)", done.stdout))
    trial = run_here(
        results.parent, "trial", "--epochs", "8", "--seed", "3",
        *(part for name, value in given.items() for part in ("--set", f"{name}={value}")),
    )  # fmt: skip
    assert f"compute saved {saved} %" in trial.stdout
    one = run_here(results.parent, "recommend", *arguments[:-1], "--space", "manual_layers")
    assert "No error can be given with fewer than two earlier studies" in one.stdout
    assert sorted(path.name for path in results.iterdir()) == before


def test_it_goes_on_when_the_earlier_study_is_gone(results: Path) -> None:
    shutil.rmtree(results / "earlier")
    layout = Layout(results / "later")
    before = json.loads(layout.info.read_text())["prior_runs"]
    layout.write_info(replace(layout.read_info(), trials=5))
    done = run_here(results.parent, "search", "--resume", "later")
    assert done.returncode == 0, done.stderr
    after = analysis.load(layout.root)
    assert 3 < len(after) <= 5
    assert json.loads(layout.info.read_text())["prior_runs"] == before
    added = run_here(
        results.parent, "search", *SHORT, "--name", "later", "--seed", "1", "--trials", "1", "--lengths", "1.0",
        "--prior", "earlier",
    )  # fmt: skip
    assert added.returncode == 0, added.stderr
    assert json.loads(layout.info.read_text())["prior_runs"] == before
