"""The lab's script: losses along a line against forward passes, and a short run of all its parts."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap

from trainables.workloads import binary_mlp

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("ste_lab")
    torch.set_num_threads(threads)


def test_losses_along_a_line_are_those_of_forward_passes(lab: ModuleType) -> None:
    torch.manual_seed(0)
    model = binary_mlp.network()
    direction = lab.unit({name: torch.randn_like(p) for name, p in model.named_parameters()})
    inputs, targets = binary_mlp.draw(torch.Generator().manual_seed(1), 128)
    rates = torch.arange(0, 301, dtype=torch.float64) * 0.01  # far enough for many signs to change
    precise = copy.deepcopy(model).double()
    weights = {name: p.detach() for name, p in precise.named_parameters()}

    def loss(rate: Tensor) -> Tensor:
        moved = {name: weight - rate * direction[name].double() for name, weight in weights.items()}
        return F.mse_loss(functional_call(precise, moved, (inputs.double(),)), targets.double())

    found = lab.line_losses(model, direction, (inputs, targets), rates)
    torch.testing.assert_close(found, vmap(loss, chunk_size=50)(rates), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lab.line_losses(model, direction, (inputs, targets), rates[7:8]), found[7:8])
