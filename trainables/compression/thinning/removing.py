"""Removal of a model's zero filters and channels, with a check that the outputs stay the same.

A zero filter before a batch norm still outputs a constant, the norm's beta - gamma mean / std, and a filter with a bias
outputs its bias. Removing the filter treats gamma, beta and bias as zero. Where they are not zero, the model's outputs
change by `Thinned.difference`; thinning is exact if they are pruned together with the filter.

All cuts are first tried on a copy, in double precision.
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
from trainables.workloads.batch_structure import tensors_in

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
