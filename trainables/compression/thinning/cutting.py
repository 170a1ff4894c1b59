"""Removal of output and input channels from modules and from all per-channel tensors: norms, masks, optimizer state.

A cut is (module, side, indices): side 0 the output channels, 1 the input channels. A convolution's weight is
(C_out, C_in / groups, *kernel), a transposed one's (C_in, C_out / groups, *kernel): there side 0 is dimension 1. Norms,
PReLU and depthwise convolutions have the same channels on both sides; their cuts have side 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from trainables.compression.model_copies import as_built
from trainables.errors import UserError

NORMS = (_BatchNorm, _InstanceNorm)

#: Cuts of a model in plain types: [[module, side, [indices]], ...], in the order of the cuts; indices are those at the
#: time of the cut. Records of successive thinnings can be concatenated into one.
Record = list[list[Any]]
#: Indices cut off parameters: name -> dimension -> indices before any cut, ascending.
Removed = dict[str, dict[int, list[int]]]
#: A tensor before and after a cut, the dimension, the indices.
Cut = tuple[Tensor, Tensor, int, list[int]]


def is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution with one filter for each input channel."""
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels


def _counts(module: nn.Module, side: int) -> tuple[str, ...]:
    """Return the attributes that hold the number of channels on one side of a module of a type that can be cut."""
    if is_depthwise(module):
        return ("out_channels", "in_channels", "groups")
    if isinstance(module, _ConvNd):
        return ("in_channels",) if side else ("out_channels",)
    if isinstance(module, nn.Linear):
        return ("in_features",) if side else ("out_features",)
    if isinstance(module, NORMS):
        return ("num_features",)
    assert isinstance(module, nn.PReLU)
    return ("num_parameters",)


def width(module: nn.Module, side: int) -> int:
    """Return the number of channels on one side of a module of a type that can be cut."""
    return int(getattr(module, _counts(module, side)[0]))


def weight_dimension(module: nn.Module, side: int) -> int:
    """Return the weight's dimension that corresponds to a side."""
    return 1 - side if isinstance(module, _ConvNd) and module.transposed and not is_depthwise(module) else side


def in_whole_groups(module: nn.Module, side: int, indices: Iterable[int]) -> set[int]:
    """Return the subset of the indices whose removal keeps all groups of a grouped convolution alike.

    In dimension 0, which concatenates the groups, the same number is removed from each group (the first ones); in the
    other dimension, the same positions.
    """
    wanted = set(indices)
    if not isinstance(module, _ConvNd) or module.groups == 1 or is_depthwise(module):
        return wanted
    channels = width(module, side) // module.groups
    of_group = [sorted(i for i in wanted if i // channels == group) for group in range(module.groups)]
    if weight_dimension(module, side) == 0:
        fewest = min(map(len, of_group))
        return {i for own in of_group for i in own[:fewest]}
    places = set.intersection(*({i % channels for i in own} for own in of_group))
    return {i for i in wanted if i % channels in places}


def crop(tensor: Tensor, removed: Mapping[int, Sequence[int]]) -> Tensor:
    """Return a tensor without the removed indices; used for example on the mask of a cut weight.

    Args:
        tensor: shaped as before the cut.
        removed: indices by dimension, as in `Removed`.

    >>> crop(torch.arange(6).view(2, 3), {0: [0], 1: [1]}).tolist()
    [[3, 5]]
    """
    for dimension, indices in removed.items():
        gone = set(indices)
        kept = [i for i in range(tensor.shape[dimension]) if i not in gone]
        tensor = tensor.index_select(dimension, torch.tensor(kept, dtype=torch.int64, device=tensor.device))
    return tensor


def thin_again(model: nn.Module, record: Sequence[Sequence[Any]], optimizer: Optimizer | None = None) -> Removed:
    """Repeat the cuts of a record, which gives a fresh model the structure that `thin` made.

    The model is changed in place. Cut parameters become new objects; the optimizer gets them in place of the old ones,
    with their state cut in the same way.

    Args:
        model: with the widths that the thinned model had before.
        record: of `Thinned`.
        optimizer: the model's optimizer, if it has one already.

    Returns:
        The indices cut off each parameter.

    Raises:
        UserError: the record belongs to another model, which is then left unchanged.
    """
    modules = dict(model.named_modules())
    _check(modules, record)
    names = {id(parameter): as_built(name) for name, parameter in model.named_parameters()}
    origins: dict[Tensor, Tensor] = {}  # result of a cut -> the tensor before any cut
    current: dict[Tensor, Tensor] = {}
    removed: dict[Tensor, dict[int, list[int]]] = {}
    for name, side, indices in record:
        for before, after, dimension, own in _cut_module(modules[name], side, sorted(indices)):
            origin = origins[after] = origins.get(before, before)
            current[origin] = after
            earlier = removed.setdefault(origin, {}).get(dimension, [])
            gone = set(earlier)
            left = [i for i in range(origin.shape[dimension]) if i not in gone]
            removed[origin][dimension] = sorted([*earlier, *(left[i] for i in own)])
    if optimizer is not None:
        _move(optimizer, current, removed)
    return {names[id(origin)]: own for origin, own in removed.items() if id(origin) in names}


def _check(modules: Mapping[str, nn.Module], record: Sequence[Sequence[Any]]) -> None:
    widths: dict[tuple[str, int], int] = {}
    for name, side, indices in record:
        module = modules.get(name)
        if not isinstance(module, (_ConvNd, nn.Linear, nn.PReLU, *NORMS)):
            what = "nothing" if module is None else f"a {type(module).__name__}"
            raise UserError(f"the record of a thinning is of another model: it cuts {name!r}, which is {what} here")
        channels = widths.get((name, side), width(module, side))
        if max(indices) >= channels or len(indices) >= channels:
            raise UserError(
                f"the record of a thinning is of another model: of {channels} {'input' if side else 'output'} channels "
                f"of {name!r} here it cuts {', '.join(map(str, indices))}"
            )
        widths[name, side] = channels - len(indices)


def _tensors(module: nn.Module, side: int) -> list[tuple[str, int]]:
    """Return the names of a module's tensors that have the channels of a side, each with its channel dimension."""
    if isinstance(module, NORMS):
        names = ("weight", "bias", "running_mean", "running_var")
        return [(name, 0) for name in names if getattr(module, name) is not None]
    found = [("weight", weight_dimension(module, side))]
    if side == 0 and getattr(module, "bias", None) is not None:
        found.append(("bias", 0))
    return found


def _cut_module(module: nn.Module, side: int, indices: list[int]) -> list[Cut]:
    """Cut all tensors of a module, and the tensors of its parametrizations that have the weight's channels."""
    cuts = []
    for name, dimension in _tensors(module, side):
        own = indices
        if isinstance(module, _ConvNd) and dimension == 1:  # this dimension has the channels of one group
            each = width(module, side) // module.groups
            own = sorted({i % each for i in indices})
        if not parametrize.is_parametrized(module, name):
            cuts.append(_replace(module, name, dimension, own))
            continue
        behind: Any = module.parametrizations[name]  # type: ignore[index]
        shape = behind.original.shape
        cuts.append(_replace(behind, "original", dimension, own))
        for part in behind.children():
            for part_name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
                where = _channels_of(tensor, shape, dimension)
                if where is not None:
                    cuts.append(_replace(part, part_name, where, own))
    for attribute in _counts(module, side):
        setattr(module, attribute, getattr(module, attribute) - len(indices))
    return cuts


def _channels_of(tensor: Tensor, shape: torch.Size, dimension: int) -> int | None:
    """Return the dimension of a quantizer's tensor (such as per-filter scales) that must be cut too, or None."""
    if tensor.dim() == len(shape) and tensor.shape[dimension] == shape[dimension] > 1:
        return dimension
    return 0 if dimension == 0 and tensor.shape == shape[:1] else None


def _replace(owner: nn.Module, name: str, dimension: int, indices: list[int]) -> Cut:
    old = getattr(owner, name)
    new = crop(old.detach(), {dimension: indices})
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        if old.grad is not None:
            new.grad = crop(old.grad, {dimension: indices})
    setattr(owner, name, new)
    return old, new, dimension, indices


def _move(
    optimizer: Optimizer, current: Mapping[Tensor, Tensor], removed: Mapping[Tensor, Mapping[int, list[int]]]
) -> None:
    """Replace the optimizer's cut parameters; state of the parameter's shape (moments) is cut in the same way."""
    for group in optimizer.param_groups:
        group["params"] = [current.get(parameter, parameter) for parameter in group["params"]]
    for old, new in current.items():
        if old in optimizer.state:
            optimizer.state[new] = {
                key: crop(value, removed[old]) if isinstance(value, Tensor) and value.shape == old.shape else value
                for key, value in optimizer.state.pop(old).items()
            }
