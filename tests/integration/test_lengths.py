"""The default search by command: cut dense runs, stops searched on them, an answer of fewer epochs, confirmed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from commands_run import Run, run_here
from runs import assert_equals_alone

import analysis
from analysis.io.layout import Layout
from analysis.metrics.controls import CUT, SHORTER, control_line
from analysis.presentation.length_text import EPOCHS_VARIABLE
from analysis.presentation.summary_text import config_of
from trainables.stage_tree.store import roots
from tune_cac.study.study_result import answer

pytestmark = pytest.mark.slow

EPOCHS = 10


@pytest.fixture(scope="module")
def study(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that may lose much, so that its answer is a cut run."""
    folder = tmp_path_factory.mktemp("lengths")
    done = run_here(
        folder, "search", "--trials", "6", "--epochs", str(EPOCHS), "--allowed-drop", "0.05", "--name", "s",
        "--concurrency", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "out.txt").write_text(done.stdout)
    (folder / "err.txt").write_text(done.stderr)
    return folder / "results" / "s"


def chosen(study: Path) -> pd.Series:
    """What the search hands out."""
    best = answer(Layout(study), allowed_drop=0.05).best
    assert best is not None
    return best


def test_cut_runs_are_results_and_stops_are_searched_on_them(study: Path) -> None:
    trials = analysis.load(study)
    assert set(trials["status"]) == {"completed"}
    cut = trials[trials["role"] == CUT]
    assert cut["epochs"].iloc[0] == 5  # half of ten
    assert set(cut["control"]) == {SHORTER}
    assert trials["role"].isin(["baseline", "published", "search"]).sum() <= 6
    settings = trials[(trials["role"] == "search") & trials["of_epochs"].notna()]
    assert len(settings) > 0
    assert set(settings["of_epochs"]) == {EPOCHS}
    dense = trials[trials["control"] == SHORTER]  # a still shorter one is a control alone
    assert len(roots(Layout(study).tree)) == 1 + dense["epochs"].nunique()
    for _, row in trials.iterrows():
        assert_equals_alone(row)
    line = control_line(trials)
    assert sorted(line["epochs"], reverse=True) == [EPOCHS, *sorted(dense["epochs"], reverse=True)]
    assert (trials.loc[trials["epochs"] < 5, "role"] == "control").all()  # less than half
    assert set(cut["trial"]) <= set(analysis.rank(trials, allowed_drop=0.05)["trial"])
    best = chosen(study)
    assert line["compute_saved"].max() >= best["compute_saved"] - 0.1  # a dense run was cut to its compute
    stops = trials[trials["control"] == "random stops"]
    assert set(stops["epochs"]) <= {best["epochs"]}


def test_the_answer_says_how_many_epochs_to_train(study: Path) -> None:
    best = chosen(study)
    assert best["epochs"] < EPOCHS
    with_stops = "" if best["method"] == "none" else ", with these stops"
    assert (
        f"compute (train {best['epochs']} of {EPOCHS} epochs{with_stops}) at "
        in (study.parents[1] / "out.txt").read_text()
    )
    assert f"EPOCHS={best['epochs']}" in (study.parents[1] / "out.txt").read_text()
    sourced = subprocess.run(
        ["sh", "-c", f". {study}/best.env; echo ${EPOCHS_VARIABLE}"], capture_output=True, text=True, check=True
    )
    assert sourced.stdout.strip() == str(config_of(best).epochs)
    page = run_here(study.parents[1], "report", "s")
    assert page.returncode == 0, page.stderr
    assert f"train {best['epochs']} of {EPOCHS} epochs" in Layout(study).page.read_text()


@pytest.mark.thorough
def test_a_confirmation_trains_as_many_epochs(study: Path) -> None:
    done = run_here(study.parents[1], "confirm", "s", "--top", "1", "--seeds", "3")
    assert done.returncode == 0, done.stderr
    best = chosen(study)
    again = analysis.load(Layout(study).confirmation.root)
    candidates = again[again["role"] == "candidate"]
    assert candidates["epochs"].tolist() == [best["epochs"]] * 3
    assert candidates["compute_saved"].to_numpy(float) == pytest.approx(best["compute_saved"], abs=0.1)
    for _, row in candidates.iterrows():
        assert_equals_alone(row)


def test_a_resumed_search_trains_nothing_more(study: Path) -> None:
    before = analysis.load(study)
    done = run_here(study.parents[1], "search", "--resume", "s")
    assert done.returncode == 0, done.stderr
    assert len(analysis.load(study)) == len(before)
    # Without the stage tree, which may be deleted then, what holds on other seeds is what it was known to be.
    layout = Layout(study)
    holds, answer = layout.read_info().holds, layout.best.read_text()
    assert holds
    shutil.rmtree(layout.tree)
    done = run_here(study.parents[1], "search", "--resume", "s")
    assert done.returncode == 0, done.stderr
    assert layout.read_info().holds == holds
    again = layout.best.read_text()
    assert again.splitlines()[:2] == answer.splitlines()[:2]
    assert re.findall("with a probability of .*", again) == re.findall("with a probability of .*", answer)


FACTORY = """
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

def data(seed, samples):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    return TensorDataset(torch.randn(samples, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1), labels)

def model():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(64, 3))

def make():
    return {
        "model": model,
        "train": DataLoader(data(0, 120), batch_size=10, shuffle=True),
        "validation": DataLoader(data(1, 90), batch_size=30),
        "test": DataLoader(data(2, 90), batch_size=30),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=0.01),
        "schedule": lambda optimizer, total_steps: MultiStepLR(optimizer, [12 * 7], gamma=0.1),
        "epochs": 10,
    }
"""


def test_cut_runs_begin_as_the_full_run_does_where_its_schedule_allows(
    tune_cac_command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dropping_rates.py").write_text(FACTORY)
    done = tune_cac_command(
        "search", "--workload", "dropping_rates:make", "--space", "manual_layers", "--trials", "4", "--name", "s",
        "--concurrency", "2", "--allowed-drop", "0.3", "--checkpoint-every", "0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    baseline, dense = trials.iloc[0], trials[trials["control"] == SHORTER]
    assert baseline["search_flops"] == baseline["executed_flops"]
    assert dense["epochs"].iloc[0] == 5
    # Of the full run, which is begun beside it, at least the checkpoints at epochs' starts are there: otherwise their
    # times follow from what they take, and on a busy machine there may be none.
    assert (dense["search_flops"] <= dense["executed_flops"] / dense["epochs"]).all()
    for _, row in trials.iterrows():
        assert_equals_alone(row)
