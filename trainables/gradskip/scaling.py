"""Scaling the update of some parameters in one step, everything else about the step left as it is.

Optimizers of torch whose update is linear in the group's learning rate get groups of their own for those parameters,
with the learning rate multiplied: torch's foreach and fused paths do the rest. Any other optimizer may read its
learning rate in whatever way, or keep counters in its groups; there the parameters are moved back after the step:
p = p_before + factor * (p_after - p_before).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: Their update, weight decay included, is proportional to ``lr``, and their groups hold settings alone.
_LINEAR_NAMES = (
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Muon",
)  # fmt: skip


def is_linear_in_lr(optimizer: Optimizer) -> bool:
    """Return whether multiplying a group's ``lr`` multiplies the update: torch's own step of a class known for it."""
    own = inspect.unwrap(type(optimizer).step)
    classes = [getattr(torch.optim, name, None) for name in _LINEAR_NAMES]
    return any(own is inspect.unwrap(cls.step) for cls in classes if cls is not None)


def split_groups(
    groups: Sequence[dict[str, Any]],
    factor_of: Callable[[Tensor], float | None],
    base_lrs: Sequence[Any],
) -> list[dict[str, Any]]:
    """Split groups so that parameters of unequal factors are apart; a factor of None leaves ``lr`` alone.

    Args:
        groups: the optimizer's.
        factor_of: each parameter's factor.
        base_lrs: what factors multiply, one a group.
    """
    split: list[dict[str, Any]] = []
    for group, base in zip(groups, base_lrs, strict=True):
        parts: dict[float | None, list[Tensor]] = {}
        for parameter in group["params"]:
            parts.setdefault(factor_of(parameter), []).append(parameter)
        # Ascending factors, unscaled last: an order that does not depend on which parameter came first.
        for factor in sorted(parts, key=lambda f: (f is None, f or 0.0)):
            lr = group["lr"] if factor is None else base * factor
            split.append({**group, "params": parts[factor], "lr": lr})
    return split


class GroupChanges:
    """Changes of an optimizer's groups for the time of a step."""

    def __init__(self) -> None:
        self._changes: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def do(self, do: Callable[[], None], undo: Callable[[], None]) -> None:
        """Make a change."""
        self._changes.append((do, undo))
        do()

    def suspend(self) -> None:
        """Have the groups whole for a moment within the step, until `go_on`."""
        for _, undo in reversed(self._changes):
            undo()

    def resume(self) -> None:
        """Go on with the step after `suspend`."""
        for do, _ in self._changes:
            do()

    def put_back(self) -> None:
        """Have the groups whole again."""
        self.suspend()
        self._changes.clear()


class MovedBack:
    """Parameters as they were before a step, to scale the step afterwards."""

    def __init__(self, factors: Sequence[tuple[Tensor, float]]) -> None:
        self._before = [(parameter, parameter.detach().clone(), factor) for parameter, factor in factors]

    def scale(self) -> None:
        """Scale what the step has done."""
        with torch.no_grad():
            for parameter, before, factor in self._before:
                if factor == 0:
                    parameter.copy_(before)
                else:
                    parameter.sub_(before).mul_(factor).add_(before)
