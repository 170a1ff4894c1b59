"""Cost tables against the plain counter on the model itself: networks of many kinds, and what stops save.

Shapes: images (B, C, H, W); sequences (B, T, E).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_workload import Tiny
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainables.training.flops import CostTable, saved_shares
from trainables.workloads.base import Batch
from trainables.workloads.digits import Digits

B = 4


class SquaredOutput(Tiny):
    """Any model; the loss is the mean square of what it returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        output = model(*batch)
        return (output["out"] if isinstance(output, dict) else output).square().mean()


class Net(nn.Module):
    """Layers by name, in the order of their registration, and a forward pass of (net, inputs)."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self._run(self, x)


def residual() -> Net:
    """Residual connections, ReLUs in place, and a shortcut that is registered before what runs before it."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.relu(m.norm(m.stem(x)))
        x = m.relu(m.conv1(x) + x)
        x = F.relu_(m.conv2(x) + m.shortcut(x))
        found: Tensor = m.head(x.mean((2, 3)))
        return found

    return Net(
        run, shortcut=nn.Conv2d(6, 10, 1, stride=2), stem=nn.Conv2d(3, 6, 3, padding=1), norm=nn.BatchNorm2d(6),
        conv1=nn.Conv2d(6, 6, 3, padding=1), conv2=nn.Conv2d(6, 10, 3, stride=2, padding=1, bias=False),
        relu=nn.ReLU(inplace=True), head=nn.Linear(10, 5),
    )  # fmt: skip


def called_twice() -> Net:
    """One linear layer at two places."""
    layers = {"first": nn.Linear(7, 6), "again": nn.Linear(6, 6), "last": nn.Linear(6, 2)}
    return Net(lambda m, x: m.last(m.again(F.relu_(m.again(m.first(x))))), **layers)


def functional() -> Net:
    """The model itself uses a layer's weight without calling it, and multiplies on its own."""

    def run(m: Any, x: Tensor) -> dict[str, Tensor]:
        x = m.first(x)
        x = F.linear(x @ x.transpose(1, 2) @ x, m.first.weight)
        return {"out": m.second(x)}

    return Net(run, first=nn.Linear(6, 6), second=nn.Linear(6, 6))


def tied() -> Net:
    """The output layer has the embedding's weight."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = Net(
        lambda m, x: m.output(m.encoder(m.embedding(x))),
        embedding=nn.Embedding(11, 8), encoder=encoder, output=nn.Linear(8, 11),
    )  # fmt: skip
    model.output.weight = model.embedding.weight  # type: ignore[union-attr]
    return model


def recomputed(reentrant: bool) -> Net:
    """Activation checkpointing: the backward pass runs the middle once more."""
    return Net(
        lambda m, x: m.last(checkpoint(m.middle, m.first(x), use_reentrant=reentrant)),
        first=nn.Linear(6, 6), middle=nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)), last=nn.Linear(6, 6),
    )  # fmt: skip


class LastState(nn.GRU):
    """A recurrent layer that returns its outputs alone."""

    def __init__(self) -> None:
        super().__init__(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def images() -> Batch:
    return (torch.zeros(B, 3, 8, 8),)


def sequences(width: int) -> Batch:
    return (torch.zeros(B, 5, width),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "residual": (residual, images()),
    "called twice": (called_twice, sequences(7)),
    "functional": (functional, sequences(6)),
    "tied": (tied, (torch.zeros(B, 5, dtype=torch.int64),)),
    "recomputed": (lambda: recomputed(False), sequences(6)),
    "recomputed, reentrant": (lambda: recomputed(True), sequences(6)),
    "parametrised": (
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 2)), sequences(6)
    ),
    "recurrent": (lambda: nn.Sequential(nn.Linear(6, 4), LastState()), sequences(6)),
    "without weights": (lambda: nn.Sequential(nn.PReLU()), sequences(6)),
}  # fmt: skip


def counted_here(model: nn.Module, batch: Batch) -> tuple[int, int]:
    """The plain counter on the model itself: forward, backward."""
    with FlopCounterMode(display=False) as forward:
        loss = SquaredOutput("any").loss(model, batch)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_a_step_costs_what_the_real_device_computes(name: str) -> None:
    make, batch = MODELS[name]
    model = make()
    dense = CostTable(SquaredOutput(name), model).dense_step(batch)
    assert (dense.forward_flops, dense.backward_flops) == counted_here(model.train(), batch)


def test_counting_leaves_model_and_generators_as_they_were() -> None:
    workload = Digits()
    model = workload.make_model().eval()
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    CostTable(workload, model).dense_step(next(workload.train_batches(0, 0)))
    assert not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


def test_what_is_saved_is_what_the_model_itself_no_longer_computes() -> None:
    """The shortcut is registered first and runs late: stopping it alone ends no backward pass."""
    model = residual()
    model.norm.bias.requires_grad_(False)
    forward, dense = counted_here(model, images())
    expected = {}
    for end in (1, 5, 7, 8):
        for parameter in list(model.parameters())[: end + 1]:
            parameter.requires_grad_(False)
        expected[end] = 1 - (forward + counted_here(model, images())[1]) / (forward + dense)
    model.requires_grad_(True)
    model.norm.bias.requires_grad_(False)
    assert saved_shares(SquaredOutput("saved"), model, images()) == pytest.approx(expected, rel=1e-12)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["norm.bias"]
    some = saved_shares(SquaredOutput("saved"), model, images(), most=2)
    assert some == {1: None, 5: pytest.approx(expected[5]), 7: None, 8: pytest.approx(expected[8])}
