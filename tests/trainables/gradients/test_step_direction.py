"""The direction of a step against the step that every optimizer then takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.gradients.gradient_method import step_direction
from trainables.gradients.normalised_sgd import NormalisedSGD
from trainables.gradskip import optimizers as gradskip
from trainables.gradskip.settings import Settings

Parameters = list[nn.Parameter]
Build = Callable[[Parameters], Optimizer]
optim = torch.optim


class Lazy(Optimizer):
    """An optimizer of the user's own, with state in attributes, by parameter, and an object that cannot be copied."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.first = self.param_groups[0]["params"][0]
        self.calls = [0]
        self.lock = (x for x in ())  # generators cannot be copied

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls[0] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(0.5).add_(parameter.grad, alpha=self.calls[0])
                parameter -= group["lr"] * (mean * (3 if parameter is self.first else 1))


OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.03),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "tensor_lr": lambda p: optim.SGD(p, lr=torch.tensor(0.1)),
    "groups": lambda p: optim.SGD([{"params": p[:1]}, {"params": p[1:], "lr": 3.0, "momentum": 0.5}], lr=0.1),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adam_l2": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, maximize=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5, weight_decay=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "gradskip_sgd": lambda p: gradskip.SGD(p, lr=0.1, momentum=0.9, settings=Settings(start_thr=-1)),
    "gradskip_wrap": lambda p: gradskip.wrap(Lazy(p, lr=0.1), Settings(start_thr=-1)),
    "normalised": lambda p: NormalisedSGD(p, lr=0.1),
    "own": lambda p: Lazy(p, lr=0.1),
}


def parameters() -> Parameters:
    return [nn.Parameter(torch.randn(3, 2, dtype=torch.float64)), nn.Parameter(torch.randn(4, dtype=torch.float64))]


def fill(held: Parameters) -> dict[str, Tensor]:
    """Give new gradients, by name."""
    for parameter in held:
        parameter.grad = torch.randn_like(parameter)
    return {str(i): p.grad.clone() for i, p in enumerate(held) if p.grad is not None}


def rates(optimizer: Optimizer, held: Parameters) -> list[float]:
    of = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    return [of[id(p)] for p in held]


def named(held: Parameters) -> dict[str, nn.Parameter]:
    return {str(i): p for i, p in enumerate(held)}


def same(one: Any, other: Any) -> bool:
    """Whether nested containers are equal, bit by bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {
        k: copy.deepcopy(v) for k, v in vars(optimizer).items() if k in ("calls", "scale", "_step_count", "defaults")
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_direction_is_that_of_the_step_and_asking_changes_nothing(name: str) -> None:
    held = parameters()
    optimizer = OPTIMIZERS[name](held)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)  # it replaces the optimizer's step
    for step in range(4):
        gradients = fill(held)
        before = [p.detach().clone() for p in held]
        state = copy.deepcopy(optimizer.state_dict())
        kept = attributes(optimizer)
        direction = step_direction(optimizer, named(held), gradients)
        assert same(optimizer.state_dict(), state)
        assert same(attributes(optimizer), kept)
        for i, p in enumerate(held):
            assert torch.equal(p, before[i])
            assert p.grad is not None
            assert torch.equal(p.grad, gradients[str(i)])
        optimizer.step()
        for i, (p, rate) in enumerate(zip(held, rates(optimizer, held), strict=True)):
            expected = before[i] - rate * direction[str(i)]
            torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-13, msg=f"step {step}, parameter {i}")


def test_at_rate_0_there_is_a_direction_and_float32_parameters_have_their_own_type() -> None:
    held = [nn.Parameter(torch.randn(3))]
    optimizer = optim.SGD(held, lr=0.0, momentum=0.9)
    gradients = fill(held)
    optimizer.step()
    found = step_direction(optimizer, named(held), gradients)["0"]
    torch.testing.assert_close(found, 1.9 * gradients["0"])
    assert found.dtype == torch.float32


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.Rprop, optim.ASGD, optim.Adafactor])
def test_steps_that_are_not_proportional_to_the_rate_are_refused(kind: Callable[..., Optimizer]) -> None:
    held = parameters()
    with pytest.raises(UserError, match=r"proportional to its learning rate, .*, got .*: use another, such as SGD"):
        step_direction(kind(held), named(held), fill(held))
