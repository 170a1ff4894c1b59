"""One's own training as a factory or as images, from the command line to the answer, on a real Ray."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import residual_factory
from commands_run import Run
from image_files import noise, write_folder, write_parquet
from runs import assert_equals_alone, rows_alone
from thorough import rest_thorough

import analysis
import tune_cac
from analysis.presentation.summary_text import config_of
from trainables.config import TrialConfig
from trainables.training.run import TrainingRun
from tune_cac.cli.main import main

pytestmark = pytest.mark.slow

FACTORY = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shapes_beside

def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1), labels)

def make_model():
    return nn.Sequential(
        nn.Conv2d(1, shapes_beside.WIDTH, 3, padding=1), nn.ReLU(),
        nn.Conv2d(shapes_beside.WIDTH, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

def make_workload(batch: int = 10):
    return {
        "model": make_model,
        "train": DataLoader(data(0, 60), batch_size=batch, shuffle=True),
        "validation": DataLoader(data(1, 30), batch_size=30),
        "epochs": 3,
    }
"""


def write_factory(folder: Path) -> None:
    (folder / "own_project").mkdir()
    (folder / "own_project" / "__init__.py").touch()
    (folder / "own_project" / "training.py").write_text(FACTORY)
    (folder / "shapes_beside.py").write_text("WIDTH = 4\n")


HIDDEN = """
import numpy as np

class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.random = np.random.default_rng(0)
        self.clean = data(0, 60)
    def __len__(self):
        return 60
    def __getitem__(self, number):
        image, label = self.clean[number]
        return image + torch.from_numpy(self.random.normal(size=image.shape)).float(), label

def make_noisy():
    return {**make_workload(), "train": DataLoader(Noisy(), batch_size=10, shuffle=True)}
"""


@pytest.mark.thorough
def test_a_data_set_with_a_generator_of_its_own_is_trained_as_if_each_trial_were_alone(
    tune_cac_command: Run, tmp_path: Path
) -> None:
    """Before, it was shared, and unshared its result depended on what its process had trained before."""
    write_factory(tmp_path)
    (tmp_path / "own_project" / "noisy.py").write_text(FACTORY + HIDDEN)
    name = "own_project.noisy:make_noisy"
    done = tune_cac_command(
        "search", "--workload", name, "--trials", "3", "--name", "s", "--concurrency", "1", "--no-controls"
    )
    assert done.returncode == 0, done.stderr
    assert f"training {name} does not repeat: " in done.stderr
    assert "so trials share nothing, and each has a process of its own" in done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    assert trials["search_flops"].tolist() == trials["executed_flops"].tolist()
    for _, row in trials.iloc[1:].iterrows():  # the baseline is recorded, and draws on the data before it trains
        config = json.dumps(config_of(row).to_dict())
        alone = subprocess.run(
            [sys.executable, "-c", ALONE, config], cwd=tmp_path, text=True, capture_output=True, check=True
        )
        assert json.loads(alone.stdout.splitlines()[-1]) == [row["train_loss"], row["accuracy"]]


ALONE = """
import json, sys
sys.path.insert(0, ".")
from trainables.config import TrialConfig
from trainables.training.run import TrainingRun

with TrainingRun(TrialConfig.from_mapping(json.loads(sys.argv[1]))) as run:
    while not run.finished:
        row = run.train_epoch()
print(json.dumps([row["train_loss"], row["quality"]]))
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_two_workers_in_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = tune_cac.search(
        space="manual_layers", trials=2, epochs=2, workers_per_trial=2, name="s", controls=False, concurrency=1
    )
    trials = found.trials
    assert trials["status"].tolist() == ["completed"] * 2, trials["error"].tolist()
    assert trials["workers"].tolist() == [2, 2]
    with TrainingRun(TrialConfig(method="none", epochs=2)) as run:
        rows = [run.train_epoch() for _ in range(2)]
    # Rows of a batch are dealt out, none twice: all workers together execute what one would.
    assert trials.loc[0, "executed_flops"] == rows[-1]["executed_flops"]
    assert trials.loc[0, "gradient_bytes"] == 2 * rows[-1]["gradient_bytes"]
    assert trials.loc[0, "step"] == rows[-1]["step"]
    assert 0 < trials.loc[0, "accuracy"] < 1
    assert trials.loc[1, "compute_saved"] > 0


def test_a_factory_in_the_working_directory_is_searched_by_its_loss(tune_cac_command: Run, tmp_path: Path) -> None:
    write_factory(tmp_path)
    done = tune_cac_command(
        "search", "--workload", "own_project.training:make_workload", "--option", "batch=20", "--trials", "2", "--name",
        "s", "--no-controls", "--concurrency", "1", "--metric", "val_loss", "--allowed-drop", "2%",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    assert trials["status"].tolist() == ["completed"] * 2
    assert (trials["val_loss_drop"] == trials["val_loss"] - trials["val_loss"].iloc[0]).all()
    assert trials["step"].tolist() == [9] * 2
    assert (tmp_path / "results" / "s" / "tree").is_dir()
    report = (tmp_path / "results" / "s" / "report.md").read_text()
    assert "own_project.training:make_workload" in report
    settings = (tmp_path / "results" / "s" / "best.env").read_text()
    assert not re.search("accurac|points", done.stdout + done.stderr + report + settings)


@pytest.mark.usefixtures("one_ray")
@pytest.mark.parametrize("form", rest_thorough(["folders", "parquet"]))
def test_images(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 24), ("test", 9)):
        labels = [number % 3 for number in range(count)]
        if form == "parquet":
            write_parquet(tmp_path / "data" / f"{split}-00000.parquet", list(noise(count, 8)), labels)
        else:
            write_folder(tmp_path / "data" / split, list(noise(count, 8)), [f"class{label}" for label in labels])
    code = main(
        ["search", "--workload", "images", "--data", "data", "--model", "resnet20", "--option", "batch_size=8",
         "--space", "agp", "--trials", "2", "--epochs", "3", "--name", "s", "--no-controls", "--concurrency", "1"]
    )  # fmt: skip
    assert code == 0
    trials = analysis.load(tmp_path / "results" / "s")
    assert trials["status"].tolist() == ["completed"] * 2
    assert trials["test_accuracy"].notna().all()
    assert len(list((tmp_path / "results" / ".images").glob("*/meta.json"))) == 1  # decoded once


def test_how_much_of_a_network_to_freeze(
    tmp_path: Path, tune_cac_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A residual network as a factory: depth by bisection, what is frozen computed once a sample, a second seed."""
    shutil.copy(residual_factory.__file__, tmp_path)
    workload = ("--workload", "residual_factory:make", "--option", "how=trained")
    asked = ("--name", "s", "--allowed-drop", "0.9", "--seeds", "2")
    done = tune_cac_command("search", "--space", "frozen_prefix", *workload, *asked)
    assert done.returncode == 0, done.stderr
    assert "all that the space tries one after the other is done" in done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    assert set(trials["status"]) == {"completed"}
    prefixes = trials[trials["CAC_PREFIX_MODE"] == "eval"]
    assert 2 <= len(prefixes) <= 10
    assert (prefixes["forward_cache_mb"] > 0).all()
    controls = trials["role"] == "control"
    for _, trial in trials[~controls].iterrows():
        assert_equals_alone(trial)
    best = analysis.best(analysis.rank(trials, allowed_drop=0.9))
    assert best is not None
    elsewhere = trials.index[trials["control"] == "other seed"]
    own = trials.loc[elsewhere[trials.loc[elsewhere, "CAC_STOP_LAYER_NUM"] == best["CAC_STOP_LAYER_NUM"]]]
    assert 1001 in own["seed"].tolist()
    assert own.iloc[0]["accuracy"] == rows_alone(config_of(own.iloc[0]))[-1]["quality"]
    baseline = trials[(trials["control"] == "other seed") & (trials["candidate"] == 0)].iloc[0]
    lost = (baseline[splits := ["accuracy", "test_accuracy"]] - own.iloc[0][splits]).mean()
    answer = json.loads((tmp_path / "results" / "s" / "study.json").read_text())["answer"]
    assert (answer["trial"], answer["seeds"], answer["loss"]) == (best["trial"], 1, pytest.approx(lost))
    assert answer["low"] < lost < answer["high"]
    assert "points on one further seed (95 %: " in done.stdout
    cut = trials.index[controls].drop(elsewhere)  # to its compute, with its norms, on both seeds
    assert set(trials.loc[cut, "epochs"]) == {max(1, int((1 - best["compute_saved"]) * 4))}
    assert trials.loc[cut, "seed"].tolist() == [0, 1001]
    assert "Simply training " in done.stdout
    assert f"reeze all up to {json.loads(best['stop_events'])[0]['name']}" in done.stdout
    sourced = (tmp_path / "results" / "s" / "best.env").read_text()
    for name, value in re.findall(r"^export (\w+)=(\S+)$", sourced, re.MULTILINE):
        monkeypatch.setenv(name, value)
    again = tune_cac_command("trial", *workload)
    assert f"validation accuracy {best['accuracy']:.4f}" in again.stdout
    assert re.search(rf"^ +{best['epochs']} ", again.stdout, re.MULTILINE)
    assert ("Holding all norms alone" in done.stdout) == (best["CAC_NORM_STATISTICS"] == "hold_all")
    assert ("Holding all norms alone" in sourced) == ("Holding all norms alone" in done.stdout)
