"""Controls and confirmation by command, on real Ray and a real journal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import assert_equals_alone, finish

import analysis
from analysis.answer import config_of
from analysis.controls import RANDOM_STOPS, SHORTER, control_line
from analysis.layout import Layout
from trainables.training.run import TrainingRun
from tune_cac.cli import main

pytestmark = pytest.mark.slow


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tune_cac", *arguments], cwd=folder, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search with controls whose settings save something at any price in accuracy."""
    folder = tmp_path_factory.mktemp("confirming")
    done = command(
        folder, "search", "--space", "manual_layers", "--trials", "4", "--epochs", "10", "--allowed-drop", "0.9",
        "--name", "s",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "printed.txt").write_text(done.stdout)
    return folder / "results" / "s"


def test_controls_are_trained_beside_the_trials(study: Path) -> None:
    trials = analysis.load(study)
    controls = trials[trials["role"] == "control"]
    assert (trials["role"] != "control").sum() == 4
    assert controls["status"].unique().tolist() == ["completed"]
    shorter = controls[controls["control"] == SHORTER]
    assert shorter["epochs"].tolist() == [9, 8, 7, 6, 5]
    assert shorter["compute_saved"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    # Each is the dense run of its length, trained alone; its schedule is as long as it is.
    row = shorter.iloc[-1]
    with TrainingRun(config_of(row)) as run:
        last = finish(run)[-1]
    assert last["accuracy"] == row["accuracy"]
    assert last["executed_flops"] == row["executed_flops"] == last["dense_flops"]
    most = analysis.rank(trials, allowed_drop=0.9).iloc[0]["compute_saved"]
    stops = controls[controls["control"] == RANDOM_STOPS]
    assert len(stops) == 3
    assert stops["compute_saved"].tolist() == pytest.approx([most] * 3, abs=0.015)
    for _, row in stops.iterrows():
        assert_equals_alone(row)
    assert len(control_line(trials)) == 6
    assert "beats shorter" in (study.parents[1] / "printed.txt").read_text()
    assert "## Controls" in Layout(study).report.read_text()


def test_confirm_trains_fresh_seeds_and_goes_on_where_more_is_asked(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = command(study.parents[1], "confirm", "s", "--top", "1", "--seeds", "2")
    assert first.returncode == 0, first.stderr
    child = Layout(study).confirmation
    before = analysis.load(child.root)
    assert before["seed"].tolist() == [1, 2, 1, 2]
    assert before["role"].tolist() == ["baseline"] * 2 + ["candidate"] * 2
    best = analysis.rank(analysis.load(study), allowed_drop=0.9).iloc[0]
    assert before["candidate"].dropna().unique().tolist() == [best["trial"]]
    for _, row in before.iterrows():
        assert_equals_alone(row)
    # The drop is between the runs of one seed.
    drop = before["test_accuracy"][:2].to_numpy() - before["test_accuracy"][2:].to_numpy()
    assert before["test_accuracy_drop"][2:].tolist() == pytest.approx(drop.tolist())
    assert "at most" in first.stdout
    assert "confirmed over 2 seeds" in first.stdout  # nearly everything may be lost here
    answer = Layout(study).best.read_text()
    assert "# Confirmed on 2 fresh seeds and the test split: drop" in answer

    again = command(study.parents[1], "confirm", "s", "--top", "1", "--seeds", "3")
    assert again.returncode == 0, again.stderr
    after = analysis.load(child.root)
    assert after["seed"].tolist() == [1, 2, 1, 2, 3, 3]
    assert "2 runs" not in again.stderr.splitlines()[0]
    assert "[2/2]" in again.stderr
    assert main(["report", str(study)]) == 0
    assert "confirmed over 3 seeds" in capsys.readouterr().out
    assert "## Confirmation" in Layout(study).report.read_text()
