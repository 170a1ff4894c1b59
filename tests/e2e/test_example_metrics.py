"""Trainings in the forms of PyTorch's own examples, each as a script and as a factory, by the metric that is theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import analysis
from trainables.config import TrialConfig
from trainables.training.run import TrainingRun
from tune_cac.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
#: The flags of a search of each script, and the columns that it has then.
SCRIPTS = {
    "language_model": (["--metric", "val_loss", "--allowed-drop", "0.02"], ("val_loss", "perplexity")),
    "vae": (["--metric", "elbo_loss", "--allowed-drop", "1%"], ("elbo_loss",)),
    "adadelta": ([], ("accuracy", "nll")),
}
#: Most lines that a script changes for Gradient-Skip and a search.
MOST_CHANGED = 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_at_most_five_lines_are_changed(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    ours = [line for line in lines if "cac." in line or "TUNE_CAC" in line or "import tune_cac" in line]
    assert all(line.endswith("# tune_cac") for line in ours)
    assert len(ours) <= MOST_CHANGED


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_as_a_script(name: str, one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags, columns = SCRIPTS[name]
    command = f"{sys.executable} {EXAMPLES / name}.py"
    trials_of = "2" if name == "vae" else "1"  # the others' metric is seen in the baseline
    assert main(["search", "--script", command, *flags, "--trials", trials_of, "--no-controls", "--name", "s"]) == 0
    trials = analysis.load("results/s")
    assert trials[list(columns)].notna().all(axis=None)
    assert trials["dense_flops"].nunique() == 1
    assert (trials.loc[trials["role"] == "baseline", "compute_saved"] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_as_a_factory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    with TrainingRun(TrialConfig(workload=f"{name}:make", method="none", epochs=1)) as run:
        row = run.train_epoch()
        assert run.quality.name == SCRIPTS[name][1][0]
        assert run.quality.direction == ("max" if name == "adadelta" else "min")
        assert row["quality"] == pytest.approx(run.workload.quality_on(run.model, "validation", run.device))
    assert ("further_metrics" in row) == (name == "adadelta")
