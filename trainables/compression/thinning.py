"""Thinning: removal of a model's zero filters and channels, which makes it smaller and faster.

Where what follows a removed filter (a norm's shift, a bias) is not zero, the model's outputs change by
`Thinned.difference`; docs/compression.md says why. All cuts are first tried on a copy, in double precision.

A cut is (module, side, indices): side 0 the output channels, 1 the input channels. A convolution's weight is (C_out,
C_in / groups, *kernel), a transposed one's (C_in, C_out / groups, *kernel): there side 0 is dimension 1. Norms, PReLU
and depthwise convolutions have the same channels on both sides; their cuts have side 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainables.compression.model_copies import as_built, bare_copy, evaluating
from trainables.errors import UserError
from trainables.runtime.model_copy import copy_of
from trainables.workloads.batch_structure import tensors_in

NORMS = (_BatchNorm, _InstanceNorm)

#: Arguments of a forward pass, by position and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Kind = Literal["filters", "channels", "structures"]
#: Cuts of a model in plain types: [[module, side, [indices]], ...], in the order of the cuts; indices are those at the
#: time of the cut.
Record = list[list[Any]]
#: Indices cut off parameters: name -> dimension -> indices before any cut, ascending.
Removed = dict[str, dict[int, list[int]]]
#: Indices to remove, by (module, side).
Cuts = dict[tuple[str, int], set[int]]


def is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution with one filter for each input channel."""
    return isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels == module.out_channels


def _counts(module: nn.Module, side: int) -> tuple[str, ...]:
    """Return the attributes that hold the number of channels on one side of a module that can be cut."""
    if is_depthwise(module):
        return ("out_channels", "in_channels", "groups")
    if isinstance(module, (_ConvNd, nn.Linear)):
        return (f"{('out', 'in')[side]}_{'channels' if isinstance(module, _ConvNd) else 'features'}",)
    return ("num_features",) if isinstance(module, NORMS) else ("num_parameters",)


def width(module: nn.Module, side: int) -> int:
    """Return the number of channels on one side of a module that can be cut."""
    return int(getattr(module, _counts(module, side)[0]))


def weight_dimension(module: nn.Module, side: int) -> int:
    """Return the weight's dimension that corresponds to a side."""
    return 1 - side if isinstance(module, _ConvNd) and module.transposed and not is_depthwise(module) else side


# --- Cutting modules and all tensors that have their channels: norms, masks, optimizer state --------------------------


def crop(tensor: Tensor, removed: Mapping[int, Sequence[int]]) -> Tensor:
    """Return a tensor without the removed indices, given by dimension; used for example on the mask of a cut weight.

    >>> crop(torch.arange(6).view(2, 3), {0: [0], 1: [1]}).tolist()
    [[3, 5]]
    """
    for dimension, indices in removed.items():
        kept = torch.ones(tensor.shape[dimension], dtype=torch.bool)
        kept[list(indices)] = False
        tensor = tensor.index_select(dimension, kept.nonzero().flatten().to(tensor.device))
    return tensor


def thin_again(model: nn.Module, record: Sequence[Sequence[Any]], optimizer: Optimizer | None = None) -> Removed:
    """Repeat the cuts of a record, which gives a fresh model the structure that `thin` made.

    The model is changed in place. Cut parameters become new objects; the optimizer gets them in place of the old ones,
    with their state cut in the same way. Returns the indices cut off each parameter.
    """
    modules = dict(model.named_modules())
    by_module: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for name, side, indices in merged_record(modules, record):
        by_module[name][side] = indices
    names = {id(parameter): as_built(name) for name, parameter in model.named_parameters()}
    replaced: dict[Tensor, tuple[Tensor, dict[int, list[int]]]] = {}
    for name, sides in by_module.items():
        for owner, attribute, removed in _tensors(modules[name], sides):
            old = getattr(owner, attribute)
            new = crop(old.detach(), removed)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
                new.grad = None if old.grad is None else crop(old.grad, removed)
            setattr(owner, attribute, new)
            replaced[old] = (new, removed)
        for side, indices in sides.items():
            for count in _counts(modules[name], side):
                setattr(modules[name], count, getattr(modules[name], count) - len(indices))
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [replaced[p][0] if p in replaced else p for p in group["params"]]
        for old, (new, removed) in replaced.items():
            if old in optimizer.state:
                optimizer.state[new] = {
                    key: crop(value, removed) if isinstance(value, Tensor) and value.shape == old.shape else value
                    for key, value in optimizer.state.pop(old).items()
                }
    return {names[id(old)]: removed for old, (_, removed) in replaced.items() if id(old) in names}


def merged_record(modules: Mapping[str, nn.Module], record: Sequence[Sequence[Any]]) -> Record:
    """Return an equal record with one cut of each module and side; UserError if it is of a model with other modules."""
    kept: dict[tuple[str, int], list[int]] = {}
    for name, side, indices in record:
        module = modules.get(name)
        is_cut = isinstance(module, (_ConvNd, nn.Linear, nn.PReLU, *NORMS))
        left = kept.get((name, side), range(width(module, side))) if module is not None and is_cut else ()
        if max(indices) >= len(left) or len(indices) >= len(left):
            raise UserError(
                f"the record of a thinning is of another model: it cuts channels {', '.join(map(str, indices))} of "
                f"{name!r}, which has {len(left)} here"
            )
        gone = set(indices)
        kept[name, side] = [channel for i, channel in enumerate(left) if i not in gone]
    return [
        [name, side, sorted(set(range(width(modules[name], side))).difference(left))]
        for (name, side), left in kept.items()
    ]


def _tensors(module: Any, sides: Mapping[int, list[int]]) -> list[tuple[nn.Module, str, dict[int, list[int]]]]:
    """Return all tensors that have a module's channels: owner, attribute, and the indices to cut by dimension.

    Among them are those of parametrizations, such as the scales that a quantizer has for each filter.
    """
    cuts = {weight_dimension(module, side): indices for side, indices in sides.items()}
    shape = () if module.weight is None else module.weight.shape  # None: a norm without one
    owners = [module, *(module.parametrizations.modules() if parametrize.is_parametrized(module) else ())]
    found = []
    for owner in owners:
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if tensor.dim() == 1:
                own = {0: sides[0]} if 0 in sides and len(tensor) == width(module, 0) else {}
            else:
                own = {dim: indices for dim, indices in cuts.items()
                       if tensor.dim() == len(shape) > 1 and tensor.shape[dim] == shape[dim] > 1}  # fmt: skip
            if own:
                found.append((owner, name, own))
    return found


# --- Groups of channels that can only be removed together, and which of them are zero wherever they are used ----------
# torch_pruning finds the coupling by tracing a forward pass: a channel of a layer is also a channel of the norm after
# it and of the layers it is added to, and an input channel (after a flattening: several columns) of the layers that
# read it.
#
# Symbols: r a channel of the group's first layer, the root; every module of the group has indices for r.
#     dead    a module's output in r is zero, because a filter is zero there and later norms and biases will be zeroed
# A channel is removed if each layer that reads it reads zeros (filters) or multiplies it by zeros (channels).

#: Node types that keep a zero channel zero and do not mix it with others; other activations are found by the outputs.
_PASSES = ("BN", "IN", "PRELU", "ELEMENTWISE", "RESHAPE", "CONCAT", "SPLIT", "SLICE", "EXPAND", "DEPTHWISE_CONV")
_WEIGHTED = ("CONV", "LINEAR")
_LAYERS = (*_WEIGHTED, "BN", "IN", "DEPTHWISE_CONV")
#: Node types with tensors that are cut.
_CUT = (*_LAYERS, "PRELU")


class _Part:
    """One side (output or input channels) of one module of a group."""

    def __init__(self, node: Any, side: int, names: Mapping[nn.Module, str]) -> None:
        self.node, self.side = node, side
        self.type: str = node.type.name
        self.module: nn.Module = node.module
        self.name = names.get(self.module, "")
        self.indices: dict[int, list[int]] = defaultdict(list)  # the module's own indices, by root channel r
        self.is_one_number = self.type == "PRELU" and width(self.module, 0) == 1
        """True for a PReLU that has one slope for all channels."""
        self._zeros: list[bool] = []  # whether all weights of a channel of the module's are zero
        if isinstance(self.module, (_ConvNd, nn.Linear)):
            zero = self.module.weight.detach() == 0
            self._zeros = zero.transpose(0, weight_dimension(self.module, side)).flatten(1).all(1).tolist()

    def is_zero(self, r: int) -> bool:
        own = self.indices.get(r, [])
        return bool(own) and all(i < len(self._zeros) and self._zeros[i] for i in own)

    def of(self, channels: Iterable[int]) -> set[int]:
        """Return the module's own indices of some root channels."""
        return {i for r in channels for i in self.indices.get(r, [])}


class _Group:
    """Coupled channels of one root, found by torch_pruning."""

    def __init__(self, parts: list[_Part], excluded: Container[str]) -> None:
        self.parts, self.excluded = parts, excluded
        self.by_node = {id(part.node): part for part in parts if part.side == 0}
        self.layers = [part for part in parts if part.type in _LAYERS]
        self._is_dead = cache(self._find_dead)

    def cuts(self, kind: Kind, round_to: int) -> Cuts:
        """Return what can be removed."""
        sides = {"filters": (0,), "channels": (1,), "structures": (0, 1)}[kind]
        going = [
            r
            for r in sorted(self.parts[0].indices)
            if any(part.side in sides and part.is_zero(r) for part in self.layers) and self._can_go(r, kind)
        ]
        while going and not self._fits(going, round_to):
            going.pop()
        cuts: Cuts = {}
        for part in self.parts:
            own = part.of(going)
            if own and part.type in _CUT and not part.is_one_number:
                cuts.setdefault((part.name, part.side), set()).update(own)
        return cuts

    def _can_go(self, r: int, kind: Kind) -> bool:
        """Return whether all parts can do without a channel, and each layer that reads it reads or makes zeros."""
        there = [part for part in self.parts if r in part.indices]
        for part in there:
            if part.type not in (*_PASSES, *_WEIGHTED):  # an output of the model, or it does not treat them one by one
                return False
            if part.type in _CUT and (
                part.name in self.excluded
                or not (part.is_one_number or max(part.indices[r]) < width(part.module, part.side))
            ):
                return False
        readers = [part for part in there if part.side == 1]
        return bool(readers) and all(
            (kind != "channels" and all(self._is_dead(node, r) for node in inputs_of(part.node)))
            or (kind != "filters" and part.is_zero(r))
            for part in readers
        )

    def _find_dead(self, node: Any, r: int) -> bool:
        """Return whether a node's output in r is zero."""
        part = self.by_node.get(id(node))
        if part is None or r not in part.indices:
            return False
        if part.type in _WEIGHTED or (part.type == "DEPTHWISE_CONV" and part.is_zero(r)):
            return part.is_zero(r)
        inputs = inputs_of(node)
        if part.type == "CONCAT":
            inputs = [i for i in inputs if id(i) in self.by_node and r in self.by_node[id(i)].indices]
        return part.type in _PASSES and bool(inputs) and all(self._is_dead(i, r) for i in inputs)

    def _fits(self, going: list[int], round_to: int) -> bool:
        """Return whether each layer keeps an output, and widths that change are multiples."""
        for part in self.layers:
            lost = len(part.of(going)) if part.side == 0 else 0
            kept = width(part.module, part.side) - lost
            if lost and (kept == 0 or kept % round_to):
                return False
        return True


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes whose output a node reads, without a linear layer's transposed weight."""
    return [i for i in node.inputs if i.inputs or not i.grad_fn.name().startswith("TBackward")]


def check_installed() -> None:
    """Raise UserError where torch_pruning is not installed; does not import it, which would be slow."""
    if find_spec("torch_pruning") is None:
        raise UserError("thinning needs torch_pruning, which is not installed: pip install 'tune-cac[thin]'")


def coupled_groups(
    model: nn.Module, forward: Callable[[nn.Module], list[Tensor]], excluded: Container[str]
) -> list[_Group]:
    """Return all groups of coupled channels of a model, each rooted at its widest layer, which has every channel.

    The model is a bare copy in eval mode, all parameters requiring gradients; ``forward`` returns its outputs on the
    example, with a gradient graph; ``excluded`` are names of modules that cannot be cut. UserError if torch_pruning is
    not installed, or cannot trace the model.
    """
    check_installed()
    import torch_pruning  # type: ignore[import-untyped]

    graph = torch_pruning.DependencyGraph()
    names = {module: name for name, module in model.named_modules()}
    seen: set[nn.Module] = set()
    groups = []
    try:
        with torch.enable_grad():
            graph.build_dependency(model, (), forward_fn=lambda traced, _: forward(traced), verbose=False)
            _map_flattenings(graph, torch_pruning.ops.OPTYPE)
            layers = [module for module in graph.module2node if isinstance(module, (_ConvNd, nn.Linear))]
            for module in sorted(layers, key=lambda layer: -width(layer, 0)):
                if module in seen:
                    continue
                prune = graph.get_pruner_of_module(module).prune_out_channels
                parts: dict[tuple[int, int], _Part] = {}
                for item in graph.get_pruning_group(module, prune, list(range(width(module, 0)))):
                    target = item.dep.target
                    both = not isinstance(target.module, (_ConvNd, nn.Linear)) or is_depthwise(target.module)
                    side = 0 if both or item.dep.handler.__name__ == "prune_out_channels" else 1
                    if (id(target), side) not in parts:
                        parts[id(target), side] = _Part(target, side, names)
                    part = parts[id(target), side]
                    for index, r in zip(item.idxs, item.root_idxs, strict=True):
                        if index not in part.indices[r]:
                            part.indices[r].append(index)
                    if side == 0:
                        seen.add(target.module)
                groups.append(_Group(list(parts.values()), excluded))
    except Exception as error:  # the model's own operations can raise any type
        raise UserError(
            f"the model cannot be thinned, for torch_pruning cannot follow it: {type(error).__name__}: {error}; "
            "leave out the extension that removes filters or channels"
        ) from error
    return groups


# --- Mapping between a channel and the columns of a linear layer that reads it after a flattening ---------------------
# torch_pruning derives the mapping from the channels it infers along one path back through the graph, which is wrong
# after a shortcut that pads with zero channels (ResNet for 32x32 images, option A). The flattened shape is known
# exactly: autograd saves it.
#
# Shapes: (N, C, *places) is flattened to (N, C * P), P = prod(places); channel c becomes columns c P .. (c + 1) P - 1.


def _map_flattenings(graph: Any, kinds: Any) -> None:
    """Set the mapping of every flattening in torch_pruning's graph, and prevent it from inferring them again."""
    from torch_pruning.dependency.index_mapping import _FlattenIndexMapping  # type: ignore[import-untyped]

    for node in graph.module2node.values():
        if node.type != kinds.RESHAPE:
            continue
        shape = [int(size) for size in getattr(node.grad_fn, "_saved_self_sym_sizes", ())]
        if len(shape) < 4 or _channels_behind(node) != prod(shape[1:]):
            continue
        places = prod(shape[2:])
        for other in node.inputs:
            _set(other, node, _FlattenIndexMapping(places))
            _set(node, other, _FlattenIndexMapping(places, reverse=True))
        for other in node.outputs:
            _set(other, node, None)
            _set(node, other, None)
        node.type = kinds.ELEMENTWISE  # torch_pruning infers only RESHAPE nodes again


def _set(source: Any, target: Any, mapping: Callable[[list[Any]], list[Any]] | None) -> None:
    for dependency in source.dependencies:
        if dependency.target is target:
            dependency.index_mapping[0] = mapping


def _channels_behind(node: Any) -> int | None:
    """Return the input channels of the first layer after a node; None without one."""
    seen, waiting = set(), [node]
    while waiting:
        behind = waiting.pop()
        if id(behind) in seen:
            continue
        seen.add(id(behind))
        if isinstance(behind.module, (_ConvNd, nn.Linear, *NORMS)):
            return width(behind.module, 1)
        waiting += behind.outputs
    return None


# --- Removal, with a check that the outputs stay the same -------------------------------------------------------------

#: Number of samples of the example that are used.
_SAMPLES = 8
#: Largest output difference attributed to rounding (another order of summation), as a share of the largest output.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """Result of a thinning."""

    record: Record  # the cuts, for `thin_again`, one of each module and side. Empty if nothing was cut.
    removed: Removed  # the same by parameter
    exact: bool  # true if the outputs on the example are unchanged in eval mode, apart from rounding
    difference: float  # the largest absolute change of an output on the example


def thin(
    model: nn.Module,
    example_inputs: Sequence[Any],
    optimizer: Optimizer | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    kind: Kind = "structures",
    round_to: int = 1,
) -> Thinned:
    """Remove zero filters or channels and all that depends on them; every layer keeps at least one.

    The model is changed in place as by `thin_again`; masks and other tensors of its parameters' shapes are left to the
    caller (`crop`). A model with quantized weights is thinned by its float weights. Parameters that several modules
    share, and modules that are called more than once, are not cut.

    Args:
        model: the model, whose pruned weights are zero.
        example_inputs: the model's positional arguments. Only the first samples are used.
        optimizer: of the model.
        kwargs: its arguments by name.
        kind: ``filters`` removes zero filters with the weights that read them; ``channels`` removes zero input channels
            with the filters that produced them; ``structures`` does both.
        round_to: widths stay multiples of this, >= 1.

    UserError: torch_pruning is not installed or cannot trace the model.
    """
    trial = _Trial(model, _first_samples((tuple(example_inputs), dict(kwargs or {}))))
    record: Record = []
    with evaluating(trial.model):
        while cuts := trial.cut(kind, round_to):  # a cut can make more filters zero
            record += cuts
        difference = trial.difference()
    record = merged_record(dict(model.named_modules()), record)
    removed = thin_again(model, record, optimizer)
    return Thinned(record=record, removed=removed, exact=difference <= trial.tolerance, difference=difference)


class _Trial:
    """Copy of the model that is thinned until nothing more can be removed."""

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        self.model = bare_copy(model).requires_grad_(True).double()
        self.arguments = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, arguments)
        dtype = torch.float64
        with evaluating(self.model):
            try:
                self.reference = self._outputs(self.model)
            except RuntimeError:  # its forward creates tensors of a fixed dtype
                self.model, self.arguments = bare_copy(model).requires_grad_(True), arguments
                dtype = torch.float32
                self.model.eval()
                self.reference = self._outputs(self.model)
            self.excluded = self._excluded()
        largest = max((float(t.abs().max()) for t in self.reference if t.numel()), default=0.0)
        self.tolerance = _ROUNDING[dtype] * max(largest, 1e-30)
        """Largest output difference that is attributed to rounding."""

    def _outputs(self, model: nn.Module) -> list[Tensor]:
        args, kwargs = self.arguments
        return [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]

    def _excluded(self) -> set[str]:
        """Return the modules that cannot be cut: called more than once, with groups, a shared or a computed weight."""
        calls: Counter[nn.Module] = Counter()
        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.enter_context(module.register_forward_hook(lambda called, *_: calls.update([called])))
            self._outputs(self.model)
        uses = Counter(parameter for _, parameter in self.model.named_parameters(remove_duplicate=False))
        found = set()
        for name, module in self.model.named_modules():
            own = [tensor for key in ("weight", "bias") if (tensor := getattr(module, key, None)) is not None]
            is_fixed = any(not isinstance(tensor, nn.Parameter) or uses[tensor] > 1 for tensor in own)
            grouped = isinstance(module, _ConvNd) and module.groups > 1 and not is_depthwise(module)
            if calls[module] > 1 or grouped or is_fixed:
                found.add(name)
        return found

    def difference(self) -> float:
        return _largest_difference(self.reference, self._outputs(self.model))

    def cut(self, kind: Kind, round_to: int) -> Record:
        groups = coupled_groups(self.model, self._outputs, self.excluded)
        found = [cuts for group in groups if (cuts := group.cuts(kind, round_to))]
        record, thinner = self._without(found)
        if thinner is None:
            # Without some the model fails, or an activation makes something of zero.
            record, thinner = self._without([cuts for cuts in found if self._without([cuts])[1] is not None])
        if thinner is None:
            return []
        self.model = thinner
        return record

    def _without(self, found: Sequence[Cuts]) -> tuple[Record, nn.Module | None]:
        """Return the cuts of several groups, and the model after them.

        The model is None without cuts, or if it does not compute the same as with the cut norms and biases zeroed.
        """
        cuts: Cuts = {}  # a layer that reads channels of several roots is cut for each
        for one in found:
            for key, indices in one.items():
                cuts.setdefault(key, set()).update(indices)
        record: Record = [[name, side, sorted(indices)] for (name, side), indices in cuts.items()]
        if not cuts:
            return record, None
        tried = copy_of(self.model)
        for name, side, indices in record:
            module: Any = tried.get_submodule(name)
            if side == 0 and isinstance(module, (_ConvNd, nn.Linear, *NORMS)):
                for parameter in (module.weight, module.bias) if isinstance(module, NORMS) else (module.bias,):
                    if parameter is not None:
                        parameter.data[indices] = 0
        before = self._outputs(tried)
        try:
            thin_again(tried, record)
            after = self._outputs(tried)
        except (RuntimeError, ValueError, IndexError, TypeError):  # the forward has hard-coded widths
            return record, None
        same = [t.shape for t in before] == [t.shape for t in after]
        return record, tried if same and _largest_difference(before, after) <= self.tolerance else None


def _first_samples(arguments: Arguments) -> Arguments:
    """Return the arguments for the first samples only; unchanged unless all tensors have the same number of rows."""
    rows = {len(t) if t.dim() else 0 for t in tensors_in(arguments)}
    if len(rows) != 1 or rows == {0}:
        return arguments
    first: Arguments = tree_map_only(Tensor, lambda t: t[:_SAMPLES], arguments)
    return first


def _largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a.numel()), default=0.0)
