"""List the parameters that belong to a module itself, those of its parametrized weights included.

A weight under `torch.nn.utils.parametrize` is kept in separate modules below the layer's (``weight_norm``:
``parametrizations.weight.original0`` and ``original1``). They are parts of the layer's weight, not layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm


def own_children(module: nn.Module) -> Iterator[nn.Module]:
    """Return the module's children without the containers of its parametrized weights."""
    parts = module.parametrizations if parametrize.is_parametrized(module) else None
    return (child for child in module.children() if child is not parts)


def own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the module's own parameters, the parts of its parametrized weights last."""
    yield from (p for p in module._parameters.values() if p is not None)
    if parametrize.is_parametrized(module):
        weights: Any = module.parametrizations
        yield from weights.parameters()


def weight_parts(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield each layer that has a weight in parts, with these parts."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            weights: Any = module.parametrizations
            for parts in weights.values():
                yield module, tuple(parts.parameters())
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):  # torch's older form
                parameters = [module._parameters.get(f"{hook.name}_{part}") for part in "gv"]
                yield module, tuple(p for p in parameters if p is not None)
