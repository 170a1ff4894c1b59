"""No process state reaches the next trial."""

from __future__ import annotations

import gc
import os
import random

import numpy as np
import pytest
import torch

from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged
from trainables.runtime.isolation import isolated
from trainables.training.run import TrainingRun
from trainables.workloads.digits import Digits


def process_state() -> dict[str, object]:
    return {
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "matmul": torch.get_float32_matmul_precision(),
    }


def test_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAC_VAR_START_THR", "0.5")
    before = process_state()
    with isolated(seed=3, threads=2):
        assert "CAC_VAR_START_THR" not in os.environ
        assert torch.get_num_threads() == 2
        os.environ["LEFT_BY_A_TRIAL"] = "1"
        random.random()
        np.random.rand()
        torch.rand(1)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("medium")
    assert process_state() == before


def test_a_run_starts_from_known_state_whatever_the_process_was_left_in() -> None:
    def loss() -> float:
        with TrainingRun(TrialConfig(method="none", epochs=1)) as run:
            return float(run.train_epoch()["train_loss"])

    clean = loss()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(123)
        assert loss() == clean
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_a_run_that_was_dropped_does_not_reach_into_another() -> None:
    """Collected in the midst of another's training, it would have put generators, threads and environment back."""
    dropped = TrainingRun(TrialConfig(method="none", epochs=1, seed=1))
    with TrainingRun(TrialConfig(method="none", epochs=1)) as run:
        before = process_state()
        del dropped
        gc.collect()
        assert process_state() == before
        assert not run.finished


def test_a_loss_that_is_no_number_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Digits.loss
    monkeypatch.setattr(Digits, "loss", lambda self, model, batch: real(self, model, batch) * float("nan"))
    with TrainingRun(TrialConfig(method="none", epochs=2)) as run, pytest.raises(TrainingDiverged) as caught:
        run.train_epoch()
    assert str(caught.value) == "the training loss is nan in epoch 1"


def test_an_accuracy_that_is_no_number_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "evaluate", lambda *_: float("nan"))
    with TrainingRun(TrialConfig(method="none", epochs=2)) as run, pytest.raises(TrainingDiverged) as caught:
        run.train_epoch()
    assert str(caught.value) == "the accuracy is nan in epoch 1"
