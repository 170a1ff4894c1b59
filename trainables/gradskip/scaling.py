"""Scaling of the update of some parameters in one step; the rest of the step is unchanged.

For torch optimizers whose update is linear in the group's learning rate, these parameters are put into separate groups
with a multiplied learning rate, and torch's foreach and fused paths do the rest. Any other optimizer may use its
learning rate in any way, or keep counters in its groups; there the parameters are moved back after the step:
p = p_before + factor * (p_after - p_before).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: Optimizers whose update, weight decay included, is proportional to ``lr``, and whose groups contain only settings.
_LINEAR_NAMES = (
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Muon",
)  # fmt: skip


def is_linear_in_lr(optimizer: Optimizer) -> bool:
    """Return whether multiplying a group's ``lr`` multiplies the update: true for torch's own step of a known class."""
    own = inspect.unwrap(type(optimizer).step)
    classes = [getattr(torch.optim, name, None) for name in _LINEAR_NAMES]
    return any(own is inspect.unwrap(cls.step) for cls in classes if cls is not None)


def split_groups(
    groups: Sequence[dict[str, Any]],
    factor_of: Callable[[Tensor], float | None],
    base_lrs: Sequence[Any],
) -> list[dict[str, Any]]:
    """Split groups so that parameters with different factors are separate; a factor of None keeps ``lr``.

    Args:
        groups: the optimizer's parameter groups.
        factor_of: each parameter's factor.
        base_lrs: learning rates that the factors multiply, one per group.
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
    """Temporary changes of an optimizer's groups during a step."""

    def __init__(self) -> None:
        self._changes: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def do(self, do: Callable[[], None], undo: Callable[[], None]) -> None:
        """Apply a change, and record how to undo it."""
        self._changes.append((do, undo))
        do()

    def suspend(self) -> None:
        """Undo the changes temporarily within the step, until `resume`."""
        for _, undo in reversed(self._changes):
            undo()

    def resume(self) -> None:
        """Apply the changes again after `suspend`."""
        for do, _ in self._changes:
            do()

    def put_back(self) -> None:
        """Undo all changes."""
        self.suspend()
        self._changes.clear()


class MovedBack:
    """Copies of parameters from before a step, to scale the step afterwards."""

    def __init__(self, factors: Sequence[tuple[Tensor, float]]) -> None:
        self._before = [(parameter, parameter.detach().clone(), factor) for parameter, factor in factors]

    def scale(self) -> None:
        """Scale the change that the step has made."""
        with torch.no_grad():
            for parameter, before, factor in self._before:
                if factor == 0:
                    parameter.copy_(before)
                else:
                    parameter.sub_(before).mul_(factor).add_(before)
