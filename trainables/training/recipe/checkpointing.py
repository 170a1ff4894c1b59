"""Activation checkpointing: parts of a block's forward pass are computed again in the backward pass, not kept.

Shapes: modules take and return what they do without it. Weights, names and buffers stay as they are; only the class of
the chosen modules changes, to one of the same name that runs `forward` under torch.utils.checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainables.errors import UserError
from trainables.training.recipe.fields import CHEAP

#: Products whose outputs sum fewer terms are computed again: they take as long as it takes to read their inputs.
SMALL_DEPTH = 64
#: Modules that only hold others.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_KIND = "activation_checkpointing"
_aten = torch.ops.aten
#: Matrix products and convolutions, and which argument's size beyond its first dimension is the depth of the sum.
_PRODUCTS = {
    _aten.convolution.default: 1,
    _aten.mm.default: 1,
    _aten.addmm.default: 2,
    _aten.bmm.default: 1,
    _aten.baddbmm.default: 2,
}
#: Attention as one operation: dear, whatever its sizes.
_ATTENTION = {
    getattr(_aten, name).default
    for name in dir(_aten)
    if name.startswith("_scaled_dot_product") and "backward" not in name and hasattr(getattr(_aten, name), "default")
}


def apply_checkpointing(model: nn.Module, kind: str) -> list[str]:
    """Checkpoint the blocks of a model, in place; return their names.

    Args:
        model: whose blocks are found by `blocks_of`.
        kind: one of `CHECKPOINTING`.

    Raises:
        UserError: the model has no block.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            f"activation_checkpointing={kind} needs a model with blocks (modules of several layers, or nn.Sequential), "
            f"got {type(model).__name__}: leave it out"
        )
    for block in blocks.values():
        for module in block.modules():  # what is kept must not be overwritten
            if getattr(module, "inplace", False) is True:
                module.inplace = False  # type: ignore[assignment]
        block.__class__ = _checkpointed(type(block), kind, _is_chain(block))  # type: ignore[arg-type]  # classes hash
    return list(blocks)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are checkpointed, by name: residual or transformer blocks, and chains of layers.

    A block is the outermost module of several layers that is no container and holds no container of further blocks. An
    nn.Sequential of plain layers is a chain, which is cut before each layer with weights.
    """
    found: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module, root: bool) -> None:
        if _is_chain(module):
            found[name] = module
        elif root or isinstance(module, _CONTAINERS) or _holds_blocks(module):
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child, False)
        elif _is_composite(module) and any(True for _ in module.parameters()):
            found[name] = module

    visit("", model, True)
    return found


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _is_chain(module: nn.Module) -> bool:
    """Return whether a module is an nn.Sequential of at least two layers without children."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    children = list(module.children())
    return len(children) > 1 and not any(_is_composite(child) for child in children)


def _holds_blocks(module: nn.Module) -> bool:
    return any(
        isinstance(part, _CONTAINERS) and sum(_is_composite(child) for child in part.children()) > 1
        for part in module.modules()
    )


@cache
def _checkpointed(base: type[nn.Module], kind: str, is_chain: bool) -> type[nn.Module]:
    """Return the class of checkpointed modules of a class: one for all models, so that copies have it, too."""

    def forward(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return base.forward(self, *arguments, **keywords)
        if not is_chain:
            return _run(kind, partial(base.forward, self), [self], *arguments, **keywords)
        (value,) = arguments
        for segment in _segments(self):
            value = _run(kind, partial(_through, segment), segment, value)
        return value

    named = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {"forward": forward, _KIND: kind, **named})


def _through(segment: list[nn.Module], value: Any) -> Any:
    for layer in segment:
        value = layer(value)
    return value


def _segments(chain: nn.Module) -> list[list[nn.Module]]:
    """Return the layers of a chain, cut before each layer that has weights with more than one dimension."""
    segments: list[list[nn.Module]] = [[]]
    for layer in chain.children():
        if any(p.dim() > 1 for p in layer.parameters(recurse=False)) and segments[-1]:
            segments.append([])
        segments[-1].append(layer)
    return segments


def _run(kind: str, function: Any, modules: list[nn.Module], *arguments: Any, **keywords: Any) -> Any:
    return checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        context_fn=partial(_contexts, kind == CHEAP, modules),
        **keywords,
    )


def _contexts(cheap: bool, modules: list[nn.Module]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the first and of the second forward pass."""
    forward: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if cheap:
        forward, again = create_selective_checkpoint_contexts(_policy)
    return forward, _both(again, modules)


@contextmanager
def _both(selective: AbstractContextManager[Any], modules: list[nn.Module]) -> Iterator[None]:
    """Run the second forward pass; it leaves buffers such as a norm's running statistics as the first left them."""
    held = [(part, dict(part._buffers)) for module in modules for part in module.modules() if part._buffers]
    for part, buffers in held:
        part._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    try:
        with selective:  # sees every operation from here on
            yield
    finally:
        for part, buffers in held:
            part._buffers.update(buffers)


def _policy(_: Any, operation: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
    """Keep the outputs of attention and of products that sum many terms; everything else is computed again."""
    place = _PRODUCTS.get(operation)
    if place is not None:
        factor = arguments[place]
        depth = factor.shape[-2] if operation is not _aten.convolution.default else math.prod(factor.shape[1:])
        return CheckpointPolicy.MUST_SAVE if depth >= SMALL_DEPTH else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if operation in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def computed_again(model: nn.Module) -> tuple[str, ...]:
    """Return a key, equal for models whose same blocks are checkpointed in the same way."""
    return tuple(
        f"{name} {getattr(type(module), _KIND)}" for name, module in model.named_modules() if is_checkpointed(module)
    )


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether `apply_checkpointing` chose this module."""
    return hasattr(type(module), _KIND)
