"""Pruning of the share of the structures that rank lowest.

Shapes and symbols: G structures of a weight, n elements each; s the share to prune; a map is G numbers, 0 removes a
structure.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from trainables.compression.component import Pruner
from trainables.compression.masks import hook_gradient, parameters_as_built
from trainables.compression.schedule.configs import _DesiredConfig, _GradualConfig
from trainables.compression.schedule.names import plain_name
from trainables.compression.schedule.timing import Moment, gradual_share
from trainables.compression.structures import Structures
from trainables.errors import UserError


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator whose numbers depend only on seed and name, the same in each process."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@dataclass(frozen=True, kw_only=True)
class StructuredWeights:
    """Weights whose structures are pruned."""

    names: tuple[str, ...]
    """Parameter names, at least one."""
    structures: Structures
    """The structures that are pruned."""
    has_leader: bool = False
    """True if all weights lose the same structures as the first one."""

    @property
    def ranked(self) -> tuple[str, ...]:
        """Return the names of the weights that are ranked: all, or only the leader."""
        return self.names[:1] if self.has_leader else self.names

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Check that weights of these shapes can be pruned this way.

        Raises:
            UserError: a weight does not have these structures, or not as many as the leader.
        """
        for name in self.names:
            self.structures.check(name, shapes[name])
        leader = self.names[0]
        wanted = self.structures.count(shapes[leader])
        for name in self.names[1:]:
            if self.has_leader and (count := self.structures.count(shapes[name])) != wanted:
                raise UserError(
                    f"group_dependency Leader needs weights with equally many {self.structures.kind}, got {wanted} in "
                    f"{leader} {tuple(shapes[leader])} and {count} in {name} {tuple(shapes[name])}"
                )


class StructuresPruner(Pruner):
    """Base of all pruners of structures: one map per weight, or the leader's map for all.

    Args:
        weights: the weights and their structures.
        share: s at a moment.
    """

    def __init__(self, weights: StructuredWeights, share: Share) -> None:
        self.targets = weights.names
        self.weights = weights
        self.structures = weights.structures
        self._share = share

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        # Thinning changes shapes after the pruner was built.
        self.weights.check({name: weights[name].shape for name in self.targets})
        maps = {}
        for name in self.weights.ranked:
            found = self.map(name, weights[name].detach(), self._share(moment))
            if found is not None:
                maps[name] = found
        if self.weights.has_leader and maps:
            maps = dict.fromkeys(self.targets, maps[self.targets[0]])
        return {name: self.structures.spread(found, weights[name]) for name, found in maps.items()}

    @abstractmethod
    def map(self, name: str, weight: Tensor, share: float) -> Tensor | None:
        """Return the map of one weight, shape (G,); None if it cannot be computed yet."""


class DrawingPruner(StructuresPruner):
    """Base of pruners with random numbers; the generator's state is the pruner's state.

    Args:
        weights, share: see `StructuresPruner`.
        generator: on the CPU; also draws any random share.
    """

    def __init__(self, weights: StructuredWeights, share: Share, *, generator: torch.Generator) -> None:
        super().__init__(weights, share)
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class NormRankedPruner(DrawingPruner):
    """Remove exactly k structures with the smallest norm: sum |w| (Li et al. 2017, section 3.1), or sqrt(sum w^2).

    All structures of a weight have n elements, so ranking by means would give the same order.

    Args:
        weights, share, generator: see `DrawingPruner`.
        order: of the norm.
        group_size: k is a multiple of it.
        noise: standard deviation of the normal factor (mean 1) on each norm, >= 0.
    """

    def __init__(
        self,
        weights: StructuredWeights,
        share: Share,
        *,
        order: Literal[1, 2],
        group_size: int = 1,
        noise: float = 0.0,
        generator: torch.Generator,
    ) -> None:
        super().__init__(weights, share, generator=generator)
        self._order = order
        self._group_size = group_size
        self._noise = noise

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        norms = torch.linalg.vector_norm(self.structures.split(weight), self._order, dim=1)
        if self._noise:
            # Drawn on the CPU, so that the ranking is the same on every device.
            factors = torch.randn(len(norms), generator=self._generator, dtype=torch.float64)
            norms = norms * (1 + self._noise * factors).to(norms)
        return kept_after(norms, structure_count(share, len(norms), self._group_size))


def random_share(least: float, greatest: float, generator: torch.Generator) -> Share:
    """Return a share that is drawn uniformly at each call."""

    def draw(moment: Moment) -> float:
        return least + (greatest - least) * float(torch.rand((), generator=generator, dtype=torch.float64))

    return draw


# --- Pruning of a share of the elements with the smallest values, fixed or growing over the epochs --------------------
# Symbols: s share of the elements that is zero, in [0, 1]; s_i, s_f its first and last value; p the policy's progress.

#: The share to prune at a moment.
Share = Callable[[Moment], float]


def constant_share(share: float) -> Share:
    """Return a share that is the same at every moment."""
    return lambda moment: share


def share_of(settings: _DesiredConfig | _GradualConfig) -> Share:
    """Return the share that settings describe: constant, or a cubic over the policy's active epochs."""
    if isinstance(settings, _DesiredConfig):
        return constant_share(settings.desired_sparsity)
    initial, final = settings.initial_sparsity, settings.final_sparsity
    return lambda moment: gradual_share(initial, final, moment.progress)


class LevelPruner(Pruner):
    """Zero exactly int(s n) of a weight's n elements, those with the smallest absolute values.

    Args:
        shares: by parameter name.
    """

    def __init__(self, shares: Mapping[str, Share]) -> None:
        self.targets = tuple(shares)
        self._shares = dict(shares)

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        return {name: level_mask(weights[name], share(moment)) for name, share in self._shares.items()}


def level_mask(weight: Tensor, share: float) -> Tensor:
    """Return the mask that removes the elements with the smallest absolute values.

    Args:
        weight: any shape.
        share: s.

    Returns:
        Zeros and ones of the weight's shape, type and device; among equal elements the first is removed first.
    """
    kept = kept_after(weight.detach().abs().flatten(), element_count(share, weight.numel()))
    return kept.to(weight.dtype).reshape(weight.shape)


# --- Selection of the k smallest of n values: exact counts, ties by index, the same on every device -------------------
# Symbols: n values; s the share to prune, in [0, 1]; k how many are pruned. A NaN counts as the largest value.


def element_count(share: float, n: int) -> int:
    """Return k = int(s n), as published results count.

    >>> element_count(0.65, 663552)
    431308
    """
    return int(share * n)


def structure_count(share: float, n: int, group_size: int = 1) -> int:
    """Return k = floor(s n), rounded down to a multiple of the group size; less than n unless s is 1.

    >>> [structure_count(0.7, 16), structure_count(0.7, 16, group_size=8), structure_count(1.0, 16)]
    [11, 8, 16]
    """
    # Rounding cannot give n for a share below 1: s n is then at most the floating-point number before n.
    return int(share * n) // group_size * group_size


def kept_after(values: Tensor, count: int) -> Tensor:
    """Return which values are kept when the k smallest are removed; among equal values the first is removed first.

    Args:
        values: shape (n,), any real type, any device.
        count: k, in [0, n].

    Returns:
        Booleans of shape (n,), exactly n - k of them true.
    """
    if count == 0:
        return torch.ones_like(values, dtype=torch.bool)
    # kthvalue does not support half precision on every device; widening keeps the order.
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    values = torch.where(values.isnan(), torch.inf, values)
    last = values.kthvalue(count).values
    kept = values > last
    ties = (values == last).nonzero().flatten()
    # At least k values are <= `last`; the ties beyond k are kept.
    surplus = values.numel() - int(kept.sum()) - count
    kept[ties[ties.numel() - surplus :]] = True
    return kept


# --- Random removal of filters: an exact share, or each filter with a probability -------------------------------------
# Symbols: G filters; s share or probability of removal; a map is G numbers, 0 removes a filter.


class RandomPruner(DrawingPruner):
    """Remove exactly floor(s G) filters, drawn again at each use."""

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        count = self.structures.count(weight.shape)
        kept = torch.ones(count, dtype=torch.bool)
        kept[torch.randperm(count, generator=self._generator)[: structure_count(share, count)]] = False
        return kept


class BernoulliPruner(DrawingPruner):
    """Remove each filter with probability s; the kept filters are multiplied by G over their number.

    If all would be removed, the one with the largest L2 norm is kept.
    """

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        count = self.structures.count(weight.shape)
        kept = (torch.rand(count, generator=self._generator, dtype=torch.float64) >= share).double()
        if not kept.any():
            norms = torch.linalg.vector_norm(self.structures.split(weight), dim=1)
            kept[norms.argmax().cpu()] = 1
        return kept * (count / kept.sum())


# --- Pruning of filters ranked by activations or gradients that are collected during training -------------------------
# Shapes and symbols: F filters of a weight w, shape (F, ...); g the loss's gradient with respect to w; s the share to
# prune. Each decision uses the data collected since the last decision and then discards it.


class _SeenPruner(StructuresPruner):
    """Remove exactly floor(s F) filters with the lowest scores; among equal scores the first is removed first.

    A weight without collected data keeps its current mask, so the first decision is delayed.

    Args: see `StructuresPruner`.
    """

    epochs_before = 1

    def map(self, name: str, weight: Tensor, share: float) -> Tensor | None:
        scores = self.scores(name)
        count = self.structures.count(weight.shape)
        # After thinning, the collected scores include removed filters.
        if scores is None or len(scores) != count:
            return None
        return kept_after(scores, structure_count(share, count))

    @abstractmethod
    def scores(self, name: str) -> Tensor | None:
        """Return the filters' scores, shape (F,), and discard the collected data; None without data."""


class ActivationPruner(_SeenPruner):
    """Remove filters whose activations are most often inactive (APoZ) or have the smallest mean.

    Activations <= 0 count as inactive, so that functions that never return exactly 0 are ranked too.

    Args:
        weights, share: see `StructuresPruner`.
        criterion: ``apoz`` (Hu et al. 2016, eq. 1) or ``mean`` (Molchanov et al. 2017, section 2.2).
    """

    def __init__(self, weights: StructuredWeights, share: Share, *, criterion: Literal["apoz", "mean"]) -> None:
        super().__init__(weights, share)
        self._criterion = criterion
        self._watch = ActivationWatch(self.weights.ranked)

    def start(self, model: nn.Module) -> None:
        self._watch.start(model)

    def stop(self) -> None:
        self._watch.stop()

    def scores(self, name: str) -> Tensor | None:
        sums = self._watch.sums.pop(name, None)
        if sums is None:
            return None
        return -sums.inactive_share if self._criterion == "apoz" else sums.mean

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(state["seen"])


class GradientPruner(_SeenPruner):
    """Remove filters with the smallest |sum g w|, summed over their elements and all backward passes.

    This is the first-order estimate of the loss change when the filter is removed (Molchanov et al. 2017, eq. 8),
    applied to weights instead of activations.
    Terms that are not finite (a step that mixed precision skips) count as 0.

    Args: see `StructuresPruner`.
    """

    def __init__(self, weights: StructuredWeights, share: Share) -> None:
        super().__init__(weights, share)
        self._sums: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def start(self, model: nn.Module) -> None:
        self.stop()
        parameters = parameters_as_built(model)
        for name in self.weights.ranked:
            self._handles.append(hook_gradient(parameters[name], self._adding(name, parameters[name])))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def scores(self, name: str) -> Tensor | None:
        total = self._sums.pop(name, None)
        return None if total is None else total.abs()

    def _adding(self, name: str, weight: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            terms = (gradient.detach().double() * weight.detach()).flatten(1).sum(dim=1)
            terms = terms.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            before = self._sums.get(name)
            fits = before is not None and before.shape == terms.shape
            self._sums[name] = before.to(terms.device) + terms if fits and before is not None else terms

        return hook

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {name: total.clone() for name, total in self._sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = dict(state["sums"])


# --- Statistics of convolutions' activations, collected while a model trains ------------------------------------------
# Shapes: a convolution's output (N, F, ...), F its filters; sums are kept per filter, shape (F,). Nothing here
# synchronizes with the device.

#: Modules whose output is an activation.
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Hardtanh, nn.Softplus, nn.Threshold,
)  # fmt: skip

#: Node names at which the search back through autograd's graph stops: earlier values belong to another layer.
_LAYERS = ("Convolution", "Addmm", "Mm", "Bmm", "Baddbmm", "Linear")


@dataclass
class Sums:
    """Sums over one convolution's activations since the last reset."""

    inactive: Tensor
    """Number of activations <= 0, shape (F,), integers."""
    total: Tensor
    """Sum of the activations, shape (F,)."""
    seen: int
    """Number of activations per filter."""

    def __add__(self, new: Sums) -> Sums:
        # Loaded sums may be on another device than the model.
        inactive, total = self.inactive.to(new.inactive.device), self.total.to(new.total.device)
        return Sums(inactive + new.inactive, total + new.total, self.seen + new.seen)

    @property
    def inactive_share(self) -> Tensor:
        """Return APoZ, the average share of zeros (Hu et al. 2016, eq. 1), shape (F,), in [0, 1]."""
        return self.inactive.double() / self.seen

    @property
    def mean(self) -> Tensor:
        """Return the mean activation, shape (F,)."""
        return self.total / self.seen


class _Output(NamedTuple):
    """Facts about a convolution's output, kept until its activation is found."""

    node: Node | None
    """Autograd node of the output; None without gradients."""
    filters: int
    sums: Sums
    """Of the output's relu."""


def sums_of(activation: Tensor) -> Sums:
    """Sum an activation (N, F, ...) over all dimensions except the second."""
    rest = [d for d in range(activation.dim()) if d != 1]
    return Sums(
        (activation <= 0).sum(dim=rest),
        activation.sum(dim=rest, dtype=torch.float64),
        activation.numel() // activation.shape[1],
    )


def convolutions(model: nn.Module, weights: Sequence[str]) -> dict[str, nn.Module]:
    """Return the convolution that each weight belongs to.

    Raises:
        UserError: a weight does not belong to a convolution.
    """
    modules = {plain_name(name): module for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for name in weights:
        module = modules[name.rpartition(".")[0]]
        if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or not name.endswith("weight"):
            raise UserError(
                f"ranking filters by their activations needs weights of convolutions, got {name} of "
                f"{type(module).__name__}"
            )
        found[name] = module
    return found


class ActivationWatch:
    """Sums over the activations of convolutions, from forward passes in training mode with gradients.

    The activation of a convolution is the output of the first activation module that its output reaches with no other
    layer between (batch norm, pooling and additions do not count as layers), if it has F channels. It is found in
    autograd's graph of the model's first such forward pass. If there is none (functional activations, a frozen layer, a
    linear bottleneck), relu of the convolution's output is used. The result is kept until `stop` and saved in the
    state, because a layer that is frozen later has no graph.

    Args:
        weights: names of the convolutions' weights.
    """

    def __init__(self, weights: Sequence[str]) -> None:
        self._weights = tuple(weights)
        self.sums: dict[str, Sums] = {}
        self._handles: list[RemovableHandle] = []
        # A module may be called several times in a forward (torchvision's blocks share one ReLU): calls are counted.
        self._calls: Counter[nn.Module] = Counter()
        self._consumers: dict[tuple[nn.Module, int], list[str]] | None = None
        self._loaded: list[list[Any]] | None = None
        self._names: dict[nn.Module, str] = {}
        self._without: frozenset[str] = frozenset()
        self._open: dict[str, _Output] = {}
        self._found: dict[tuple[nn.Module, int], list[str]] = {}

    def start(self, model: nn.Module) -> None:
        """Start watching this model; searches for its activations again unless a state was just loaded.

        Raises:
            UserError: a weight does not belong to a convolution.
        """
        self.stop()
        owners = convolutions(model, self._weights)
        self._names = {module: plain_name(name) for name, module in model.named_modules()}
        if self._loaded is not None:
            modules = {name: module for module, name in self._names.items()}
            self._know({(modules[name], int(call)): list(weights) for name, call, weights in self._loaded})
            self._loaded = None
        self._handles = [
            model.register_forward_pre_hook(self._begun),
            *(module.register_forward_hook(self._convolved(name)) for name, module in owners.items()),
            *(m.register_forward_hook(self._activated) for m in model.modules() if isinstance(m, ACTIVATIONS)),
            # Registered last, because the model itself may be a convolution.
            model.register_forward_hook(self._ended),
        ]

    def stop(self) -> None:
        """Stop watching; the sums are kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._open, self._found = {}, {}
        self._consumers = None

    def _know(self, consumers: dict[tuple[nn.Module, int], list[str]]) -> None:
        """Set the weights whose activation each module call returns; all other weights use relu of their output."""
        self._consumers = consumers
        self._without = frozenset(self._weights).difference(*consumers.values())

    def _begun(self, model: nn.Module, inputs: object) -> None:
        self._calls.clear()
        self._open, self._found = {}, {}

    def _convolved(self, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            if not (module.training and torch.is_grad_enabled()):
                return
            if self._consumers is None:
                # An in-place activation would change the output before the forward ends, so sum it now.
                sums = sums_of(output.detach().relu())
                self._open[name] = _Output(output.grad_fn, output.shape[1], sums)
            elif name in self._without:
                self._add(name, sums_of(output.detach().relu()))

        return hook

    def _activated(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        call = (module, self._calls[module])
        self._calls[module] += 1
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._consumers is None:
            names = self._consumed(output)
            for name in names:
                del self._open[name]
            if names:
                self._found[call] = names
        else:
            names = self._consumers.get(call, [])
        if names:
            sums = sums_of(output.detach())
            for name in names:
                self._add(name, sums)

    def _ended(self, model: nn.Module, inputs: object, output: object) -> None:
        if self._consumers is not None or not (model.training and torch.is_grad_enabled()):
            return
        for name, left in self._open.items():
            self._add(name, left.sums)
        self._know(self._found)
        self._open, self._found = {}, {}

    def _consumed(self, activation: Tensor) -> list[str]:
        """Return the open convolutions that this activation is computed from, by a search back through the graph."""
        outputs = {
            output.node: name
            for name, output in self._open.items()
            if output.node is not None and activation.dim() > 1 and activation.shape[1] == output.filters
        }
        found: list[str] = []
        if not outputs or activation.grad_fn is None:
            return found
        stack, visited = [activation.grad_fn], {activation.grad_fn}
        while stack:
            for node, _ in stack.pop().next_functions:
                if node is None or node in visited:
                    continue
                visited.add(node)
                if node in outputs:
                    found.append(outputs[node])
                elif not node.name().startswith(_LAYERS):
                    stack.append(node)
        return found

    def _add(self, name: str, sums: Sums) -> None:
        before = self.sums.get(name)
        # After thinning, the earlier sums include removed filters and are discarded.
        self.sums[name] = sums if before is None or before.total.shape != sums.total.shape else before + sums

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the activations that were found, each as [module, number of its call, weights]."""
        sums = {name: [one.inactive.clone(), one.total.clone(), one.seen] for name, one in self.sums.items()}
        if self._consumers is None:
            return {"sums": sums, "found": None}
        found = [[self._names[module], call, list(names)] for (module, call), names in self._consumers.items()]
        return {"sums": sums, "found": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; call `start` afterwards."""
        self.sums = {name: Sums(inactive, total, int(seen)) for name, (inactive, total, seen) in state["sums"].items()}
        self._loaded = None if state["found"] is None else list(state["found"])
