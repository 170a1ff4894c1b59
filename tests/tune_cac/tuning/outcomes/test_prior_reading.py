"""Studies read as a prior: what is read of a really trained one, and messages for those that are none."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from searchers import learning
from studies import result_row, write_study
from tiny_workload import tiny  # noqa: F401 - a fixture

import search_spaces
from analysis.io.layout import Layout
from analysis.metrics.controls import CUT
from analysis.trace_replay.traces import load_trace
from trainables.config import TrialConfig
from trainables.quality import ACCURACY
from trainables.stage_tree.shared_run import SharedRun, Sharing
from tune_cac.cli.main import main
from tune_cac.cli.recommend import earlier_studies
from tune_cac.study.options import SearchOptions
from tune_cac.tuning.outcomes.prior import Depths, PriorRun, PriorStudy
from tune_cac.tuning.outcomes.prior_reading import MOST_RUNS, read_priors, study_as_prior, thinned
from tune_cac.tuning.study_searcher import StudySearch


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the studies, beside which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["search", *arguments]) == 2
    return capsys.readouterr().err


def test_no_such_study_is_told_with_those_that_there_are(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    write_study(results / "d0", [{"row": result_row()}])
    told = refused(capsys, "--prior", "d1", "--name", "s")
    assert "error: no study 'd1' in results: studies there: d0" in told
    assert not (results / "s").exists()


def test_a_study_is_no_prior_of_its_own(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    write_study(results / "s", [{"row": result_row()}])
    told = refused(capsys, "--name", "s", "--prior", "results/s")
    assert "--prior must name other studies than the one that is searched, got results/s: leave it out" in told


def test_a_prior_has_a_baseline_and_other_runs(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    write_study(results / "failed", [{}, {"row": result_row(saved=0.2)}])
    told = refused(capsys, "--prior", "failed", "--name", "s")
    assert "--prior must name studies whose baseline has ended, got results/failed without one: finish it by" in told
    assert "search --resume results/failed, or leave it out" in told


def test_a_prior_has_the_same_metric(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    layout = write_study(results / "d0", [{"row": result_row()}])
    layout.write_info(replace(layout.read_info(), metric="val_loss", direction="min"))
    told = refused(capsys, "--prior", "d0", "--name", "s")
    assert "of the same metric, accuracy (max), got results/d0 of val_loss (min): leave it out, or search by" in told


def test_a_prior_needs_recorded_training(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    write_study(results / "d0", [{"row": result_row()}, {"row": result_row(saved=0.2)}])
    assert "results/d0 has no recorded training" in refused(capsys, "--prior", "d0", "--name", "s")


def test_a_study_keeps_its_prior(capsys: pytest.CaptureFixture[str], results: Path) -> None:
    layout = write_study(results / "s", [{"row": result_row()}])
    write_study(results / "d0", [{"row": result_row()}])
    layout.write_info(replace(layout.read_info(), sampler="auto"))
    assert "holds a study with prior [], not ['d0']" in refused(capsys, "--name", "s", "--prior", "d0")
    told = refused(capsys, "--resume", "s", "--prior", "d0")
    assert "so it takes no --prior" in told


def trained_by(made: StudySearch, folder: Path, count: int) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """Configuration and last row of the next trials of a search, by their numbers."""
    found = {}
    for number in range(count):
        suggested = made.suggest(f"t{number}")
        assert isinstance(suggested, dict)
        with SharedRun(TrialConfig(**suggested["config"]), Sharing(tree=folder / "tree", budget_bytes=0)) as shared:
            while not shared.finished:
                last = shared.train_epoch()
        found[suggested["trial"]] = suggested["config"], last
        made.on_trial_complete(f"t{number}", last)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_what_is_read_are_the_ended_runs_as_shares(tmp_path: Path) -> None:
    made = learning(tmp_path, lengths="1.0,0.5")
    trained = trained_by(made, tmp_path, 4)
    made.suggest("runs on")
    found = study_as_prior(Layout(tmp_path), ACCURACY, 0.02)
    trace = load_trace(tmp_path, epochs=4)
    baseline = made.trials.baseline_row()
    assert baseline is not None
    assert len(found.runs) == 4
    for run, number in zip(found.runs, sorted(trained), strict=True):
        config, row = trained[number]
        assert run.ended == config["epochs"] / 4
        assert run.loss == pytest.approx(baseline["accuracy"] - row["accuracy"])
        assert run.saved == pytest.approx(1 - row["executed_flops"] / baseline["dense_flops"])
        events = json.loads(row["stop_events"] or "[]")
        assert [when * 32 for when, _ in run.stops] == pytest.approx([event["iteration"] for event in events])
        assert [depth for _, depth in run.stops] == [Depths(trace).of(event["layer"]) for event in events]
    assert any(run.stops for run in found.runs)
    assert [t.user_attrs["role"] for t in made.trials.all()].count(CUT) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_what_cannot_be_used_takes_nothing_from_what_can(results: Path) -> None:
    """Runs of all studies together are bounded, of those that are used."""
    (results / "old").mkdir(parents=True)
    trained_by(learning(results / "old"), results / "old", 3)
    for number in range(MOST_RUNS // 2):
        write_study(results / f"failed{number}", [{}])
    arguments = argparse.Namespace(prior=None, results=str(results))
    (earlier,) = earlier_studies(arguments, search_spaces.load("auto_thresholds"), ACCURACY, 0.01)
    assert len(earlier.prior.runs) == 3
    # A search that was stopped before it had stored its prior reads it when it begins again.
    options = SearchOptions(name="new", prior=["old"], workload="tiny", epochs=4, results=results)
    layout = write_study(results / "new", [{}])
    layout.write_info(replace(layout.read_info(), prior=["old"]))
    (stored,) = read_priors(options)
    assert stored == earlier.prior.to_dict()
    layout.write_info(replace(layout.read_info(), prior_runs=[stored]))
    assert read_priors(options) == []


def test_every_study_keeps_runs_at_both_ends_of_what_they_save() -> None:
    runs = [PriorRun(stops=(), ended=1.0, saved=saved / 10, loss=0.0) for saved in range(10)]
    prior = PriorStudy.of("a", runs, 0.9, ACCURACY, 0.01)
    assert thinned(prior, 1) == prior
    kept = thinned(prior, MOST_RUNS // 3)
    assert [run.saved for run in kept.runs] in ([0.0, 0.4, 0.9], [0.0, 0.5, 0.9])
    assert kept.baseline == prior.baseline
    assert len(thinned(prior, 2 * MOST_RUNS).runs) == 1
