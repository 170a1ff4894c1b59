"""The conditional spaces and held values on real Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commands_run import run_here
from studies import study_of

import analysis
from analysis.io.study_files import Layout
from analysis.presentation.best_env import best_env
from analysis.presentation.summary_text import config_of
from trainables.config import TrialConfig
from trainables.gradskip.variables import RULES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]


def searched(done: subprocess.CompletedProcess[str], folder: Path) -> list[TrialConfig]:
    """The configurations of a study's trials, all of which completed."""
    assert done.returncode == 0, done.stdout + done.stderr
    trials = analysis.load(folder)
    assert set(trials["status"]) == {"completed"}
    return [config_of(row) for _, row in trials.iterrows()]


@pytest.mark.thorough
def test_every_rule_trains_and_its_answer_can_be_written(tmp_path: Path) -> None:
    done = run_here(
        tmp_path, "search", "--space", "stop_rules", "--trials", "16", "--epochs", "4", "--name", "s",
        "--concurrency", "2", "--no-controls",
    )  # fmt: skip
    study = tmp_path / "results" / "s"
    baseline, first, *others = searched(done, study)
    assert baseline.method == "none"
    assert (first.CAC_RULE, first.CAC_WHOLE_UNITS) == ("variance", True)
    # In so short a run the variance rule's suggestions do nothing, so a search passes over them.
    rules = {config.CAC_RULE for config in (first, *others)}
    assert set(RULES) - rules <= {"linear", "freezeout"}  # whose outcomes are known, and need not be worth a training
    assert rules & {"linear", "freezeout"}
    for trial in study_of(study).trials[1:]:
        branch = trial.params["CAC_RULE"] + "."
        assert all(name.startswith(branch) for name in trial.params if name != "CAC_RULE")
    info = Layout(study).read_info()
    for _, row in analysis.rank(analysis.load(study)).iterrows():
        assert best_env(info, row, 0.005).startswith("# tune_cac: digits, 4 epochs, space stop_rules")
    told = done.stdout + (study / "report.md").read_text()
    assert "RULE=linear" in told or "RULE=freezeout" in told


@pytest.mark.thorough
def test_held_values_are_part_of_the_study(tmp_path: Path) -> None:
    study = tmp_path / "results" / "s"
    arguments = (
        "search", "--space", "braking_distance", "--epochs", "2", "--name", "s", "--concurrency", "1", "--no-controls",
    )  # fmt: skip
    held = ("--set", "CAC_VAR_START_THR=0.99", "--set", "CAC_WATCH=conv,linear")
    done = run_here(tmp_path, *arguments, "--trials", "3", *held)
    first_line = done.stderr.splitlines()[0]
    assert "1 at a time, on the CPU" in first_line
    assert first_line.endswith(", CAC_VAR_START_THR=0.99 CAC_WATCH=conv,linear fixed")
    baseline, *others = searched(done, study)
    assert baseline == TrialConfig(epochs=2, method="none")
    assert all((config.CAC_VAR_START_THR, config.CAC_WATCH) == (0.99, ("conv", "linear")) for config in others)
    refused = run_here(tmp_path, *arguments, "--trials", "1", "--set", "CAC_VAR_START_THR=0.98")
    assert refused.returncode == 2
    assert "CAC_VAR_START_THR=0.99 CAC_WATCH=conv,linear fixed, not CAC_VAR_START_THR=0.98" in refused.stderr
    added = searched(run_here(tmp_path, *arguments, "--trials", "1", *held), study)
    assert len(added) == 4
    # A study whose search was cut short: what is left is trained with the study's own held values.
    layout = Layout(study)
    text = layout.info.read_text()
    layout.info.write_text(text.replace('"trials": 4', '"trials": 5'))
    resumed = searched(run_here(tmp_path, "search", "--resume", "s"), study)
    assert len(resumed) == 5
    assert (resumed[-1].CAC_VAR_START_THR, resumed[-1].CAC_WATCH) == (0.99, ("conv", "linear"))
    assert "Fixed in every trial but the baseline: CAC_VAR_START_THR=0.99 CAC_WATCH=conv,linear." in (
        (study / "report.md").read_text()
    )
