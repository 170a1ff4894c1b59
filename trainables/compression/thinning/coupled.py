"""Groups of channels that can only be removed together, and which of them are zero wherever they are used.

torch_pruning finds the coupling by tracing a forward pass: a channel of a layer is also a channel of the norm after it
and of the layers it is added to, and an input channel (after a flattening: several columns) of the layers that read it.

Symbols: r a channel of the group's first layer, the root; every module of the group has indices for r.
    dead    a module's output in r is zero, because a filter is zero there and later norms and biases will be zeroed
    unread  the weights for r are zero in every layer that reads it
A channel is removed if each layer that reads it reads zeros (filters) or multiplies it by zeros (channels).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from trainables.compression.thinning.cutting import in_whole_groups, is_depthwise, weight_dimension, width
from trainables.compression.thinning.flattening import map_flattenings
from trainables.errors import UserError

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
