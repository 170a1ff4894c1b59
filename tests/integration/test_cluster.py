"""A search on several nodes that share the study's storage. The nodes are Ray's own, all on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands_run import Run
from runs import assert_equals_alone
from studies import result_row, write_study

import analysis
from trainables.config import TrialConfig

pytestmark = pytest.mark.slow


def manual(*stops: int) -> dict[str, Any]:
    return TrialConfig(epochs=12, CAC_STOP_LAYER_NUM=(2, 5), CAC_STOP_LAYER_ITR=stops).to_dict()


@pytest.mark.thorough
def test_trials_on_two_nodes_share_training(two_nodes: str, tune_cac_command: Run, tmp_path: Path) -> None:
    """A confirmation: its first two runs begin at once, so that both nodes are used from the start."""
    layout = write_study(
        tmp_path / "results" / "s",
        [
            {"row": result_row(), "config": TrialConfig(method="none", epochs=12).to_dict()},
            *({"row": result_row(saved=last / 200), "config": manual(60, last)} for last in (70, 80)),
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


SENT = """
import pathlib, sys, ray
from tune_cac.ray_backend.session import ray_session
with ray_session(cpus=1, modules=[pathlib.Path(path) for path in sys.argv[1:]]):
    @ray.remote
    def home():
        import sent_module
        import sent_package.part
        return sent_module.__file__, sent_package.part.VALUE
    print(*ray.get(home.remote()))
"""


@pytest.mark.thorough
def test_modules_of_ones_own_are_sent_to_the_nodes(two_nodes: str, tmp_path: Path) -> None:
    """They lie where no process of the cluster looks."""
    (tmp_path / "sent_module.py").write_text("")
    (tmp_path / "sent_package").mkdir()
    (tmp_path / "sent_package" / "part.py").write_text("VALUE = 7\n")
    done = subprocess.run(
        [sys.executable, "-c", SENT, str(tmp_path / "sent_module.py"), str(tmp_path / "sent_package")],
        env={**os.environ, "RAY_ADDRESS": two_nodes}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    home, value = done.stdout.split()[-2:]
    assert "py_modules" in home
    assert value == "7"
