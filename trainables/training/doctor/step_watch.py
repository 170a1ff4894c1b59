"""Observation of training steps: where the host waits for the device, and gradients are clipped or set to zero."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_CLIPPING = str(Path(_TORCH) / "nn" / "utils" / "clip_grad.py")
_LIBRARIES = sysconfig.get_paths()["stdlib"]
#: Operations whose result the host needs, so that it waits for the device.
_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
}


#: Operations by which torch.nn.utils clips: the norm, or each value's limit.
_CLIPS = {
    torch.ops.aten._foreach_norm.Scalar,
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten._foreach_clamp_min_.Scalar,
    torch.ops.aten.clamp_.default,
}


class StepWatch(TorchDispatchMode):
    """Record in training steps where the host waits for a device, and where scaled gradients are clipped.

    A read waits if operations of the device came after the read before it. Reads that torch makes by itself count for
    the line that called it, except those of its optimizers, which read their own counters.

    Args:
        device: tensors of other devices are not waited for.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._busy, self._scaled = True, False  # operations from before may still run
        self._stack = ExitStack()
        self.steps = 0
        """Steps that have begun."""
        self.waits: Counter[str] = Counter()
        """Waits by ``file:line``."""
        self.steps_of: defaultdict[str, set[int]] = defaultdict(set)
        """The steps in which each line waited."""
        self.clipped_scaled: set[str] = set()
        """Lines, ``file:line``, that clip gradients which a GradScaler has not unscaled."""

    def begin_step(self) -> None:
        """Count what follows for a new step."""
        self.steps += 1

    def __enter__(self) -> Self:
        for name, scaled in (("scale", True), ("unscale_", False), ("step", False)):
            self._stack.enter_context(_noted(name, partial(setattr, self, "_scaled", scaled)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_read(operation, arguments, keywords or {}, self._device):
            place = calling_line(sys._getframe(1)) if self._busy else None
            if place is not None:
                self.waits[place] += 1
                self.steps_of[place].add(self.steps)
            self._busy = False
        elif any(isinstance(leaf, Tensor) and leaf.device.type == self._device.type for leaf in tree_leaves(arguments)):
            self._busy = True
            if self._scaled and operation in _CLIPS and _called_by_clipping(sys._getframe(1)):
                self.clipped_scaled.add(calling_line(sys._getframe(1)) or "?")
        return operation(*arguments, **(keywords or {}))


@contextmanager
def _noted(name: str, note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` before each call of a method of enabled gradient scalers."""
    original = getattr(torch.amp.GradScaler, name)

    def method(self: torch.amp.GradScaler, *arguments: Any, **keywords: Any) -> Any:
        if self.is_enabled():
            note()
        return original(self, *arguments, **keywords)

    setattr(torch.amp.GradScaler, name, method)
    try:
        yield
    finally:
        setattr(torch.amp.GradScaler, name, original)


def _called_by_clipping(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _CLIPPING:
            return True
        frame = frame.f_back
    return False


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
