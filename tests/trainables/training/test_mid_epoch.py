"""A run saved in the middle of an epoch goes on bit for bit, random generators included."""

from __future__ import annotations

import random
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import MEASURED, finish, without
from thorough import rest_thorough

from trainables.config import TrialConfig
from trainables.runtime import energy
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
@pytest.mark.parametrize("step", rest_thorough([5, 1, 9, 10, 16]))  # braking is 4..8 and 13..17; an epoch has 10 steps
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
        run.cost = SimpleNamespace(counting_time_s=0.0)  # type: ignore[assignment]
        run.clock.set(5.0)
        monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
        with run.untimed():
            now_s[0] = 3.0
        now_s[0], run.cost.counting_time_s = 10.0, 2.0
        assert run.train_time_s == 5.0 + 7.0 - 2.0  # counting is no training
        run.pause()
        now_s[0] = 20.0
        assert run.train_time_s == 10.0


def test_joules_are_those_of_training_steps_and_go_on_behind_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card_j = [1000.0]  # of other programs
    monkeypatch.setattr(run_module, "energy_j", lambda device: card_j[0])
    config = TrialConfig(epochs=2, method="none")
    with TrainingRun(config) as run:
        run.begin_epoch()
        while not run.epoch_is_trained:
            run.train_step()
            card_j[0] += 7
        steps, evaluate = run.step, run.workload.metrics_on
        monkeypatch.setattr(
            run.workload, "metrics_on", lambda *given: (card_j.__setitem__(0, card_j[0] + 50), evaluate(*given))[1]
        )
        assert run.end_epoch()["train_energy_j"] == 7 * steps  # none of the evaluation
        run.save(tmp_path)
    with TrainingRun(config) as again:
        again.load(tmp_path)
        card_j[0] += 50
        again.begin_epoch()
        card_j[0] += 3
        assert again.train_energy_j == 7 * steps + 3


def test_nvmls_counter_is_asked_by_the_cards_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        NVMLError=KeyError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-1": "card"}.__getitem__,
        nvmlDeviceGetTotalEnergyConsumption={"card": 2500}.__getitem__,  # millijoules
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(energy, "_nvml", energy._nvml.__wrapped__)
    assert (energy._card_energy_j("GPU-1"), energy._card_energy_j("GPU-2")) == (2.5, None)
    assert energy.energy_j(torch.device("cpu")) is None
