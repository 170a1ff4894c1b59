"""Searches on Ray whose trials end early: a workload that the more training, the worse it gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fading_workload
import pytest
from commands_run import run_here
from runs import assert_equals_alone, facts, finish, rows_alone
from searchers import learning
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
from analysis.io.layout import Layout
from analysis.io.studies import read_journal
from trainables.config import TrialConfig
from trainables.stage_tree.coordinator import RayLeases
from trainables.stage_tree.shared_run import SharedRun, Sharing
from tune_cac.ray_backend.session import ray_session

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.usefixtures("ray_with_support")]

SEARCH = (
    "search", "--workload", "fading_workload:make", "--name", "s", "--trials", "8", "--concurrency", "1",
    "--no-controls", "--lengths", "1.0",
)  # fmt: skip


@pytest.fixture(scope="module")
def ray_with_support() -> Iterator[None]:
    """A cluster whose workers find the workload."""
    support = str(Path(fading_workload.__file__).parent)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", f"{support}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with ray_session(cpus=2):
            yield


@pytest.fixture(scope="module")
def folder(ray_with_support: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that a budget ended once three trials had finished, and that went on with what these had shown."""
    made = tmp_path_factory.mktemp("early")
    first = run_here(made, *SEARCH, "--early-ending", "--cost-budget", "1.6")
    assert first.returncode == 0, first.stderr
    assert "early" not in first.stderr
    assert analysis.load(made / "results" / "s")["status"].tolist() == ["completed"] * 3
    done = run_here(made, "search", "--resume", "s")
    assert done.returncode == 0, done.stderr
    (made / "out.txt").write_text(done.stdout)
    (made / "err.txt").write_text(done.stderr)
    return made


@pytest.mark.thorough
def test_trials_that_are_behind_end_early_and_say_why(folder: Path) -> None:
    study = folder / "results" / "s"
    assert Layout(study).read_info().early_ending
    trials = analysis.load(study)
    assert set(trials["status"]) == {"completed", "pruned"}  # none is left running
    ended = trials[trials["status"] == "pruned"]
    told = (folder / "err.txt").read_text()
    for _, row in ended.iterrows():
        assert f"trial {row['trial']}: {row['error'].partition(';')[0]}" in told
    assert f", {len(ended)} ended early, compute so far: " in told
    cost = f" full trainings for {len(trials)} trials, {len(ended)} of which ended early; "
    assert cost in (folder / "out.txt").read_text()
    assert cost in Layout(study).report.read_text()


@pytest.mark.thorough
def test_what_ended_early_costs_what_it_executed_and_is_in_no_ranking(folder: Path) -> None:
    trials = analysis.load(folder / "results" / "s")
    ended = trials[trials["status"] == "pruned"]
    assert (ended["search_flops"] > 0).all()
    assert (ended["search_flops"] < ended["dense_flops"]).all()
    cost = analysis.search_cost(trials)
    assert cost.search_flops == trials["search_flops"].sum()
    assert (cost.trials, cost.ended_early) == (len(trials), len(ended))
    ranking = analysis.rank(trials)
    assert sorted(ranking["trial"]) == sorted(trials.loc[trials["status"] == "completed", "trial"])
    for _, row in trials[trials["status"] == "completed"].iterrows():
        assert_equals_alone(row)
    for record in read_journal(Layout(folder / "results" / "s").journal):
        if record["status"] == "pruned":
            lost = rows_alone(TrialConfig.from_mapping(record["config"]))[-1]
            better = ranking[(ranking["compute_saved"] >= lost["compute_saved"]) & (ranking["lost"] < lost["quality"])]
            assert len(better) > 0  # it would not have been on the front


@pytest.mark.thorough
def test_what_it_recorded_is_shared_on(folder: Path) -> None:
    study = Layout(folder / "results" / "s")
    executed = []
    for record in read_journal(study.journal):
        if record["status"] == "pruned":
            config = TrialConfig.from_mapping(record["config"])
            with SharedRun(config, Sharing(tree=study.tree, budget_bytes=0)) as run:
                rows = finish(run)
            assert facts(rows) == rows_alone(config)
            executed.append(rows[0]["search_flops"])
    assert executed[0] == 0  # its first epochs are known


@pytest.mark.thorough
def test_a_finished_study_has_nothing_to_resume(folder: Path) -> None:
    before = analysis.load(folder / "results" / "s")
    done = run_here(folder, "search", "--resume", "s")
    assert done.returncode == 0, done.stderr
    assert len(analysis.load(folder / "results" / "s")) == len(before)


@pytest.mark.thorough
def test_where_nothing_is_predicted_the_option_has_no_effect_and_it_is_said(tmp_path: Path) -> None:
    done = run_here(
        tmp_path, "search", "--trials", "2", "--epochs", "1", "--sampler", "random", "--no-controls", "--early-ending"
    )
    assert done.returncode == 0, done.stderr
    said = "--early-ending has no effect: savings are predicted where auto searches Gradient-Skip alone"
    assert said in done.stderr


@pytest.mark.usefixtures("tiny")
def test_its_leases_are_free_at_once(tmp_path: Path) -> None:
    made = learning(tmp_path, early_ending=True)
    baseline = made.trials.baseline_row()
    assert baseline is not None
    with made.coordinated():
        for number in range(6):
            name = f"t{number}"
            suggested = made.suggest(name)
            assert isinstance(suggested, dict)
            behind = 0.3 if number == 5 else 0.0
            for epoch in range(1, 5):
                accuracy = 0.4 + 0.01 * number * (epoch < 3) + 0.1 * epoch - behind
                row = {**baseline, "epoch": epoch, "accuracy": accuracy, "compute_saved": 0.9, "search_flops": epoch}
                if made.early_stopper is not None and made.early_stopper(name, row):
                    break
            assert epoch == (2 if number == 5 else 4)
            leases = RayLeases(suggested["sharing"]["claims"])
            assert leases.claim("a stage", suggested["sharing"]["holder"], 60)
            made.on_trial_complete(name, row)
            assert leases.claim("a stage", "another trial", 60) == (number == 5)
            leases.release_all(suggested["sharing"]["holder"])
            leases.release_all("another trial")
