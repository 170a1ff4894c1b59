"""Remove from a model the filters and channels that are zero, and check that it computes what it did.

A filter that is zero before a batch norm still gives out a constant, the norm's beta - gamma mean / std, and one with a
bias its bias. Before such a filter goes, gamma, beta and bias are taken for zero. Where they were not, the model's
outputs change, by `Thinned.difference`; prune them with the filter and thinning is exact.

All is tried on a copy first, in double precision.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from trainables.compression.model_copies import as_built, bare_copy, evaluating
from trainables.compression.thinning.coupled import Cuts, Found, Kind, Left, coupled_groups
from trainables.compression.thinning.cutting import NORMS, Record, Removed, thin_again, width
from trainables.errors import UserError

__all__ = ["Kind", "Left", "Thinned", "thin"]

#: Samples of the example that are computed.
_SAMPLES = 8
#: Largest difference of outputs that is rounding, as a share of the largest output: a sum in another order.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """What a thinning did."""

    record: Record
    """What was cut, for `thin_again`: [[module, side, [indices]], ...] in plain types; side 0 output channels, 1 input
    channels. Empty where nothing was."""
    removed: Removed
    """The same by parameter: name -> dimension -> indices, as `crop` takes it."""
    exact: bool
    """Whether the outputs on the example are what they were, in eval mode."""
    difference: float
    """The largest absolute change of an output on the example."""
    left: tuple[Left, ...]
    """Zero channels that stay."""


def thin(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any],
    optimizer: Optimizer | None = None,
    *,
    kind: Kind = "structures",
    round_to: int = 1,
) -> Thinned:
    """Remove zero filters or channels and all that depends on them; no layer loses its last one.

    The model is changed in place. Parameters that are cut become new objects: the optimizer gets them in the places of
    the old ones with its state cut alike; masks and whatever else is of their shapes are the caller's (`crop`). A model
    with quantized weights is thinned by its float weights. Parameters that several modules share, and modules that are
    called more than once, are not cut.

    Args:
        model: whose weights are zero where they were pruned.
        example_inputs: what it is called with: a tensor, or the positional arguments. The first samples are looked at.
        optimizer: of the model.
        kind: ``filters`` removes filters that are zero, with what reads them; ``channels`` removes input channels that
            are zero, with the filters that produced them; ``structures`` both.
        round_to: widths stay multiples of this, >= 1.

    Raises:
        UserError: torch_pruning is not installed or cannot follow the model, or an argument out of range.
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
    """The model's copy, thinned until nothing more can go."""

    def __init__(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.model = bare_copy(model).requires_grad_(True).double()
        self.arguments = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
        self.dtype = torch.float64
        with evaluating(self.model):
            try:
                self.reference = self._outputs(self.model)
            except RuntimeError:  # its forward makes tensors of one dtype
                self.model, self.arguments = bare_copy(model).requires_grad_(True), arguments
                self.dtype = torch.float32
                self.model.eval()
                self.reference = self._outputs(self.model)
            self.excluded = self._excluded(_shared(model))
        largest = max((float(t.abs().max()) for t in self.reference if t.numel()), default=0.0)
        self.tolerance = _ROUNDING[self.dtype] * max(largest, 1e-30)
        """Of differences between outputs that are taken for rounding."""

    def _outputs(self, model: nn.Module) -> list[Tensor]:
        return [t for t in _tensors(model(*self.arguments)) if t.is_floating_point()]

    def _excluded(self, shared: set[str]) -> dict[str, str]:
        """Modules that cannot be cut, by name, and why."""
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
        """The largest absolute change of an output."""
        return _largest_difference(self.reference, self._outputs(self.model))

    def thin(self, kind: Kind, round_to: int) -> tuple[Cuts, list[Left]]:
        """Cut and look again: a filter may only have read what is gone. Indices of the result are those at first."""
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
        """What can go now, what stays, and the model without the former; None where nothing goes."""
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
        """The model without them, if it computes what it does with their norms and biases zeroed; else None."""
        if not cuts:
            return None
        tried = copy.deepcopy(self.model)
        _zero(tried, cuts)
        before = self._outputs(tried)
        try:
            thin_again(tried, [[name, side, sorted(indices)] for (name, side), indices in cuts.items()])
            after = self._outputs(tried)
        except (RuntimeError, ValueError, IndexError, TypeError):  # a forward with widths of its own
            return None
        same = [t.shape for t in before] == [t.shape for t in after]
        return tried if same and _largest_difference(before, after) <= self.tolerance else None


def _first_samples(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for fewer samples, where it is plain what the samples are: all tensors have as many rows."""
    rows = {len(a) if a.dim() else 0 for a in arguments if isinstance(a, Tensor)}
    if len(rows) != 1 or rows == {0}:
        return arguments
    return tuple(a[:_SAMPLES] if isinstance(a, Tensor) else a for a in arguments)


def _merged(found: Sequence[Found]) -> Cuts:
    """A layer that reads several roots' channels loses those of each."""
    cuts: Cuts = {}
    for one in found:
        for key, indices in one.cuts.items():
            cuts.setdefault(key, set()).update(indices)
    return cuts


def _zero(model: nn.Module, cuts: Mapping[tuple[str, int], set[int]]) -> None:
    """Zero the biases and norms of channels that are to go."""
    for (name, side), indices in cuts.items():
        module = model.get_submodule(name)
        if side == 0 and isinstance(module, (_ConvNd, nn.Linear, *NORMS)):
            own = [module.bias] if not isinstance(module, NORMS) else [module.weight, module.bias]
            for parameter in own:
                if parameter is not None:
                    parameter.data[sorted(indices)] = 0


def _shared(model: nn.Module) -> set[str]:
    """Names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(as_built(name))
    return {name for several in names.values() if len(several) > 1 for name in several}


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in what a model returns: a tensor, or lists, tuples and dictionaries of such."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a.numel()), default=0.0)
