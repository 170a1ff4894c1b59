"""A training loop and its small data, shared by the tests of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from conv_models import conv_batches
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainables.gradskip import Settings

#: No rule at all.
OFF = Settings(start_thr=-1)
#: Every decision stops a layer that shrinks: strong weight decay makes each do so from the first step on.
EAGER: dict[str, Any] = {"start_itr": 0, "samples": 2, "start_thr": 1.0, "slope_thr": 1.0, "mt_thr": 1.0}
SHRINKING: dict[str, Any] = {"lr": 0.02, "weight_decay": 2.0}


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    start: int = 0,
    set_to_none: bool = True,
    each: Callable[[int], None] = lambda _: None,
) -> None:
    """Steps ``start`` .. ``start + steps - 1`` of the same sequence of batches."""
    for step, (x, y) in enumerate(conv_batches(start + steps)):
        if step >= start:
            optimizer.zero_grad(set_to_none=set_to_none)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            each(step)


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class DecayInside(torch.optim.Optimizer):
    """An optimizer that torch does not have: momentum that holds lr * gradient, a counter in its groups.

    m <- b m + lr_k g with lr_k = lr / sqrt(k + 1), p <- p - m; k is kept in the group.
    """

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate = group["lr"] / (group["k"] + 1) ** 0.5
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("m", torch.zeros_like(p))
                buffer.mul_(group["beta"]).add_(p.grad, alpha=rate)
                p.sub_(buffer)
            group["k"] += 1
        return loss


class OpCounter(TorchDispatchMode):
    """Counts operators, and reads of a number from a tensor among them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        """Reads so far."""
        return sum("_local_scalar_dense" in op for op in self.ops)
