"""A search on several nodes that share the study's storage. The nodes are Ray's own, all on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import two_nodes as two_nodes_script
from commands_run import Run
from runs import assert_equals_alone
from studies import result_row, write_study

import analysis
from trainables.config import TrialConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes with a processor each."""
    process = subprocess.Popen(
        [sys.executable, two_nodes_script.__file__],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        # Ray may print of its own before.
        yield next(line.strip() for line in process.stdout if re.fullmatch(r"[0-9.]+:[0-9]+\n", line))
    finally:
        process.communicate(timeout=60)


def manual(*stops: int) -> dict[str, Any]:
    return TrialConfig(epochs=12, CAC_STOP_LAYER_NUM=(2, 5), CAC_STOP_LAYER_ITR=stops).to_dict()


def test_trials_on_two_nodes_share_training(two_nodes: str, tune_cac_command: Run, tmp_path: Path) -> None:
    """A confirmation: its first two runs begin at once, so that both nodes are used from the start."""
    layout = write_study(
        tmp_path / "results" / "s",
        [
            {"row": result_row(), "config": TrialConfig(method="none", epochs=12).to_dict()},
            *({"row": result_row(saved=0.3), "config": manual(60, last)} for last in (70, 80)),
        ],
    )
    done = tune_cac_command(
        "confirm", "s", "--top", "2", "--seeds", "3", "--concurrency", "2", RAY_ADDRESS=two_nodes
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    study = layout.confirmation.root
    trials = analysis.load(study)
    assert trials["status"].tolist() == ["completed"] * 9
    assert trials["search_flops"].sum() < 0.7 * trials["executed_flops"].sum()
    for _, row in trials.iterrows():
        assert_equals_alone(row)
    # A node has one processor, so two processes are on two nodes.
    results = [json.loads(path.read_text().splitlines()[-1]) for path in study.glob("ray/*/*/result.json")]
    assert len({row["pid"] for row in results}) == 2


FACTORY = """
import pathlib
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from beside import SAMPLES

def make_workload(told: str):
    with open(told, "a") as file:
        file.write(__file__ + "\\n")
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=generator) + labels[:, None], labels)
    return {
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        "train": DataLoader(data, batch_size=10, shuffle=True),
        "validation": DataLoader(data, batch_size=10),
        "epochs": 2,
    }
"""


def test_modules_of_ones_own_are_sent_to_the_nodes(two_nodes: str, tune_cac_command: Run, tmp_path: Path) -> None:
    """What is beside the module and not imported, such as data, stays where it is."""
    (tmp_path / "own.py").write_text(FACTORY)
    (tmp_path / "beside.py").write_text("SAMPLES = 30\n")
    (tmp_path / "unrelated.py").write_text("1 / 0\n")
    told = tmp_path / "told.txt"
    done = tune_cac_command(
        "search", "--workload", "own:make_workload", "--option", f"told={told}", "--trials", "2", "--name", "s",
        "--no-controls", "--concurrency", "1", RAY_ADDRESS=two_nodes,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trials = analysis.load(tmp_path / "results" / "s")
    assert trials["status"].tolist() == ["completed"] * 2
    homes = {Path(line).parent for line in told.read_text().splitlines()}
    sent = homes - {tmp_path}
    assert sent  # a worker's own copy
    for home in sent:
        assert "py_modules" in str(home)
