"""Mixed precision: the forward pass in a smaller number format, and gradients scaled where it would underflow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.errors import UserError
from trainables.runtime.generators import kept_generators
from trainables.training.recipe.fields import BFLOAT16, FLOAT16, FLOAT32

_DTYPES = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}


def check_precision(precision: str, device: torch.device) -> None:
    """Raise UserError if the device cannot train in this precision, tried on a convolution and a linear layer."""
    if precision == FLOAT32:
        return
    if device.type == "cuda" and precision == BFLOAT16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"precision=bfloat16 needs a GPU of compute capability 8.0 or newer, got {torch.cuda.get_device_name()}: "
            "take precision=float16"
        )
    with kept_generators([]):  # the run's weights must not depend on its precision
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1)).to(device)
    try:
        with torch.autocast(device.type, dtype=_DTYPES[precision]):
            loss = model(torch.ones(1, 1, 4, 4, device=device)).sum()
        loss.backward()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise UserError(
            f"precision={precision} does not work on this device ({said}): take precision=float32"
        ) from error


class MixedPrecision:
    """Autocast and gradient scaling of one run; does nothing in float32.

    Args:
        precision: one of `PRECISIONS`.
        device: of the run.

    Raises:
        UserError: the device cannot train in it.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        check_precision(precision, device)
        self._dtype = _DTYPES.get(precision)
        self._device = device
        # bfloat16 has float32's range and needs no scaling.
        self._scaler = torch.amp.GradScaler(device.type) if precision == FLOAT16 else None
        self._stepped = False

    def forward_pass(self) -> AbstractContextManager[Any]:
        """Return the block in which the forward pass runs."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, dtype=self._dtype)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss that the backward pass begins from."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, before anything reads them."""
        if self._scaler is not None and _has_gradients(optimizer):
            self._scaler.unscale_(optimizer)

    def watch(self, optimizer: Optimizer) -> None:
        """Prepare for steps of this optimizer; called once."""
        if self._scaler is not None:
            optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def step(self, optimizer: Optimizer) -> None:
        """Execute the optimizer's step; where gradients overflowed, one that changes no weight.

        GradScaler does not call the optimizer then. It is called without gradients here, so that a step of the run is
        a step of everything that hangs on the optimizer: what counts steps, such as a stop rule, never lags behind.
        """
        if self._scaler is None or not _has_gradients(optimizer):
            optimizer.step()
            return
        self._stepped = False
        self._scaler.step(optimizer)
        self._scaler.update()
        if not self._stepped:
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its age; empty where nothing is scaled."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
