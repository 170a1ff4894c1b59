"""Steps of a fixed length along the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainables.errors import UserError


class NormalisedSGD(Optimizer):
    """Descent by w <- w - lr g / |g|, |g| the norm of the gradient of all parameters together.

    A step's length is the learning rate alone, so a function that is very steep in places, such as Rosenbrock's, is
    descended without diverging; with a constant learning rate it ends at a distance of that order from the minimum.
    ``normalise=False``: plain steps w <- w - lr g. UserError: a learning rate that is not above 0.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1, *, normalise: bool = True, **defaults: Any) -> None:
        if not lr > 0:
            raise UserError(f"lr must be above 0, got {lr!r}")
        super().__init__(params, {"lr": lr, "normalise": normalise, **defaults})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` recomputes the gradients and returns the loss, as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.take_step()
        return loss

    @torch.no_grad()
    def take_step(self) -> None:
        """Change the parameters by their gradients."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads:
            return
        # A gradient of zero has no direction: dividing by infinity takes no step.
        norm = torch.nn.utils.get_total_norm(grads)
        norm = torch.where(norm > 0, norm, torch.inf)
        for group in self.param_groups:
            having: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            own: list[Tensor] = [p.grad for p in having if p.grad is not None]
            if having:
                directions = torch._foreach_div(own, norm.to(own[0].device)) if group["normalise"] else own
                torch._foreach_add_(having, directions, alpha=-float(group["lr"]))
