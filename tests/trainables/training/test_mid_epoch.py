"""A run saved in the middle of an epoch goes on bit for bit, random generators included."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import MEASURED, finish, without

from trainables.config import TrialConfig
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE
from trainables.runtime.isolation import generators_state, set_generators
from trainables.training import run as run_module
from trainables.training.run import TrainingRun

STOPS: dict[str, Any] = {"CAC_STOP_LAYER_NUM": (3, 9), "CAC_STOP_LAYER_ITR": (4, 13), "CAC_BRAKING_DISTANCE": 5}


def ended(run: TrainingRun) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    return without(finish(run), MEASURED), [*run.model.state_dict().values()]


@cache
def unbroken(config: TrialConfig) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    with TrainingRun(config) as alone:
        rows, weights = ended(alone)
        return rows, [weight.clone() for weight in weights]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 5, 9, 10, 16])  # braking is 4..8 and 13..17; an epoch has 10 steps
def test_a_run_saved_at_any_step_goes_on_bit_for_bit(step: int, tmp_path: Path) -> None:
    config = TrialConfig(epochs=3, **STOPS)
    rows, weights = unbroken(config)
    with TrainingRun(config) as run:
        while run.step < step:
            run.begin_epoch()
            while not run.epoch_is_trained and run.step < step:
                run.train_step()
            if run.epoch_is_trained:
                run.end_epoch()
        run.save(tmp_path)
    with TrainingRun(config) as again:
        again.load(tmp_path)
        assert again.step == step
        rows_after, weights_after = ended(again)
    assert rows_after == rows[-len(rows_after) :]
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_after, strict=True))
    assert torch.load(tmp_path / CHECKPOINT_FILE, weights_only=True)["config"] == config.to_dict()


def test_all_generators_are_put_back(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    random.gauss(0, 1)
    np.random.standard_normal()  # leaves a cached second value
    cpu = torch.device("cpu")
    torch.save(generators_state(cpu), tmp_path / "state.pt")
    drawn = [random.gauss(0, 1), random.random(), *np.random.standard_normal(3), *torch.rand(3).tolist()]
    set_generators(torch.load(tmp_path / "state.pt", weights_only=True), cpu)
    assert [random.gauss(0, 1), random.random(), *np.random.standard_normal(3), *torch.rand(3).tolist()] == drawn


def test_the_training_time_stands_still_while_a_run_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    with TrainingRun(TrialConfig(method="none", epochs=1)) as run:
        run._train_time_before_s, run.cost = 5.0, SimpleNamespace(counting_time_s=0.0)  # type: ignore[assignment]
        monkeypatch.setattr(run_module.time, "perf_counter", lambda: now_s[0])
        with run.untimed():
            now_s[0] = 3.0
        now_s[0], run.cost.counting_time_s = 10.0, 2.0
        assert run.train_time_s == 5.0 + 7.0 - 2.0  # counting is no training
        run.pause()
        now_s[0] = 20.0
        assert run.train_time_s == 10.0
