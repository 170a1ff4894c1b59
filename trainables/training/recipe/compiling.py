"""Compilation of a run's model by torch.compile, where this machine can."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import nn

#: Versions of the compiled code that are kept: each stop of Gradient-Skip makes one, and so do evaluations.
MOST_VERSIONS = 64


def compile_model(model: nn.Module, mode: str, device: torch.device) -> bool:
    """Compile a model in place, with a warning where that is not possible; return whether it is compiled.

    Args:
        model: its names, weights and buffers stay as they are; copies of it are not compiled.
        mode: one of `COMPILE_MODES`.
        device: of the run.
    """
    reason = why_not(device.type)
    if reason:
        warnings.warn(
            f"compile_mode={mode} has no effect: torch.compile does not work here ({reason}). The model is trained "
            "without it; install a C++ compiler, or leave compile_mode out",
            stacklevel=2,
        )
        return False
    model.__class__ = _compilable(type(model))  # type: ignore[arg-type]  # classes hash
    # Versions of other models that this process trained must not count against this one's. A version for all shapes
    # rounds differently from one for a shape, so which of them a step takes would depend on the steps before it.
    model.compile(mode=mode, dynamic=False, recompile_limit=MOST_VERSIONS, isolate_recompiles=True)
    return True


@cache
def _compilable(base: type[nn.Module]) -> type[nn.Module]:
    """Return the same class with a `forward` of this file: torch compiles none of its own, such as nn.Sequential's."""

    def forward(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return base.forward(self, *arguments, **keywords)

    named = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {"forward": forward, **named})


@cache
def why_not(device_type: str) -> str:
    """Return why torch.compile does not work in this process, tried on an addition; empty where it does."""
    try:
        torch.compile(_successor)(torch.ones(2, device=device_type))
    except Exception as error:  # noqa: BLE001  # of the compiler, its C++ compiler or its loader
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return ""


def _successor(value: torch.Tensor) -> torch.Tensor:
    return value + 1
