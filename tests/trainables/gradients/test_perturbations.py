"""Losses at changed weights: models that write into their activations, and the memory of what goes at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainables.gradients import CentralDifferenceSGD, autograd_gradient, central_difference, relative_error
from trainables.gradients.flop_meter import FlopMeter
from trainables.gradients.perturbations import Perturbations


class Residual(nn.Module):
    """A block as in a ResNet, with operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.shortcut = nn.Conv2d(2, 6, 1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.relu(self.norm(self.first(x))))
        out += self.shortcut(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.relu(out), 1), 1))


def test_a_change_at_an_output_is_the_change_in_the_weight_and_costs_one_layer() -> None:
    torch.manual_seed(0)
    model, x = Residual().double(), torch.randn(3, 2, 6, 6, dtype=torch.float64)

    def loss(m: nn.Module) -> Tensor:
        return m(x).square().mean()

    parameter = model.first.weight
    count = parameter.numel()
    meter = FlopMeter()
    losses = Perturbations(loss, model, meter=meter)
    dense = meter.take().forward_flops
    found = losses.losses(
        "first.weight", torch.arange(count).repeat(2), torch.full((2 * count,), 0.1, dtype=torch.float64)
    )
    assert torch.equal(found[:count], found[count:])
    # The first convolution and the shortcut run once, all that follows once a change.
    assert meter.take().forward_flops < 0.9 * 2 * count * dense
    for index in range(0, count, 7):
        with torch.no_grad():
            model.train()
            before = {n: b.clone() for n, b in model.state_dict().items()}
            parameter.view(-1)[index] += 0.1
            expected = loss(model)
            model.load_state_dict(before)
        torch.testing.assert_close(found[index], expected)


X = torch.randn(6, 12, dtype=torch.float64)


def plain(m: nn.Module) -> Tensor:
    return m(X).sin().sum()


def in_place(m: nn.Module) -> Tensor:
    hidden = m[0](X)
    F.relu_(hidden)
    return m[2](hidden).sin().sum()


def assigned(m: nn.Module) -> Tensor:
    hidden = m[0](X)
    hidden[:, 0] = 1.0
    return m[2](hidden).sin().sum()


@pytest.mark.parametrize("loss", [in_place, assigned])
def test_writing_into_an_activation_is_seen_whatever_loss_came_before(loss: Callable[[nn.Module], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = CentralDifferenceSGD(model, lr=1e-9, epsilon=1e-5)
    optimizer.step(plain)
    exact = autograd_gradient(loss, model)
    optimizer.step(loss)
    for found in (central_difference(loss, model, 1e-5), {n: p.grad for n, p in model.named_parameters()}):
        assert relative_error(found, exact) < 1e-4  # type: ignore[arg-type]


def test_chunks_bound_the_memory_and_change_no_value() -> None:
    """What is allocated is seen by torch's dispatcher, not by the engine."""

    class Allocated(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            for tensor in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(tensor, Tensor):
                    self.most = max(self.most, tensor.nbytes)
            return found

    model = nn.Sequential(nn.Conv2d(1, 24, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 64, 10)).double()
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)

    def loss(m: nn.Module) -> Tensor:
        return m(x).square().mean()

    free = central_difference(loss, model, 1e-2, "0.weight")
    with Allocated() as seen:
        small = central_difference(loss, model, 1e-2, "0.weight", memory_bytes=2**20)
    torch.testing.assert_close(small, free, rtol=1e-9, atol=1e-12)
    assert seen.most <= 2**20
    with Allocated() as seen:
        central_difference(loss, model, 1e-2, "0.weight")
    assert seen.most > 2**20
