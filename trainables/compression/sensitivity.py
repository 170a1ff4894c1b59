"""Sensitivity analysis: accuracy when a single weight is pruned, and sensitivities derived from it.

Shapes and symbols: w a weight of n elements, two dimensions or more; filters are w[i], channels w[:, i].
    level   share of elements (or filters, channels) that are pruned, in [0, 1]: the floor(level * number) with the
            smallest |w| (mean |w|), ties by index, as many as a schedule prunes (`pruned_count`)
    s       sensitivity: a threshold t = s * std(w), std unbiased, keeps |w| > t (Han et al. 2015)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import isfinite
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from trainables.compression.masks import parameters_as_built
from trainables.compression.model_copies import evaluating
from trainables.compression.pruners import deviation, kept_after, pruned_count, smallest_mask
from trainables.compression.schedule.names import patterns_of
from trainables.compression.structures import Structures
from trainables.errors import UserError, check_model_first
from trainables.quality import ACCURACY, Quality, allowed_amount, read_drop
from trainables.workloads.base import Workload

Kind = Literal["element", "filter", "channel"]

#: Default levels.
LEVELS = tuple(round(0.05 * step, 2) for step in range(20))
#: Kinds of whole structures by their name in a schedule.
_GROUPS = {"filter": "Filters", "channel": "Channels"}
#: Smallest number of dimensions of a weight.
_LEAST_DIMENSIONS = {"element": 2, "filter": 3, "channel": 3}


class Row(NamedTuple):
    """Result for one weight pruned to one level."""

    parameter: str
    sparsity: float  # the level
    top1: float  # accuracy, in [0, 1], or the workload's own metric


class Proposal(NamedTuple):
    """Proposed level and sensitivity of one weight."""

    parameter: str
    elements: int  # number of elements of the weight
    level: float  # the largest level up to which all levels are within the allowed accuracy loss
    top1: float  # accuracy at that level
    sensitivity: float  # s: the threshold s std(w) prunes the weight to that level; 0 for level 0


def prunable(model: nn.Module, kind: Kind = "element") -> dict[str, nn.Parameter]:
    """Return the parameters that can be pruned, by name as built: >= 2 dimensions, or >= 3 for filters and channels."""
    named = parameters_as_built(model)
    return {name: p for name, p in named.items() if p.dim() >= _LEAST_DIMENSIONS[kind] and p.numel()}


def sensitivity_analysis(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    *,
    layers: Sequence[str] | None = None,
    levels: Sequence[float] | None = None,
    kind: Kind = "element",
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Prune one parameter at a time and evaluate; the model is then restored, bit for bit.

    Args:
        model: trained.
        evaluate: evaluates the model; called once for the unpruned model and once per parameter and level above 0.
        layers: names or patterns of parameters; None: all that can be pruned.
        levels: in [0, 1]; None: 0 to 0.95 in steps of 0.05. Level 0, the reference for the accuracy loss, is always
            included.
        kind: what is pruned: elements, whole filters or whole channels.
        on_row: called with each row as soon as it is available.

    Rows are by parameter, in the model's order, and ascending level. UserError: a level is out of range, the kind is
    unknown, a name matches nothing, or no parameter can be pruned.
    """
    check_model_first(model, "sensitivity_analysis(model, evaluate)")
    if kind not in get_args(Kind):
        raise UserError(f"kind of a sensitivity analysis must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    for level in levels or ():
        if not 0 <= level <= 1:
            raise UserError(f"levels of a sensitivity analysis must be in [0, 1], got {level}")
    known = prunable(model, kind)
    if not known:
        raise UserError(f"the model has no parameter of at least {_LEAST_DIMENSIONS[kind]} dimensions to prune")
    chosen = known if layers is None else patterns_of(layers, list(known))
    ascending = sorted({0.0, *(LEVELS if levels is None else levels)})
    dense = evaluate(model)
    rows = []
    for name in [name for name in known if name in chosen]:
        parameter = known[name]
        saved = parameter.detach().clone()
        try:
            for level in ascending:
                if level > 0:
                    parameter.detach().mul_(_mask(saved, level, kind))
                rows.append(Row(name, level, evaluate(model) if level > 0 else dense))
                if on_row is not None:
                    on_row(rows[-1])
        finally:
            parameter.detach().copy_(saved)
    return rows


def _mask(weight: Tensor, level: float, kind: Kind) -> Tensor:
    """Return the mask that removes the smallest elements, filters or channels at this level, as the pruners do."""
    if kind == "element":
        return smallest_mask(weight, pruned_count(level, weight.numel()))
    structures = Structures(_GROUPS[kind])
    norms = structures.norms(weight, order=1)
    return structures.spread(kept_after(norms, pruned_count(level, len(norms))), weight)


def proposed_sensitivities(
    rows: Sequence[Row], weights: Mapping[str, Tensor], allowed_drop: float | str, quality: Quality = ACCURACY
) -> list[Proposal]:
    """Propose for each parameter the largest level within the allowed drop of top1 against level 0, and its s.

    ``rows`` include level 0; ``weights`` have the values that were analysed; ``quality`` is the metric that top1 holds.
    """
    allowed_drop = read_drop(allowed_drop, quality)
    found = []
    for name, group in groupby(rows, key=lambda row: row.parameter):
        own = list(group)
        allowed = allowed_amount(allowed_drop, own[0].top1) + 1e-9  # for rounding
        best = own[0]
        for row in own:
            if not quality.lost(row.top1, own[0].top1) <= allowed:  # also true for NaN
                break
            best = row
        sensitivity = sensitivity_at(weights[name], best.sparsity)
        found.append(Proposal(name, weights[name].numel(), best.sparsity, best.top1, sensitivity))
    return found


def sensitivity_at(weight: Tensor, level: float) -> float:
    """Return s such that a threshold s std(w) prunes floor(level n) elements.

    The threshold is halfway to the next element, which makes it robust to rounding; with equal elements more can be
    pruned. Returns 0 for a level that prunes nothing, and if std(w) is 0.
    """
    pruned = pruned_count(level, weight.numel())
    if pruned == 0:
        return 0.0
    sizes = weight.detach().double().abs().flatten().sort().values
    threshold = sizes[pruned - 1 : pruned + 1].mean() if pruned < len(sizes) else 1.01 * sizes[-1]
    found = float(threshold / deviation(weight))
    return found if isfinite(found) else 0.0


def to_csv(rows: Sequence[Row]) -> str:
    """Return CSV with the columns parameter, sparsity, top1."""
    lines = [f"{row.parameter},{row.sparsity:.6g},{row.top1:.6g}\n" for row in rows]
    return "".join([f"{','.join(Row._fields)}\n", *lines])


def pruners_section(proposals: Sequence[Proposal], kind: Kind) -> dict[str, Any]:
    """Return a schedule's ``pruners`` with the proposals.

    One `SensitivityPruner`, or for filters and channels one `L1RankedStructureParameterPruner` per level. Parameters
    with level 0 are left out; empty if there are no others.
    """
    chosen = [proposal for proposal in proposals if proposal.level > 0]
    if kind == "element":
        sensitivities = {p.parameter: round(p.sensitivity, 6) for p in chosen}
        return {"proposed": {"class": "SensitivityPruner", "sensitivities": sensitivities}} if chosen else {}
    return {
        f"proposed_{100 * level:g}".replace(".", "_"): {
            "class": "L1RankedStructureParameterPruner",
            "group_type": _GROUPS[kind],
            "desired_sparsity": level,
            "weights": [p.parameter for p in chosen if p.level == level],
        }
        for level in sorted({p.level for p in chosen})
    }


def evaluate_workload(workload: Workload, model: nn.Module, split: str, device: Any) -> float:
    """Return the workload's metric of a model on a split; the model's modes and all generators are restored."""
    name = workload.quality.name
    with evaluating(model):
        return float(workload.metrics_on(model, split, device, name)[name])
