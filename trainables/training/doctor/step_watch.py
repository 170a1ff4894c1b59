"""Observation of training steps: waits of the host for the device, gradients set to zero, and where in the code."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_LIBRARIES = sysconfig.get_paths()["stdlib"]
#: Operations whose result the host needs, so that it waits for the device.
_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
}


class StepWatch(TorchDispatchMode):
    """Record reads of values of one device inside the context, with the line of code.

    Reads that torch makes by itself count for the line that called it, except those of its optimizers, which read their
    own counters.

    Args:
        device: tensors of other devices are not waited for.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.waits: Counter[str] = Counter()
        """Reads by ``file:line``."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_read(operation, arguments, keywords or {}, self._device):
            place = calling_line(sys._getframe(1))
            if place is not None:
                self.waits[place] += 1
        return operation(*arguments, **(keywords or {}))


def _is_read(operation: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether the host waits: for a value, or for a copy from the GPU, unless it is told not to."""
    if operation is torch.ops.aten._to_copy.default:
        target = keywords.get("device")
        from_gpu = arguments[0].device.type == device.type == "cuda"
        return from_gpu and target is not None and target.type == "cpu" and not keywords.get("non_blocking")
    return operation in _READS and isinstance(arguments[0], Tensor) and arguments[0].device.type == device.type


def calling_line(frame: FrameType | None) -> str | None:
    """Return ``file:line`` of the innermost frame outside torch; None for torch's optimizers and for no such frame."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{_TORCH}/optim/") or file.startswith(f"{_TORCH}/amp/"):
            return None
        inside = file.startswith((_TORCH, _OURS, _LIBRARIES, "<frozen"))
        if not inside or ("site-packages" in file and not file.startswith(_TORCH)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@contextmanager
def zeroed_gradients() -> Iterator[Counter[str]]:
    """Record the lines that set gradients to zero instead of None inside the context."""
    places: Counter[str] = Counter()
    homes: list[Any] = [torch.optim.Optimizer, nn.Module]
    originals = [home.zero_grad for home in homes]

    def watched(original: Any) -> Any:
        def zero_grad(self: Any, set_to_none: bool = True) -> Any:
            if not set_to_none and any(p.grad is not None for p in parameters_of(self)):
                places[calling_line(sys._getframe(1)) or "?"] += 1
            return original(self, set_to_none)

        return zero_grad

    for home, original in zip(homes, originals, strict=True):
        home.zero_grad = watched(original)
    try:
        yield places
    finally:
        for home, original in zip(homes, originals, strict=True):
            home.zero_grad = original


def parameters_of(owner: Any) -> list[nn.Parameter]:
    """Return the parameters of a module or of an optimizer."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]
