"""A search that starts from an earlier study, by command: its rows are its own, and it goes on without that study."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from commands_run import run_here
from runs import assert_equals_alone

import analysis
from analysis.io.layout import Layout
from analysis.metrics.controls import CUT
from analysis.presentation.length_text import EPOCHS_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

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
    assert [run["loss"] for run in prior["runs"]] == pytest.approx(ended["accuracy_drop"].tolist())
    later = analysis.load(results / "later")
    assert len(later) == 3  # no row of the earlier study
    chosen = later.iloc[2:]
    assert len(chosen) == 1
    # The prior knows what the best saves.
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
    assert "Left out in turn, 2 of these studies had the saving of thresholds predicted with" in done.stdout
    # What is printed can be sourced, and trains as it says.
    assert_trains_as_it_says(done.stdout, results.parent, "8", seed="3")
    one = run_here(results.parent, "recommend", *arguments[:-1], "--space", "manual_layers")
    assert "No error can be given with fewer than two earlier studies" in one.stdout
    assert sorted(path.name for path in results.iterdir()) == before


def assert_trains_as_it_says(printed: str, folder: Path, epochs: str, *, seed: str) -> None:
    """Explicit stops, on the run's length or a shorter one, save exactly what was said."""
    (saved,) = map(float, re.findall(r"compute saved ([\d.]+) %", printed))
    assert saved > 0
    given = dict(re.findall(r"export (\w+)=(\S+)", printed))
    own = given.pop(EPOCHS_VARIABLE, epochs)
    trial = run_here(
        folder, "trial", "--epochs", own, "--seed", seed,
        *(part for name, value in given.items() for part in ("--set", f"{name}={value}")),
    )  # fmt: skip
    (of_own,) = map(float, re.findall(r"compute saved ([\d.]+) %", trial.stdout))
    assert 100 - int(own) / int(epochs) * (100 - of_own) == pytest.approx(saved, abs=0.11)


#: Of the recommendation that searches its seeds first.
OF_SEEDS = ("--seeds", "2", "--name", "r", "--epochs", "5", "--allowed-drop", "0.3", "--space", "manual_layers")


@pytest.fixture(scope="module")
def of_seeds(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("seeds")
    return folder, run_here(folder, "recommend", *OF_SEEDS)


def test_a_recommendation_may_search_its_seeds_first(
    of_seeds: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, done = of_seeds
    assert done.returncode == 0, done.stderr
    assert "From r-seed0, r-seed1 and the first 2 dense epochs" in done.stdout
    studies = [Layout(folder / "results" / name) for name in ("r-seed0", "r-seed1")]
    assert [study.read_info().prior for study in studies] == [[], ["r-seed0"]]
    trials = [analysis.load(study.root) for study in studies]
    assert [set(one["seed"]) for one in trials] == [{0}, {1}]
    for one in trials:
        assert "control" not in set(one["role"])
        assert one.loc[one["role"] == CUT, "epochs"].tolist() == [2]
    (executed,) = re.findall(r"searched 2 seeds for ([\d.]+) full trainings", done.stderr)
    assert float(executed) == pytest.approx(
        sum(analysis.search_cost(one).dense_equivalents for one in trials), abs=0.06
    )
    assert_trains_as_it_says(done.stdout, folder, "5", seed="0")


@pytest.mark.thorough
def test_it_searches_no_seed_again(of_seeds: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = of_seeds
    studies = [Layout(folder / "results" / name) for name in ("r-seed0", "r-seed1")]
    trials = [analysis.load(study.root) for study in studies]
    again = run_here(folder, "recommend", *OF_SEEDS)  # trains nothing but the first part of the dense run
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    assert [len(analysis.load(study.root)) for study in studies] == list(map(len, trials))
    other = run_here(folder, "recommend", *OF_SEEDS[:-1], "auto_thresholds")
    assert other.returncode == 2
    assert "r-seed0 holds a study with space 'manual_layers', not 'auto_thresholds'" in other.stderr
    assert "--seeds must be an integer >= 2, got 1" in run_here(folder, "recommend", "--seeds", "1").stderr


@pytest.mark.thorough
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
