"""Pruners, which decide which elements of a model's weights are zero.

Shapes and symbols: w a weight; its mask has its shape and dtype, 0 removes an element, 1 keeps it (a Bernoulli mask may
have values above 1). t a threshold: a mask keeps |w| > t; s a sensitivity, or the share to prune, in [0, 1]. G
structures of a weight, n elements each; a map is G numbers, 0 removes a structure. Exact counts; of equal values the
first goes first, on every device alike.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from trainables.compression.masks import hook_gradient, parameters_as_built
from trainables.compression.schedule.configs import ComponentConfig
from trainables.compression.schedule.names import assigned, patterns_of, plain_name
from trainables.compression.schedule.timing import Moment, gradual_share
from trainables.compression.structures import check_group, group_mask, ranked_structures
from trainables.errors import UserError
from trainables.workloads.user_code import class_named


class Pruner:
    """Decide which elements of some weights are zero.

    ``settings`` are one of `trainables.compression.schedule.configs.PRUNERS`; the generator, on the CPU, is for all
    random numbers. UserError: a name matches no parameter, or a weight does not have the requested structures.
    """

    argument: ClassVar[str] = "weights"  # the argument that names parameters, in a list or with a value each
    epochs_before: ClassVar[int] = 0
    """Number of epochs before the first active one at which the pruner starts to observe training (`start`)."""

    def __init__(self, settings: Any, model: nn.Module, generator: torch.Generator) -> None:
        names = tuple(parameters_as_built(model))
        given = getattr(settings, self.argument, None)
        if given is None:
            raise UserError(f"{settings.class_} needs {self.argument}, the parameters that it prunes")
        self.settings = settings
        # Value of the argument by parameter name, None if it has no values.
        self.values: dict[str, Any] = (
            assigned(given, names) if isinstance(given, Mapping) else dict.fromkeys(patterns_of(given, names))
        )
        self._first_use: dict[str, list[float]] = {}  # statistics of weights when they were first pruned, by name
        self.targets = tuple(self.values)  # parameter names, at least one

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        """Return new masks by name, for the targets whose mask changes, at a moment of an active epoch.

        ``weights`` are those of all targets, detached, ``current`` the masks of targets that have one.
        """
        return {name: self.mask(name, weights[name], current.get(name), moment) for name in self.targets}

    def mask(self, name: str, weight: Tensor, current: Tensor | None, moment: Moment) -> Tensor:
        """Return the new mask of one weight, of a pruner that decides on each alone."""
        raise NotImplementedError

    def start(self, model: nn.Module) -> None:
        """Start observing training with hooks; called at the start of an epoch, and again after loading a state."""

    def stop(self) -> None:
        """Stop observing training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types and tensors."""
        return {"first_use": dict(self._first_use)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._first_use = dict(state["first_use"])


def threshold_mask(weight: Tensor, threshold: float) -> Tensor:
    """Return ones where |w| > t, else zeros, of the weight's shape, type and device; a NaN counts as large."""
    return (~(weight.detach().abs() <= threshold)).to(weight.dtype)


def deviation(weight: Tensor) -> float:
    """Return the unbiased standard deviation; 0 for a single element. Synchronizes with the device."""
    return float(weight.detach().double().std()) if weight.numel() > 1 else 0.0


class MagnitudePruner(Pruner):
    """Prune with a given t."""

    argument = "thresholds"

    def mask(self, name: str, weight: Tensor, current: Tensor | None, moment: Moment) -> Tensor:
        return threshold_mask(weight, self.values[name])


class SensitivityPruner(Pruner):
    """Prune with t = s std(w), std from the first use (Han et al. 2015, section 3.1, as in their implementation).

    Later uses prune more only because weights have moved below the same t.
    """

    argument = "sensitivities"

    def mask(self, name: str, weight: Tensor, current: Tensor | None, moment: Moment) -> Tensor:
        if name not in self._first_use:
            self._first_use[name] = [deviation(weight)]
        return threshold_mask(weight, self.values[name] * self._first_use[name][0])


class StructureThresholdPruner(Pruner):
    """Zero structures whose greatest or mean absolute value is at most a threshold.

    Rows and columns refer to torch's weight, as in the group regularizers.
    """

    argument = "reg_regims"

    def mask(self, name: str, weight: Tensor, current: Tensor | None, moment: Moment) -> Tensor:
        threshold, group = self.values[name]
        check_group(group, name, weight.shape)
        return group_mask(weight, group, threshold, self.settings.threshold_criteria)


class RecurrentPruner(Pruner):
    """Prune with a t that rises along two straight lines (Narang et al. 2017, section 3).

    In an active epoch e, t = theta (e - S + 1) / f before epoch R, theta (R - S + 1) / f + phi (e - R + 1) / f from R
    on, with theta = 2 q f / (2 (R - S) + 3 (E - R)) (their eq. 1) and phi = ramp_slope_mult theta; q > 0 is the 90th
    percentile of |w| of a trained dense network; S, E and f are the policy's starting epoch, ending epoch and
    frequency. UserError: R is so far outside of the policy's epochs that theta is not a positive number. In a strict
    schedule R is inside; a published one starts its policy after R, so that the second line applies from the start.
    """

    def mask(self, name: str, weight: Tensor, current: Tensor | None, moment: Moment) -> Tensor:
        s, epoch, timing = self.settings, moment.epoch, moment.timing
        start, end, frequency = timing.starting_epoch, timing.ending_epoch, timing.frequency
        ramp = s.ramp_from(start)
        span = 2 * (ramp - start) + 3 * (end - ramp)
        if span <= 0:
            raise UserError(
                f"ramp_epoch must be between the policy's starting_epoch {start} and ending_epoch {end}, got {ramp}"
            )
        theta = 2 * s.q * frequency / span
        if epoch < ramp:
            return threshold_mask(weight, theta * (epoch - start + 1) / frequency)
        risen = theta * (ramp - start + 1) + s.ramp_slope_mult * theta * (epoch - ramp + 1)
        return threshold_mask(weight, risen / frequency)


class SplicingPruner(Pruner):
    """Prune and restore connections: dynamic network surgery (Guo et al. 2016, eq. 3).

    m is 0 where |w| < a and 1 where |w| >= b; between them it does not change. a and b are (mean|w| + s std|w|), taken
    at the first use, each times a factor. Needs the unmasked weights; otherwise nothing is restored.
    """

    argument = "sensitivities"

    def mask(self, name: str, weight: Tensor, current: Tensor | None, moment: Moment) -> Tensor:
        s, sizes = self.settings, weight.detach().abs()
        grown = 1 + (moment.epoch - moment.timing.starting_epoch) * s.sensitivity_multiplier
        if name not in self._first_use:
            self._first_use[name] = [float(sizes.double().mean()), deviation(sizes)]
        mean, std = self._first_use[name]
        middle = mean + self.values[name] * grown * std
        before = torch.ones_like(sizes) if current is None else current
        cut = torch.where(sizes < s.low_thresh_mult * middle, 0.0, before)
        # Negated "<" instead of ">=", so that a NaN counts as large.
        return torch.where(~(sizes < s.hi_thresh_mult * middle), 1.0, cut).to(sizes.dtype)


def pruned_count(share: float, n: int, group_size: int = 1) -> int:
    """Return k = floor(s n), rounded down to a multiple of the group size; less than n unless s is 1.

    >>> [pruned_count(0.65, 663552), pruned_count(0.7, 16, group_size=8), pruned_count(1.0, 16)]
    [431308, 8, 16]
    """
    # Rounding cannot give n for a share below 1: s n is then at most the floating-point number before n.
    return int(share * n) // group_size * group_size


def kept_after(values: Tensor, count: int) -> Tensor:
    """Return which of n values, (n,), are kept when the k smallest are removed: booleans, exactly n - k of them true.

    Among equal values the first is removed first; a NaN counts as the largest. Any real type, any device.
    """
    order = torch.where(values.isnan(), torch.inf, values).argsort(stable=True)
    kept = torch.ones_like(values, dtype=torch.bool)
    kept[order[:count]] = False
    return kept


def smallest_mask(weight: Tensor, count: int) -> Tensor:
    """Return the mask, of any weight's shape, type and device, that removes the k elements of least absolute value."""
    return kept_after(weight.detach().abs().flatten(), count).to(weight.dtype).reshape(weight.shape)


class LevelPruner(Pruner):
    """Zero exactly int(s n) of a weight's n elements, those with the smallest absolute values."""

    argument = "levels"

    def mask(self, name: str, weight: Tensor, current: Tensor | None, moment: Moment) -> Tensor:
        return smallest_mask(weight, pruned_count(self.values[name], weight.numel()))


class GradualPruner(Pruner):
    """Zero the same with a share that grows by a cubic over the policy's active epochs (Zhu & Gupta 2017)."""

    def mask(self, name: str, weight: Tensor, current: Tensor | None, moment: Moment) -> Tensor:
        s, progress = self.settings, moment.timing.progress(moment.epoch)
        share = gradual_share(s.initial_sparsity, s.final_sparsity, progress)
        return smallest_mask(weight, pruned_count(share, weight.numel()))


class StructuresPruner(Pruner):
    """Base of all pruners of structures: one map per weight, or the leader's map for all.

    Its state is that of its random numbers.
    """

    def __init__(self, settings: Any, model: nn.Module, generator: torch.Generator) -> None:
        super().__init__(settings, model, generator)
        self.structures = ranked_structures(settings)
        self.has_leader = settings.group_dependency == "Leader"
        self.ranked = self.targets[:1] if self.has_leader else self.targets  # names of the weights that are ranked
        self.generator = generator
        self._check(parameters_as_built(model))

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        leader = self.targets[0]
        for name in self.targets:
            self.structures.check(name, weights[name].shape)
            wanted, count = (self.structures.count(weights[one].shape) for one in (leader, name))
            if self.has_leader and count != wanted:
                raise UserError(
                    f"group_dependency Leader needs weights with equally many {self.structures.group}, got {wanted} in "
                    f"{leader} {tuple(weights[leader].shape)} and {count} in {name} {tuple(weights[name].shape)}"
                )

    def _share(self, moment: Moment) -> float:
        """Return s: constant, a cubic over the policy's active epochs, or drawn at each call."""
        s = self.settings
        if hasattr(s, "sparsity_range"):
            least, greatest = s.sparsity_range
            drawn = float(torch.rand((), generator=self.generator, dtype=torch.float64))
            return float(least + (greatest - least) * drawn)
        if hasattr(s, "desired_sparsity"):
            return float(s.desired_sparsity)
        return gradual_share(s.initial_sparsity, s.final_sparsity, moment.timing.progress(moment.epoch))

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        self._check(weights)  # thinning changes shapes after the pruner was built
        maps = {name: self.map(name, weights[name].detach(), self._share(moment)) for name in self.ranked}
        if self.has_leader:
            maps = dict.fromkeys(self.targets, maps[self.targets[0]])
        return {name: self.structures.spread(found, weights[name]) for name, found in maps.items() if found is not None}

    @abstractmethod
    def map(self, name: str, weight: Tensor, share: float) -> Tensor | None:
        """Return the map of one weight, shape (G,); None if it cannot be computed yet."""

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class NormRankedPruner(StructuresPruner):
    """Remove exactly k structures with the smallest norm: sum |w| (Li et al. 2017, section 3.1).

    All structures of a weight have n elements, so ranking by means would give the same order.
    """

    order = 1

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        norms = self.structures.norms(weight, self.order)
        if noise := getattr(self.settings, "noise", 0.0):
            # Drawn on the CPU, so that the ranking is the same on every device.
            factors = torch.randn(len(norms), generator=self.generator, dtype=torch.float64)
            norms = norms * (1 + noise * factors).to(norms)
        return kept_after(norms, pruned_count(share, len(norms), getattr(self.settings, "group_size", 1)))


class L2RankedPruner(NormRankedPruner):
    """Remove exactly k structures with the smallest sqrt(sum w^2)."""

    order = 2


class RandomPruner(StructuresPruner):
    """Remove exactly floor(s G) filters, drawn again at each use."""

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        count = self.structures.count(weight.shape)
        kept = torch.ones(count, dtype=torch.bool)
        kept[torch.randperm(count, generator=self.generator)[: pruned_count(share, count)]] = False
        return kept


class BernoulliPruner(StructuresPruner):
    """Remove each filter with probability s; the kept filters are multiplied by G over their number.

    If all would be removed, the one with the largest L2 norm is kept.
    """

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        count = self.structures.count(weight.shape)
        kept = (torch.rand(count, generator=self.generator, dtype=torch.float64) >= share).double()
        if not kept.any():
            kept[self.structures.norms(weight).argmax().cpu()] = 1
        return kept * (count / kept.sum())


# --- Filters ranked by activations or gradients that are collected during training ------------------------------------
# Shapes and symbols: F filters of a weight w, shape (F, ...); g the loss's gradient with respect to w; s the share to
# prune. Each decision uses the data collected since the last decision and then discards it.


class _SeenPruner(StructuresPruner):
    """Remove exactly floor(s F) filters with the lowest scores.

    A weight without collected data keeps its current mask, so the first decision is delayed.
    """

    epochs_before = 1

    def __init__(self, settings: Any, model: nn.Module, generator: torch.Generator) -> None:
        super().__init__(settings, model, generator)
        self.sums: dict[str, Tensor] = {}  # the collected data by weight, shape (..., F)
        self._handles: list[RemovableHandle] = []

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def map(self, name: str, weight: Tensor, share: float) -> Tensor | None:
        sums, count = self.sums.pop(name, None), self.structures.count(weight.shape)
        # After thinning, the sums include removed filters.
        if sums is None or sums.shape[-1] != count:
            return None
        return kept_after(self.score(sums), pruned_count(share, count))

    @abstractmethod
    def score(self, sums: Tensor) -> Tensor:
        """Return the filters' scores, shape (F,), by the collected data of a weight."""

    def _add(self, name: str, new: Tensor) -> None:
        """Add to a weight's data; data from before a thinning include removed filters and are discarded."""
        before = self.sums.get(name)
        self.sums[name] = new if before is None or before.shape != new.shape else before.to(new.device) + new

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {name: sums.clone() for name, sums in self.sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums = dict(state["sums"])


class GradientPruner(_SeenPruner):
    """Remove filters with the smallest |sum g w|, summed over their elements and all backward passes.

    This is the first-order estimate of the loss change when the filter is removed (Molchanov et al. 2017, eq. 8),
    applied to weights instead of activations. Terms that are not finite (a step that mixed precision skips) count as 0.
    """

    def start(self, model: nn.Module) -> None:
        self.stop()
        parameters = parameters_as_built(model)
        self._handles = [
            hook_gradient(parameters[name], partial(self._see, name, parameters[name])) for name in self.ranked
        ]

    def score(self, sums: Tensor) -> Tensor:
        return sums.abs()

    def _see(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        terms = (gradient.detach().double() * weight.detach()).flatten(1).sum(dim=1)
        self._add(name, terms.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


# --- Filters ranked by the activations of their convolutions ----------------------------------------------------------
# Shapes: a convolution's output (N, F, ...); sums are kept per filter, shape (3, F). Nothing here synchronizes with the
# device.

#: Modules whose output is an activation.
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Hardswish, nn.Hardtanh, nn.Softplus, nn.Threshold,
)  # fmt: skip

#: Node names at which the search back through autograd's graph stops: earlier values belong to another layer.
_LAYERS = ("Convolution", "Addmm", "Mm", "Bmm", "Baddbmm", "Linear")

#: The weights whose activation a call of a module (name, number of the call in a forward) returns.
_Found = dict[tuple[str, int], list[str]]


def sums_of(activation: Tensor) -> Tensor:
    """Return how many values of each filter are <= 0, their sum, and how many there are: (3, F)."""
    rest = [d for d in range(activation.dim()) if d != 1]
    sums = [part.sum(dim=rest, dtype=torch.float64) for part in (activation <= 0, activation)]
    return torch.stack([*sums, torch.full_like(sums[0], activation.numel() // activation.shape[1])])


def convolutions(model: nn.Module, weights: Sequence[str]) -> dict[str, nn.Module]:
    """Return the convolution that each weight belongs to; UserError if one does not belong to any."""
    modules = {plain_name(name): module for name, module in model.named_modules()}
    found = {name: modules[name.rpartition(".")[0]] for name in weights}
    for name, module in found.items():
        if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or not name.endswith("weight"):
            raise UserError(
                f"ranking filters by their activations needs weights of convolutions, got {name} of "
                f"{type(module).__name__}"
            )
    return found


class ApozPruner(_SeenPruner):
    """Remove filters whose activations are most often inactive, APoZ (Hu et al. 2016, eq. 1).

    Activations <= 0 count as inactive, so that functions that never return exactly 0 are ranked too. Activations are
    those of forward passes in training mode with gradients.

    The activation of a convolution is the output of the first activation module that its output reaches with no other
    layer between (batch norm, pooling and additions do not count as layers), if it has F channels. It is found in
    autograd's graph of the model's first such forward pass. If there is none (functional activations, a frozen layer, a
    linear bottleneck), relu of the convolution's output is used. The result is kept until `stop` and saved in the
    state, because a layer that is frozen later has no graph.
    """

    def __init__(self, settings: Any, model: nn.Module, generator: torch.Generator) -> None:
        super().__init__(settings, model, generator)
        convolutions(model, self.ranked)
        # A module may be called several times in a forward (torchvision's blocks share one ReLU): calls are counted.
        self._calls: Counter[str] = Counter()
        self._found: _Found | None = None
        self._loaded: _Found | None = None
        # During the search: what was found, and node and sums of outputs whose activation was not.
        self._finding: _Found = {}
        self._open: dict[str, tuple[Node | None, Tensor]] = {}

    def score(self, sums: Tensor) -> Tensor:
        inactive, _, seen = sums
        return -inactive / seen

    def start(self, model: nn.Module) -> None:
        """Start watching this model; searches for its activations again unless a state was just loaded."""
        self.stop()
        owners = convolutions(model, self.ranked)
        self._found, self._loaded = self._loaded, None
        self._handles = [
            model.register_forward_pre_hook(self._begun),
            *(module.register_forward_hook(partial(self._convolved, name)) for name, module in owners.items()),
            *(
                module.register_forward_hook(partial(self._activated, plain_name(name)))
                for name, module in model.named_modules()
                if isinstance(module, ACTIVATIONS)
            ),
            # Registered last, because the model itself may be a convolution.
            model.register_forward_hook(self._ended),
        ]

    def stop(self) -> None:
        super().stop()
        self._found, self._open = None, {}

    def _begun(self, model: nn.Module, inputs: object) -> None:
        self._calls.clear()
        self._open, self._finding = {}, {}

    def _convolved(self, name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._found is None:
            # An in-place activation would change the output before the forward ends, so sum it now.
            self._open[name] = (output.grad_fn, sums_of(output.detach().relu()))
        elif not any(name in names for names in self._found.values()):
            self._add(name, sums_of(output.detach().relu()))

    def _activated(self, name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        call = (name, self._calls[name])
        self._calls[name] += 1
        if not (module.training and torch.is_grad_enabled()):
            return
        if self._found is None:
            self._finding[call] = self._consumed(output)
        names = self._finding[call] if self._found is None else self._found.get(call, [])
        if names:
            sums = sums_of(output.detach())
            for weight in names:
                self._open.pop(weight, None)
                self._add(weight, sums)

    def _ended(self, model: nn.Module, inputs: object, output: object) -> None:
        if self._found is None and model.training and torch.is_grad_enabled():
            for name, (_, sums) in self._open.items():
                self._add(name, sums)
            self._found = {call: names for call, names in self._finding.items() if names}
            self._open = {}  # it holds the graph, without which the model can be copied

    def _consumed(self, activation: Tensor) -> list[str]:
        """Return the open convolutions that this activation is computed from, by a search back through the graph."""
        outputs = {
            node: name
            for name, (node, sums) in self._open.items()
            if node is not None and activation.dim() > 1 and activation.shape[1] == sums.shape[1]
        }
        if not outputs or activation.grad_fn is None:
            return []
        found: list[str] = []
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

    def state_dict(self) -> dict[str, Any]:
        # Each activation that was found is [module, number of its call, weights].
        found = None if self._found is None else [[*call, list(names)] for call, names in self._found.items()]
        return {"seen": {**super().state_dict(), "found": found}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state["seen"])
        found = state["seen"]["found"]
        self._loaded = None if found is None else {(module, int(call)): list(names) for module, call, names in found}


class ActivationMeanPruner(ApozPruner):
    """Remove filters with the smallest mean activation (Molchanov et al. 2017, section 2.2)."""

    def score(self, sums: Tensor) -> Tensor:
        _, total, seen = sums
        return total / seen


#: By the class's name in a schedule; ``_AGP`` after it means a share that grows, as the settings say.
CLASSES: dict[str, type[Pruner]] = {
    "SensitivityPruner": SensitivityPruner,
    "MagnitudeParameterPruner": MagnitudePruner,
    "SparsityLevelParameterPruner": LevelPruner,
    "AutomatedGradualPruner": GradualPruner,
    "SplicingPruner": SplicingPruner,
    "BaiduRNNPruner": RecurrentPruner,
    "StructureParameterPruner": StructureThresholdPruner,
    "RandomLevelStructureParameterPruner": NormRankedPruner,
    "L1RankedStructureParameterPruner": NormRankedPruner,
    "L2RankedStructureParameterPruner": L2RankedPruner,
    "ActivationAPoZRankedFilterPruner": ApozPruner,
    "ActivationMeanRankedFilterPruner": ActivationMeanPruner,
    "GradientRankedFilterPruner": GradientPruner,
    "RandomRankedFilterPruner": RandomPruner,
    "BernoulliFilterPruner": BernoulliPruner,
}


def build_pruner(name: str, settings: ComponentConfig, model: nn.Module, *, seed: int) -> Pruner:
    """Build the pruner that settings describe, for a model, else UserError.

    ``name`` is that of the instance in the schedule; each has its own random numbers, the same in each process.
    """
    kind = class_named(settings.class_.removesuffix("_AGP"), CLASSES, "pruner class", Pruner)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return kind(settings, model, torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))
