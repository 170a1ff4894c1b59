"""A run over two processes is the run of one process: real processes over gloo, against `TrainingRun`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import parallel_run_worker
import pytest
import torch
from plain_workload import Plain

from trainables.config import TrialConfig
from trainables.registry import WORKLOADS, Entry
from trainables.training.run import TrainingRun

#: Equal but for the order of sums.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
STOPS = {"method": "gradskip", "CAC_STOP_LAYER_NUM": [1, 3], "CAC_STOP_LAYER_ITR": [5, 14]}
#: Clipped by the norm of the whole batch's gradient, in every process alike.
RECIPE = {"clip_grad_norm": 0.2, "activation_checkpointing": "blocks", "channels_last": True, "fused_optimizer": True}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [{**STOPS, **RECIPE}, *(pytest.param(m, marks=pytest.mark.thorough) for m in ({"method": "none"}, STOPS))]
)
def test_two_processes_train_what_one_does(
    method: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        WORKLOADS, "plain", Entry(home=f"{Plain.__module__}:Plain", default_epochs=3, description="a test's")
    )
    config = {"workload": "plain", "epochs": 3, **method}
    out = tmp_path / "out"
    command = [sys.executable, parallel_run_worker.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), str(out), json.dumps({**config, "workers": 2})],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    with TrainingRun(TrialConfig.from_mapping(config)) as run:
        alone = [run.train_epoch() for _ in range(3)]
        weights = {name: value.clone() for name, value in run.model.state_dict().items()}
        gradient_bytes = alone[-1]["gradient_bytes"]
    first, second = (json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(2))
    states = [torch.load(out.with_suffix(f".{rank}.pt"), weights_only=True) for rank in range(2)]
    for name, value in weights.items():
        torch.testing.assert_close(states[0]["through"][name], value, **CLOSE)
        assert torch.equal(states[0]["through"][name], states[1]["through"][name])
        assert torch.equal(states[0]["through"][name], states[0]["continued"][name])
    for row, one in zip(first["through"], alone, strict=True):
        assert row["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
        assert row["step"] == one["step"]
        assert row["quality"] == pytest.approx(one["quality"], abs=0.02)
        assert row["stopped_through"] == one["stopped_through"]
    # The last batch of an epoch has one row; the process without one computes it too, and that is executed as well.
    spare = 3 * one_row_flops(config) if method == {"method": "none"} else 0
    if spare:
        assert first["through"][-1]["executed_flops"] == alone[-1]["executed_flops"] + spare
    assert first["through"][-1]["compute_saved"] == pytest.approx(alone[-1]["compute_saved"], rel=0.05, abs=0.005)
    assert first["through"][-1]["gradient_bytes"] == 2 * gradient_bytes
    assert second["through"][-1]["executed_flops"] == first["through"][-1]["executed_flops"]
    measured = ("wall_time_s", "train_time_s", "train_energy_j", "peak_memory_bytes")
    plain = [{k: v for k, v in row.items() if k not in measured} for row in first["through"][1:]]
    assert [{k: v for k, v in row.items() if k not in measured} for row in first["continued"]] == plain


def one_row_flops(config: dict[str, Any]) -> int:
    """A dense step on one row."""
    with TrainingRun(TrialConfig.from_mapping(config)) as run:
        *_, last = run.workload.train_batches(0, 0)
        assert len(last[0]) == 1
        cost: int = run.cost.dense_step(last).flops
        return cost
