"""Removal of a model's zero filters and channels, with a check that the outputs stay the same.

A zero filter before a batch norm still outputs a constant, the norm's beta - gamma mean / std, and a filter with a bias
outputs its bias. Removing the filter treats gamma, beta and bias as zero. Where they are not zero, the model's outputs
change by `Thinned.difference`; thinning is exact if they are pruned together with the filter.

All cuts are first tried on a copy, in double precision.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from trainables.compression.model_copies import as_built, bare_copy, evaluating
from trainables.compression.thinning.cutting import (
    NORMS,
    Record,
    Removed,
    in_whole_groups,
    is_depthwise,
    thin_again,
    weight_dimension,
    width,
)
from trainables.errors import UserError
from trainables.workloads.batch_structure import tensors_in

# --- Groups of channels that can only be removed together, and which of them are zero wherever they are used ----------
# torch_pruning finds the coupling by tracing a forward pass: a channel of a layer is also a channel of the norm after
# it and of the layers it is added to, and an input channel (after a flattening: several columns) of the layers that
# read it.
#
# Symbols: r a channel of the group's first layer, the root; every module of the group has indices for r.
#     dead    a module's output in r is zero, because a filter is zero there and later norms and biases will be zeroed
#     unread  the weights for r are zero in every layer that reads it
# A channel is removed if each layer that reads it reads zeros (filters) or multiplies it by zeros (channels).


Kind = Literal["filters", "channels", "structures"]

#: Indices to remove, by (module, side).
Cuts = dict[tuple[str, int], set[int]]

#: Node types that keep a zero channel zero and do not mix it with others. An activation that maps zero to another
#: value is detected when the outputs are compared.
_PASSES = ("BN", "IN", "PRELU", "ELEMENTWISE", "RESHAPE", "CONCAT", "SPLIT", "SLICE", "EXPAND", "DEPTHWISE_CONV")
_WEIGHTED = ("CONV", "LINEAR")
_LAYERS = (*_WEIGHTED, "BN", "IN", "DEPTHWISE_CONV")
#: Node types with tensors that are cut.
_CUT = (*_LAYERS, "PRELU")


@dataclass(frozen=True)
class Left:
    """Zero channels that are not removed."""

    module: str
    """The layer that has these filters or channels."""
    channels: int
    """Their number."""
    reason: str
    """The reason for which they are not removed."""


@dataclass
class Part:
    """One side (output or input channels) of one module of a group."""

    node: Any
    """torch_pruning's graph node."""
    side: int
    indices: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The module's own indices, by root channel r."""

    def __post_init__(self) -> None:
        self.type: str = self.node.type.name
        """torch_pruning's name of the node type."""
        self.module: nn.Module = self.node.module
        """The module itself."""


@dataclass
class Found:
    """Channels that can be removed from a group, and zero channels that cannot."""

    root: str
    cuts: Cuts
    left: list[Left]


class Group:
    """Coupled channels of one root, found by torch_pruning."""

    def __init__(self, parts: list[Part], names: dict[nn.Module, str], excluded: Mapping[str, str]):
        self.parts = parts
        self.names = names
        self.excluded = excluded
        self.root = names[parts[0].module]
        self.channels = sorted(parts[0].indices)
        self.by_node = {id(part.node): part for part in parts if part.side == 0}
        self.readers = [part for part in parts if part.side == 1]
        self.layers = [part for part in parts if part.type in _LAYERS]
        self._dead: dict[tuple[int, int], bool] = {}
        self._zeros = {
            (id(part.node), part.side): zero_slices(part.module, part.side)
            for part in self.layers
            if part.type in (*_WEIGHTED, "DEPTHWISE_CONV")
        }

    def find(self, kind: Kind, round_to: int) -> Found:
        """Find the channels to remove, and the zero channels that are kept with the reason."""
        removable, reasons = [], defaultdict(list)
        for r in self.channels:
            if not self._is_candidate(r, kind):
                continue
            reason = self._obstacle(r, kind)
            if reason is None:
                removable.append(r)
            else:
                reasons[reason].append(r)
        going = self._fitting(removable, round_to)
        if len(going) < len(removable):
            rule = "a layer keeps one" if round_to == 1 else f"widths are multiples of {round_to}"
            reasons[f"{rule}, and groups of a grouped convolution stay alike"] += [
                r for r in removable if r not in going
            ]
        left = [Left(self.root, len(channels), reason) for reason, channels in reasons.items()]
        return Found(self.root, self._cuts(going), left)

    def _is_candidate(self, r: int, kind: Kind) -> bool:
        """Return whether any layer's filter or input channel for r is zero."""
        sides = {"filters": (0,), "channels": (1,), "structures": (0, 1)}[kind]
        return any(
            part.side in sides and self._is_zero(part, r) for part in self.layers if part.type not in ("BN", "IN")
        )

    def _obstacle(self, r: int, kind: Kind) -> str | None:
        """Return why a channel cannot be removed; None if it can."""
        for part in self.parts:
            if r not in part.indices:
                continue
            if part.type == "OUTPUT":
                return "it is an output of the model"
            if part.type not in (*_PASSES, *_WEIGHTED):
                return f"it goes through {self._name(part)}, which does not treat channels one by one"
            if part.type in _CUT:
                reason = self.excluded.get(self.names[part.module])
                if reason is not None:
                    return f"{self._name(part)} {reason}"
                if part.type == "DEPTHWISE_CONV" and not is_depthwise(part.module):
                    return f"{self._name(part)} has several input channels for each filter"
                channels = width(part.module, part.side)
                if max(part.indices[r]) >= channels and not (part.type == "PRELU" and channels == 1):
                    return f"{self._name(part)} has no channel for it"
        readers = [part for part in self.readers if r in part.indices]
        if not readers:
            return "no layer reads it"
        for part in readers:
            read_dead = kind != "channels" and all(self._is_dead(node, r) for node in inputs_of(part.node))
            if not read_dead and not (kind != "filters" and self._is_zero(part, r)):
                return f"{self._name(part)} also reads what is not zero there"
        return None

    def _is_zero(self, part: Part, r: int) -> bool:
        zeros = self._zeros.get((id(part.node), part.side))
        own = part.indices.get(r, [])
        return zeros is not None and bool(own) and all(i < len(zeros) and zeros[i] for i in own)

    def _is_dead(self, node: Any, r: int) -> bool:
        key = (id(node), r)
        if key not in self._dead:
            self._dead[key] = self._find_dead(node, r)
        return self._dead[key]

    def _find_dead(self, node: Any, r: int) -> bool:
        part = self.by_node.get(id(node))
        if part is None or r not in part.indices:
            return False
        if part.type in _WEIGHTED:
            return self._is_zero(part, r)
        if part.type not in _PASSES:
            return False
        if part.type == "DEPTHWISE_CONV" and self._is_zero(part, r):
            return True
        inputs = inputs_of(node)
        if part.type == "CONCAT":
            inputs = [i for i in inputs if id(i) in self.by_node and r in self.by_node[id(i)].indices]
        return bool(inputs) and all(self._is_dead(i, r) for i in inputs)

    def _fitting(self, removable: list[int], round_to: int) -> list[int]:
        """Select as many removable channels as widths and groups allow, the first ones first."""
        going = self._in_whole_groups(removable)
        while going and not self._fits(going, round_to):
            going = self._in_whole_groups(going[:-1])
        return going

    def _in_whole_groups(self, going: list[int]) -> list[int]:
        while True:
            before = len(going)
            for part in self.layers:
                allowed = in_whole_groups(part.module, part.side, _of(part, going)) if part.type in _WEIGHTED else None
                if allowed is not None:
                    going = [r for r in going if allowed.issuperset(part.indices.get(r, []))]
            if len(going) == before:
                return going

    def _fits(self, going: list[int], round_to: int) -> bool:
        for part in self.layers:
            if part.side == 0:
                lost = len(_of(part, going))
                kept = width(part.module, 0) - lost
                if lost and (kept == 0 or kept % round_to):
                    return False
        return True

    def _cuts(self, going: list[int]) -> Cuts:
        cuts: Cuts = {}
        for part in self.parts:
            own = _of(part, going)
            uncut = part.type == "PRELU" and width(part.module, 0) == 1
            if own and part.type in _CUT and not uncut:
                cuts.setdefault((self.names[part.module], part.side), set()).update(own)
        return cuts

    def _name(self, part: Part) -> str:
        return self.names.get(part.module) or f"an operation ({part.type.lower()})"


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes whose output a node reads, without a linear layer's transposed weight."""
    return [i for i in node.inputs if i.inputs or not i.grad_fn.name().startswith("TBackward")]


def _of(part: Part, channels: Iterable[int]) -> set[int]:
    return {i for r in channels for i in part.indices.get(r, [])}


def zero_slices(module: nn.Module, side: int) -> list[bool]:
    """Return for each output channel (side 0) or input channel (side 1) whether all its weights are zero."""
    assert isinstance(module, (_ConvNd, nn.Linear))
    weight: Tensor = module.weight.detach()
    if weight_dimension(module, side) == 0:
        return (weight == 0).flatten(1).all(1).tolist()
    groups = module.groups if isinstance(module, _ConvNd) else 1
    by_group = (weight == 0).unflatten(0, (groups, -1)).transpose(1, 2).flatten(2).all(2)
    return by_group.flatten().tolist()


def check_installed() -> None:
    """Raise UserError where torch_pruning is not installed; does not import it, which would be slow."""
    try:
        missing = find_spec("torch_pruning") is None
    except ValueError:  # sys.modules has an entry without a spec
        missing = True
    if missing:
        raise UserError("thinning needs torch_pruning, which is not installed: pip install 'tune-cac[thin]'")


def coupled_groups(
    model: nn.Module, forward: Callable[[nn.Module], list[Tensor]], excluded: Mapping[str, str]
) -> list[Group]:
    """Return all groups of coupled channels of a model.

    Args:
        model: a bare copy in eval mode, all parameters requiring gradients.
        forward: returns the model's outputs on the example, with a gradient graph.
        excluded: reasons by name of modules that cannot be cut, such as "is used more than once".

    Raises:
        UserError: torch_pruning is not installed, or cannot trace the model.
    """
    check_installed()
    import torch_pruning  # type: ignore[import-untyped]

    graph = torch_pruning.DependencyGraph()
    try:
        with torch.enable_grad():
            graph.build_dependency(model, (), forward_fn=lambda traced, _: forward(traced), verbose=False)
            map_flattenings(graph)
            found = _widest_first(graph)
    except Exception as error:  # the model's own operations can raise any type
        raise UserError(
            f"the model cannot be thinned, for torch_pruning cannot follow it: {type(error).__name__}: {error}; "
            "leave out the extension that removes filters or channels"
        ) from error
    names = {module: name for name, module in model.named_modules()}
    groups = []
    for items in found:
        parts: dict[tuple[int, int], Part] = {}
        for item in items:
            side = _side_of(item.dep)
            part = parts.setdefault((id(item.dep.target), side), Part(item.dep.target, side))
            for index, r in zip(item.idxs, item.root_idxs, strict=True):
                if index not in part.indices[r]:
                    part.indices[r].append(index)
        groups.append(Group(list(parts.values()), names, excluded))
    return groups


def _widest_first(graph: Any) -> list[Any]:
    """Return each of torch_pruning's groups once, rooted at its widest layer, so that every channel is included."""
    layers = [module for module in graph.module2node if isinstance(module, (_ConvNd, nn.Linear))]
    seen: set[nn.Module] = set()
    groups = []
    for module in sorted(layers, key=lambda layer: -width(layer, 0)):
        if module not in seen:
            pruner = graph.get_pruner_of_module(module)
            groups.append(graph.get_pruning_group(module, pruner.prune_out_channels, list(range(width(module, 0)))))
            seen.update(item.dep.target.module for item in groups[-1] if _side_of(item.dep) == 0)
    return groups


def _side_of(dependency: Any) -> int:
    return 0 if dependency.handler.__name__ == "prune_out_channels" or is_both_sided(dependency) else 1


def is_both_sided(dependency: Any) -> bool:
    """Return whether the dependency's target has the same channels on both sides."""
    module = dependency.target.module
    return not isinstance(module, (_ConvNd, nn.Linear)) or is_depthwise(module)


# --- Mapping between a channel and the columns of a linear layer that reads it after a flattening ---------------------
# torch_pruning derives the mapping from the channels it infers along one path back through the graph, which is wrong
# after a shortcut that pads with zero channels (ResNet for 32x32 images, option A). The flattened shape is known
# exactly: autograd saves it.
#
# Shapes: (N, C, *places) is flattened to (N, C * P), P = prod(places); channel c becomes columns c P .. (c + 1) P - 1.

#: Channel indices, each with the index of the root's channel that it comes from (torch_pruning's pairs).
Indices = list[Any]


def map_flattenings(graph: Any) -> None:
    """Set the mapping of every flattening in torch_pruning's graph, and prevent it from inferring them again."""
    import torch_pruning

    kinds = torch_pruning.ops.OPTYPE
    for node in graph.module2node.values():
        if node.type != kinds.RESHAPE:
            continue
        shape = [int(size) for size in getattr(node.grad_fn, "_saved_self_sym_sizes", ())]
        if len(shape) < 4 or _channels_behind(node) != prod(shape[1:]):
            continue
        places = prod(shape[2:])
        for other in node.inputs:
            _set(other, node, _spread(places))
            _set(node, other, _gather(places))
        for other in node.outputs:
            _set(other, node, None)
            _set(node, other, None)
        node.type = kinds.ELEMENTWISE  # torch_pruning infers only RESHAPE nodes again


def _set(source: Any, target: Any, mapping: Callable[[Indices], Indices] | None) -> None:
    for dependency in source.dependencies:
        if dependency.target is target:
            dependency.index_mapping[0] = mapping


def _spread(places: int) -> Callable[[Indices], Indices]:
    return lambda given: [i._replace(idx=k) for i in given for k in range(i.idx * places, (i.idx + 1) * places)]


def _gather(places: int) -> Callable[[Indices], Indices]:
    return lambda given: list(dict.fromkeys(i._replace(idx=i.idx // places) for i in given))


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


# --- Removal of a model's zero filters and channels, with a check that the outputs stay the same ----------------------


__all__ = ["Kind", "Left", "Thinned", "thin"]

#: Number of samples of the example that are used.
_SAMPLES = 8
#: Largest output difference attributed to rounding (another order of summation), as a share of the largest output.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """Result of a thinning."""

    record: Record
    """The cuts, for `thin_again`: [[module, side, [indices]], ...] in plain types; side 0 output channels, 1 input
    channels. Empty if nothing was cut."""
    removed: Removed
    """The same by parameter: name -> dimension -> indices, as `crop` takes it."""
    exact: bool
    """True if the outputs on the example are unchanged in eval mode, apart from rounding."""
    difference: float
    """The largest absolute change of an output on the example."""
    left: tuple[Left, ...]
    """Zero channels that were not removed."""


def thin(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any],
    optimizer: Optimizer | None = None,
    *,
    kind: Kind = "structures",
    round_to: int = 1,
) -> Thinned:
    """Remove zero filters or channels and all that depends on them; every layer keeps at least one.

    The model is changed in place. Cut parameters become new objects; the optimizer gets them in place of the old ones,
    with its state cut in the same way. Masks and other tensors of their shapes are left to the caller (`crop`). A model
    with quantized weights is thinned by its float weights. Parameters that several modules share, and modules that are
    called more than once, are not cut.

    Args:
        model: the model, whose pruned weights are zero.
        example_inputs: the model's input tensor or positional arguments. Only the first samples are used.
        optimizer: of the model.
        kind: ``filters`` removes zero filters with the weights that read them; ``channels`` removes zero input channels
            with the filters that produced them; ``structures`` does both.
        round_to: widths stay multiples of this, >= 1.

    Raises:
        UserError: torch_pruning is not installed or cannot trace the model, or an argument is out of range.
    """
    if kind not in get_args(Kind):
        raise UserError(f"kind of a thinning must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if round_to < 1:
        raise UserError(f"round_to must be >= 1, got {round_to}")
    arguments = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    trial = _Trial(model, _first_samples(arguments))
    with evaluating(trial.model):
        cuts, left = trial.thin(kind, round_to)
        difference = trial.difference()
    record: Record = [[name, side, sorted(indices)] for (name, side), indices in cuts.items()]
    return Thinned(
        record=record,
        removed=thin_again(model, record, optimizer),
        exact=difference <= trial.tolerance,
        difference=difference,
        left=tuple(left),
    )


class _Trial:
    """Copy of the model that is thinned until nothing more can be removed."""

    def __init__(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.model = bare_copy(model).requires_grad_(True).double()
        self.arguments = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
        self.dtype = torch.float64
        with evaluating(self.model):
            try:
                self.reference = self._outputs(self.model)
            except RuntimeError:  # its forward creates tensors of a fixed dtype
                self.model, self.arguments = bare_copy(model).requires_grad_(True), arguments
                self.dtype = torch.float32
                self.model.eval()
                self.reference = self._outputs(self.model)
            self.excluded = self._excluded(_shared(model))
        largest = max((float(t.abs().max()) for t in self.reference if t.numel()), default=0.0)
        self.tolerance = _ROUNDING[self.dtype] * max(largest, 1e-30)
        """Largest output difference that is attributed to rounding."""

    def _outputs(self, model: nn.Module) -> list[Tensor]:
        return [t for t in tensors_in(model(*self.arguments)) if t.is_floating_point()]

    def _excluded(self, shared: set[str]) -> dict[str, str]:
        """Return the modules that cannot be cut: reason by name."""
        calls: Counter[nn.Module] = Counter()
        handles = [
            module.register_forward_hook(lambda called, *_: calls.update([called])) for module in self.model.modules()
        ]
        try:
            self._outputs(self.model)
        finally:
            for handle in handles:
                handle.remove()
        found = {}
        for name, module in self.model.named_modules():
            if calls[module] > 1:
                found[name] = "is used more than once"
            own = [tensor for tensor in ("weight", "bias") if getattr(module, tensor, None) is not None]
            if any(not isinstance(getattr(module, tensor), nn.Parameter) for tensor in own):
                found[name] = "has a weight that is computed"
            elif any(f"{name}.{tensor}" in shared for tensor in own):
                found[name] = "shares a parameter"
        return found

    def difference(self) -> float:
        """Return the largest absolute change of an output."""
        return _largest_difference(self.reference, self._outputs(self.model))

    def thin(self, kind: Kind, round_to: int) -> tuple[Cuts, list[Left]]:
        """Cut repeatedly until nothing can be removed, since a cut can make more filters zero.

        Indices of the result refer to the original model.
        """
        kept: dict[tuple[str, int], list[int]] = {}
        total: Cuts = {}
        while True:
            cuts, left, thinner = self._round(kind, round_to)
            if thinner is None:
                return total, left
            for key, indices in cuts.items():
                before = kept.get(key) or list(range(width(self.model.get_submodule(key[0]), key[1])))
                total.setdefault(key, set()).update(before[i] for i in indices)
                kept[key] = [old for i, old in enumerate(before) if i not in indices]
            self.model = thinner

    def _round(self, kind: Kind, round_to: int) -> tuple[Cuts, list[Left], nn.Module | None]:
        """Return the possible cuts, the zero channels that remain, and the model after the cuts; None without cuts."""
        groups = coupled_groups(self.model, self._outputs, self.excluded)
        found = [group.find(kind, round_to) for group in groups]
        left = [entry for one in found for entry in one.left]
        going = [one for one in found if one.cuts]
        cuts = _merged(going)
        thinner = self._without(cuts)
        if thinner is not None or not cuts:
            return cuts, left, thinner
        sound = []
        for one in going:
            if self._without(one.cuts) is not None:
                sound.append(one)
            else:
                count = len(one.cuts[one.root, 0])
                left.append(Left(one.root, count, "without it the model fails or computes something else"))
        cuts = _merged(sound)
        return cuts, left, self._without(cuts)

    def _without(self, cuts: Cuts) -> nn.Module | None:
        """Return the model after the cuts if it computes the same as with their norms and biases zeroed, else None."""
        if not cuts:
            return None
        tried = copy.deepcopy(self.model)
        _zero(tried, cuts)
        before = self._outputs(tried)
        try:
            thin_again(tried, [[name, side, sorted(indices)] for (name, side), indices in cuts.items()])
            after = self._outputs(tried)
        except (RuntimeError, ValueError, IndexError, TypeError):  # the forward has hard-coded widths
            return None
        same = [t.shape for t in before] == [t.shape for t in after]
        return tried if same and _largest_difference(before, after) <= self.tolerance else None


def _first_samples(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments for the first samples only; unchanged unless all tensors have the same number of rows."""
    rows = {len(a) if a.dim() else 0 for a in arguments if isinstance(a, Tensor)}
    if len(rows) != 1 or rows == {0}:
        return arguments
    return tuple(a[:_SAMPLES] if isinstance(a, Tensor) else a for a in arguments)


def _merged(found: Sequence[Found]) -> Cuts:
    """Merge the cuts of several groups; a layer that reads channels of several roots is cut for each."""
    cuts: Cuts = {}
    for one in found:
        for key, indices in one.cuts.items():
            cuts.setdefault(key, set()).update(indices)
    return cuts


def _zero(model: nn.Module, cuts: Mapping[tuple[str, int], set[int]]) -> None:
    """Zero the biases and norms of the channels to be removed."""
    for (name, side), indices in cuts.items():
        module = model.get_submodule(name)
        if side == 0 and isinstance(module, (_ConvNd, nn.Linear, *NORMS)):
            own = [module.bias] if not isinstance(module, NORMS) else [module.weight, module.bias]
            for parameter in own:
                if parameter is not None:
                    parameter.data[sorted(indices)] = 0


def _shared(model: nn.Module) -> set[str]:
    """Return all names of the parameters that have more than one name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(as_built(name))
    return {name for several in names.values() if len(several) > 1 for name in several}


def _largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a.numel()), default=0.0)
