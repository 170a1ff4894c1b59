"""Searches by a metric of the user's own, from the command line to the answer, on a real Ray."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from user_factories import HEAD

import analysis
import tune_cac
from analysis.io.study_files import STUDY_NAME, Layout
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged
from trainables.training.run import TrainingRun
from tune_cac.cli.main import main

pytestmark = pytest.mark.slow

#: A regression whose metric is its error, or the negative of it.
FACTORY = (
    HEAD
    + """
def error(model, batches):
    hits = [(model(x).argmax(1) == y).float() for x, y in batches]
    losses = [torch.nn.functional.cross_entropy(model(x), y, reduction="none") for x, y in batches]
    return float(torch.cat(losses).mean()), float(torch.cat(hits).mean())

def make(gain: bool = False):
    name, sign = ("gain", -1) if gain else ("cost", 1)
    def evaluate(model, batches, device):
        loss, hits = error(model, batches)
        return {name: sign * loss, "hits": hits}
    return {
        **parts(), "evaluate": evaluate, "metric": name, "direction": "max" if gain else "min", "unit": "nats",
        "test": DataLoader(data(2, 20), batch_size=8), "epochs": 4,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=0.05),
    }
"""
)

SCRIPT = """
import json, os
import torch, tune_cac
torch.manual_seed(0)
x = torch.randn(120, 6)
y = x @ torch.randn(6, 1)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
optimizer = tune_cac.gradskip.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.05, model=model)
for epoch in range(3):
    for start in range(0, 100, 10):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[start : start + 10]), y[start : start + 10]).backward()
        optimizer.step()
    with torch.no_grad():
        wrong = model(x[100:]) - y[100:]
    near = (wrong.abs() < 1).float().mean()
    tune_cac.report(rmse=wrong.square().mean().sqrt(), mae=wrong.abs().mean(), accuracy=near, rank=0, epoch=epoch + 1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user, with the factory and the script."""
    (tmp_path / "errors_of_mine.py").write_text(FACTORY)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.thorough
def test_a_minimised_study_is_the_mirror_image_of_one_with_its_negative(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name in ("cost", "gain"):
        found[name] = tune_cac.search(
            workload="errors_of_mine:make", workload_options=[f"gain={name == 'gain'}"], name=name, trials=7,
            allowed_drop="5%", concurrency=1, results=folder / "results",
        )  # fmt: skip
    cost, gain = (found[name].trials for name in ("cost", "gain"))
    assert len(cost) == len(gain) > 7  # with controls
    for one, other in (("cost", "gain"), ("test_cost", "test_gain")):
        np.testing.assert_array_equal(cost[one], -gain[other])
    for column in ("compute_saved", "hits", "test_hits", "train_loss", "role", "stop_events", "CAC_VAR_START_THR"):
        same = [side[column].astype(object).fillna("").tolist() for side in (cost, gain)]
        assert same[0] == same[1], column
    np.testing.assert_array_equal(cost["cost_drop"], gain["gain_drop"])
    rankings = [found[name].ranking for name in ("cost", "gain")]
    for column in ("trial", "within_drop", "on_front"):
        assert rankings[0][column].tolist() == rankings[1][column].tolist(), column
    for name, direction in (("cost", "MINIMIZE"), ("gain", "MAXIMIZE")):
        journal = JournalStorage(JournalFileBackend(str(Layout(found[name].folder).journal)))
        study = optuna.load_study(study_name=STUDY_NAME, storage=journal)
        assert [way.name for way in study.directions] == [direction, "MAXIMIZE"]
        assert study.metric_names == [name, "compute_saved"]
    # Nothing that a user reads speaks of an accuracy.
    assert main(["report", str(found["cost"].folder)]) == 0
    said = capsys.readouterr()
    written = [path.read_text() for path in found["cost"].folder.glob("*.*") if path.suffix in (".md", ".env", ".csv")]
    page = (found["cost"].folder / "report.html").read_text()
    own = page[page.index("<header>") : page.rindex("<script>")]
    for text in (said.out, said.err, own, *written):
        assert "accurac" not in text.lower()
        assert " points" not in text
    assert "nats" in said.out
    assert "cost" in analysis.history(found["cost"].folder).columns


@pytest.mark.thorough
def test_a_script_whose_last_value_is_no_number_fails_by_its_name(
    folder: Path, one_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = """echo '{"val_loss": NaN, "step": 10, "compute_saved": 0.0}'"""
    given = ["--metric", "val_loss", "--trials", "1", "--retries", "0", "--no-controls", "--name", "n"]
    assert main(["search", "--script", command, *given]) == 1
    assert "the val_loss is nan in the last report" in capsys.readouterr().err
    given = ["--metric", "r2", "--trials", "1", "--retries", "0", "--name", "r"]
    assert main(["search", "--script", f"{sys.executable} train.py", *given]) == 1
    assert 'such as {"r2": 0.91, "step": 100}' in capsys.readouterr().err  # the line that would report it


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "f1"], "unknown metric of workload errors_of_mine:make 'f1': Valid: cost, hits, val_loss"),
        (["--direction", "max"], "--direction must be min for the metric cost, got max"),
        (["--allowed-drop", "-1"], "the allowed .* must be .*, got -1"),
        (["--metric", "train_loss"], "the metric must have a name of its own"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_starts(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", "--workload", "errors_of_mine:make", *arguments, "--trials", "2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not (folder / "results").exists()


def test_the_mean_loss_is_a_metric_of_every_workload_with_batches(folder: Path) -> None:
    config = TrialConfig(workload="errors_of_mine:make", epochs=1, method="none", metric="val_loss", direction="min")
    with TrainingRun(config) as run:
        row = run.train_epoch()
        assert row["quality"] == pytest.approx(json.loads(row["further_metrics"])["cost"], rel=1e-5)
        assert row["test_quality"] != row["quality"]


def test_a_metric_that_is_undefined_in_one_epoch_ends_a_trial_only_in_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrialConfig(workload="errors_of_mine:make", epochs=2, method="none")
    with TrainingRun(config) as run:
        values = iter([math.nan, 0.5, 0.5])
        monkeypatch.setattr(run.workload, "evaluate", lambda *_: next(values))
        assert math.isnan(run.train_epoch()["quality"])
        assert run.train_epoch()["quality"] == 0.5
    with TrainingRun(config) as run:
        values = iter([0.5, math.nan, 0.5])
        run.train_epoch()
        with pytest.raises(TrainingDiverged, match="the cost is nan in epoch 2"):
            run.train_epoch()


@pytest.mark.thorough
@pytest.mark.parametrize("space", ["frozen_prefix", "auto_thresholds"])
def test_a_regression_is_searched_by_its_loss(
    space: str, folder: Path, one_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "diabetes.py").write_text((Path(__file__).parents[1] / "support" / "diabetes.py").read_text())
    given = ["--workload", "diabetes:make", "--allowed-drop", "20%", "--trials", "3", "--seeds", "1", "--name", "s"]
    assert main(["search", "--space", space, *given]) == 0
    trials = analysis.load("results/s")
    assert (trials["status"] == "completed").all()
    assert trials["val_loss"].between(0.2, 1.5).all()  # of targets with variance 1
    np.testing.assert_allclose(trials["val_loss_drop"], trials["val_loss"] - trials["val_loss"].iloc[0])
    assert (trials["compute_saved"] > 0).any()
    said = capsys.readouterr()
    texts = [said.out, said.err, *(Path("results/s", name).read_text() for name in ("best.env", "report.md"))]
    assert not re.search("accurac|points", "".join(texts))
    assert "val_loss" in said.out


TRAINER = """
import torch
from tune_cac.integrations.trainer_skip import TrainerSkip  # as the callbacks of trainers use it

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.1)
skip, x = TrainerSkip(None), torch.randn(20, 3)
skip.begin(optimizer, model, steps=lambda: 0, total_steps=40)
for epoch in range(2):
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    skip.take({"f1": 0.9 - float(loss), "val_loss": float(loss)}, "f1", "max")
    skip.flush()
skip.end(early=False)
"""


@pytest.mark.thorough
def test_a_trainers_own_metric_is_taken_where_none_is_asked_for(
    folder: Path, one_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "trainer.py").write_text(TRAINER)
    given = ["--script", f"{sys.executable} trainer.py", "--trials", "1", "--no-controls", "--name", "s"]
    assert main(["search", *given]) == 0
    assert "the script's trainer chooses by f1: searching by that" in capsys.readouterr().err
    info = Layout(folder / "results" / "s").read_info()
    assert (info.metric, info.direction) == ("f1", "max")
    assert analysis.load(folder / "results" / "s")["status"].tolist() == ["completed"]
