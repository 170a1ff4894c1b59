"""Observation of training steps: called networks, clipping of scaled gradients, gradients set to zero."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_map

_TORCH = str(Path(torch.__file__).parent)
#: Places of code that is not the user's.
_LIBRARIES = (_TORCH, str(Path(__file__).parent), sysconfig.get_paths()["stdlib"], "<frozen")


@dataclass(frozen=True)
class ModelCall:
    """Arguments of one forward pass, by position and by name."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module) -> Any:
        """Return what a model gives for these arguments."""
        return model(*self.positional, **self.keywords)

    def detached(self) -> ModelCall:
        """Return the same arguments outside the graph that they came from."""
        detached = tree_map(
            lambda v: v.detach() if isinstance(v, Tensor) else v, (self.positional, dict(self.keywords))
        )
        return ModelCall(*detached)


class NetworkCalls:
    """The networks that are called with gradients, each with the arguments of its latest call.

    Parts that a recorded network calls are no networks of their own.
    """

    def __init__(self) -> None:
        self._calls: dict[nn.Module, ModelCall] = {}
        self._depth = 0
        self.trains = True  # training mode of the latest network that was called; True before the first call

    @contextmanager
    def recorded(self) -> Iterator[NetworkCalls]:
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            hooks.callback(register_module_forward_hook(self._leave, with_kwargs=True, always_call=True).remove)
            yield self

    @property
    def by_network(self) -> dict[nn.Module, ModelCall]:
        """Return the recorded calls, without networks that are parts of another recorded one."""
        parts = {part for network in self._calls for part in network.modules() if part is not network}
        return {network: call for network, call in self._calls.items() if network not in parts}

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], _: Any) -> None:
        self._depth -= 1
        parameters = list(module.parameters())
        if self._depth or not parameters:  # a loss is no network
            return
        self.trains = module.training
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            self._calls[module] = ModelCall(positional, keywords).detached()


def calling_line(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost frame outside torch and other libraries, "?" where there is none."""
    for here, line in walk_stack(frame):
        file = here.f_code.co_filename
        if not file.startswith(_LIBRARIES) or ("site-packages" in file and not file.startswith(_TORCH)):
            return f"{file}:{line}"
    return "?"


@contextmanager
def scaled_clipping() -> Iterator[set[str]]:
    """Record the lines that clip gradients which a GradScaler has scaled and not unscaled, inside the context."""
    places: set[str] = set()
    scaled = False

    def noting(original: Any) -> Any:
        def method(scaler: torch.amp.GradScaler, *arguments: Any, **keywords: Any) -> Any:
            nonlocal scaled
            if scaler.is_enabled():
                scaled = original.__name__ == "scale"
            return original(scaler, *arguments, **keywords)

        return method

    def watched(original: Any) -> Any:
        def grouped(*arguments: Any, **keywords: Any) -> Any:
            if scaled:
                places.add(calling_line(sys._getframe(1)))
            return original(*arguments, **keywords)

        return grouped

    with ExitStack() as stack:
        for name in ("scale", "unscale_", "step"):
            stack.enter_context(replaced(torch.amp.GradScaler, name, noting))
        # Both kinds of clipping call it, under whatever name a script has imported them.
        stack.enter_context(replaced(clip_grad, "_group_tensors_by_device_and_dtype", watched))
        yield places


@contextmanager
def zeroed_gradients() -> Iterator[set[str]]:
    """Record the lines that set gradients to zero instead of None inside the context."""
    places: set[str] = set()

    def watched(original: Any) -> Any:
        def zero_grad(self: Any, set_to_none: bool = True) -> Any:
            if not set_to_none and any(p.grad is not None for p in parameters_of(self)):
                places.add(calling_line(sys._getframe(1)))
            return original(self, set_to_none)

        return zero_grad

    with replaced(torch.optim.Optimizer, "zero_grad", watched), replaced(nn.Module, "zero_grad", watched):
        yield places


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method or function inside the context by what ``make`` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def parameters_of(owner: Any) -> list[nn.Parameter]:
    """Return the parameters of a module or of an optimizer."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [p for group in owner.param_groups for p in group["params"]]
