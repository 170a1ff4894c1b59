"""Binary activations with straight-through estimators (STE) of their gradient; docs/gradients.md defines each.

The plain one is that of Courbariaux et al. 2016, arXiv:1602.02830. Backward noise has the plain estimator's window at
the value whose sign stochastic rounding takes. A NaN stays one, so that a diverged training is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainables.errors import UserError, unknown_name


class _StraightThrough(torch.autograd.Function):
    """Values in the forward pass, a window over the gradient in the backward pass; both are found outside."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor, window: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (window,) = ctx.saved_tensors
        return gradient * window, None, None


def _straight_through(x: Tensor, rounded: Tensor, windowed: Tensor) -> Tensor:
    """Return sign(rounded) with the gradient 1[|windowed| <= 1] with respect to x."""
    with torch.no_grad():
        values = _sign(rounded).to(x.dtype)
        window = windowed.abs() <= 1
    result: Tensor = _StraightThrough.apply(x, values, window)
    return result


def _sign(x: Tensor) -> Tensor:
    """Return the sign, +1 at 0; a NaN stays one."""
    return torch.where(x >= 0, 1.0, torch.where(x < 0, -1.0, x))


def _dithered(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return x + u, u ~ U(-1, 1), in float32 at least: 8 bits would be a coarse probability."""
    with torch.no_grad():
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x + (2 * torch.rand(x.shape, generator=generator, dtype=dtype, device=x.device) - 1)


def sign_ste(x: Tensor) -> Tensor:
    """Return sign(x), +1 at 0, with the gradient 1[|x| <= 1].

    >>> x = torch.tensor([-2.0, -0.5, 0.0, 1.0], requires_grad=True)
    >>> sign_ste(x).sum().backward()
    >>> sign_ste(x).tolist(), x.grad.tolist()
    ([-1.0, -1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0])
    """
    if not torch.is_grad_enabled():
        return _sign(x)
    return _straight_through(x, x.detach(), x.detach())


def stochastic_rounding_ste(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return +1 with probability clip((x + 1) / 2, 0, 1), else -1, with the gradient 1[|x| <= 1].

    It draws from the generator; None: torch's own. Under vmap its ``randomness`` must be named.
    """
    return _straight_through(x, _dithered(x.detach(), generator), x.detach())


def backward_noise_ste(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return sign(x), +1 at 0, with the random gradient 1[|x + u| <= 1], u ~ U(-1, 1), drawn as above."""
    return _straight_through(x, x.detach(), _dithered(x.detach(), generator))


#: Function of each mode of `BinaryActivation`.
MODES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sign": sign_ste,
    "stochastic": stochastic_rounding_ste,
    "backward": backward_noise_ste,
}


def check_mode(mode: str) -> None:
    """Raise UserError for an unknown mode of a `BinaryActivation`."""
    if mode not in MODES:
        raise unknown_name("mode of a BinaryActivation", str(mode), MODES)


class BinaryActivation(nn.Module):
    """Sign of the input, with a straight-through estimator of the gradient.

    The mode, one of `MODES`, holds in train mode; in eval mode the activation is the plain sign. UserError: no such
    mode.
    """

    def __init__(self, mode: str = "sign") -> None:
        super().__init__()
        check_mode(mode)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        """Map x of any shape to -1 and 1."""
        return MODES[self.mode if self.training else "sign"](x)

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}"


def binary_activations(model: nn.Module) -> list[BinaryActivation]:
    """Return the binary activations of a model. UserError: there are none."""
    found = [module for module in model.modules() if isinstance(module, BinaryActivation)]
    if not found:
        raise UserError(
            f"a straight-through estimator needs a model with BinaryActivation modules, got {type(model).__name__} "
            "without: build it with tune_cac.gradients.BinaryActivation, or try --workload binary_mlp"
        )
    return found


@contextmanager
def activation_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Run the block with all binary activations of a model in a mode, whether it trains or is evaluated.

    UserError: no such mode, or a model without binary activations.
    """
    check_mode(mode)
    before = [(module, module.mode, module.training) for module in binary_activations(model)]
    try:
        for module, *_ in before:
            module.mode, module.training = mode, True
        yield
    finally:
        for module, own, training in before:
            module.mode, module.training = own, training
