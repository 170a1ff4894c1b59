"""Controls and confirmation by command, on real Ray and a real journal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands_run import run_here
from one_seed import one_seed
from runs import assert_equals_alone, finish

import analysis
from analysis.io.study_files import Layout
from analysis.metrics.ranking import SHORTER, control_line
from analysis.presentation.summary_text import config_of
from trainables.training.run import TrainingRun
from tune_cac.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]


def searched(folder: Path, *arguments: str) -> str:
    """A search, named ``s``, whose settings save something at any price in accuracy; what it printed."""
    done = run_here(
        folder, "search", "--space", "manual_layers", "--allowed-drop", "0.9", "--name", "s", "--lengths", "1.0",
        *arguments,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_controls_are_trained_beside_the_trials(tmp_path: Path) -> None:
    printed = searched(tmp_path, "--trials", "4", "--epochs", "10")
    study = tmp_path / "results" / "s"
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
    assert last["quality"] == row["accuracy"]
    assert last["executed_flops"] == row["executed_flops"] == last["dense_flops"]
    assert len(control_line(trials)) == 6
    assert printed.splitlines()[0].endswith("shorter")
    assert "## Controls" in Layout(study).report.read_text()


def killed_after(ended: int, folder: Path, *arguments: str) -> None:
    """Start a command and kill it, as a machine that loses power does, when so many of its runs have ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tune_cac", *one_seed(arguments)], cwd=folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(f"[{ended}/"):
            process.kill()
            break
    assert process.wait(timeout=60) == -signal.SIGKILL, said


@pytest.mark.thorough
def test_confirm_trains_fresh_seeds_and_goes_on_after_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searched(tmp_path, "--trials", "3", "--epochs", "4", "--no-controls")
    study = tmp_path / "results" / "s"
    arguments = ("confirm", "s", "--top", "1", "--seeds", "3")
    killed_after(3, tmp_path, *arguments)
    child = Layout(study).confirmation
    before = analysis.load(child.root)
    kept = before[before["status"] == "completed"]
    assert 3 <= len(kept) < 6
    done = run_here(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    trials = analysis.load(child.root)
    ended = trials[trials["status"] == "completed"]
    assert sorted(zip(ended["role"], ended["seed"], strict=True)) == [
        (role, seed) for role in ("baseline", "candidate") for seed in (1, 2, 3)
    ]
    assert set(kept["trial"]) <= set(ended["trial"])  # what had ended is not trained again
    best = analysis.rank(analysis.load(study), allowed_drop=0.9).iloc[0]
    assert ended["candidate"].dropna().unique().tolist() == [best["trial"]]
    for _, row in ended[ended["seed"] == 3].iterrows():
        assert_equals_alone(row)
    # The drop is between the runs of one seed.
    ended = ended.sort_values(["role", "seed"])
    drop = ended["test_accuracy"][:3].to_numpy() - ended["test_accuracy"][3:].to_numpy()
    assert ended["test_accuracy_drop"][3:].tolist() == pytest.approx(drop.tolist())
    assert "on average over 3 seeds" in done.stdout  # nearly everything may be lost here
    answer = Layout(study).best.read_text()
    assert "# Confirmed on fresh seeds." in answer
    assert "## Confirmation" in Layout(study).report.read_text()
    assert main(["report", str(study)]) == 0
    assert "on average over 3 seeds" in capsys.readouterr().out
    assert "Confirmation on fresh seeds" in Layout(study).page.read_text()
