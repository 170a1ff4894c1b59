"""The check behind `doctor`: training that repeats, and training that does not."""

from __future__ import annotations

from itertools import count

import pytest
import tiny_workload
import torch
from tiny_workload import tiny  # noqa: F401 - a fixture
from torch import Tensor, nn

from trainables.config import TrialConfig
from trainables.training.doctor.determinism import why_not_repeatable


@pytest.mark.usefixtures("tiny")
def test_a_cpu_repeats_bit_for_bit() -> None:
    assert why_not_repeatable(TrialConfig(workload="tiny", epochs=1)) == ""


@pytest.mark.usefixtures("tiny")
def test_a_loss_that_rounds_otherwise_each_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels do whose sums are made in changing order."""
    calls = count()
    real = tiny_workload.Tiny.loss

    def loss(self: tiny_workload.Tiny, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return real(self, model, batch) * (1 + next(calls) % 3 * torch.finfo(torch.float32).eps)

    monkeypatch.setattr(tiny_workload.Tiny, "loss", loss)
    assert why_not_repeatable(TrialConfig(workload="tiny", epochs=1)).startswith("0.weight and ")
