"""Layers: how an optimizer's parameters are numbered, which of them are watched, and which stop together.

There are two numberings. A *number* is a parameter's index in the model's order, as published; users, settings and
events use it. A *position* is its place in the order in which parameters stop: equal to the number, unless whole units
stop in execution order. Rules and the machine use positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.nn.utils.weight_norm import WeightNorm

from trainables.errors import UserError, unknown_name
from trainables.gradskip.replay import LayerPlan, Unit


def has_running_statistics(module: nn.Module) -> bool:
    """Return whether a module is a norm with running statistics."""
    return getattr(module, "running_mean", None) is not None


def has_trained_statistics(module: Any) -> bool:
    """Return whether a module is a norm whose running statistics are not those that it began with."""
    return has_running_statistics(module) and bool(module.running_mean.any())


# --- List the parameters that belong to a module itself, those of its parametrized weights included -------------------
# A weight under `torch.nn.utils.parametrize` is kept in separate modules below the layer's (``weight_norm``:
# ``parametrizations.weight.original0`` and ``original1``). They are parts of the layer's weight, not layers.


def own_children(module: nn.Module) -> Iterator[nn.Module]:
    """Return the module's children without the containers of its parametrized weights."""
    parts = module.parametrizations if parametrize.is_parametrized(module) else None
    return (child for child in module.children() if child is not parts)


def own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the module's own parameters, the parts of its parametrized weights last."""
    yield from (p for p in module._parameters.values() if p is not None)
    if parametrize.is_parametrized(module):
        weights: Any = module.parametrizations
        yield from weights.parameters()


def weight_parts(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Yield each layer that has a weight in parts, or several matrices as a recurrent one, with these parameters."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            weights: Any = module.parametrizations
            for parts in weights.values():
                yield module, tuple(parts.parameters())
        elif isinstance(module, nn.RNNCellBase):
            yield module, tuple(own_parameters(module))
        elif isinstance(module, nn.RNNBase):  # both directions end in one operation or behind each other
            names, directions = module._all_weights, 1 + module.bidirectional
            for first in range(0, len(names), directions):
                own = [module._parameters.get(name) for of in names[first : first + directions] for name in of]
                yield module, tuple(p for p in own if p is not None)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):  # torch's older form
                parameters = [module._parameters.get(f"{hook.name}_{part}") for part in "gv"]
                yield module, tuple(p for p in parameters if p is not None)


def adapted_layers(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each layer that PEFT has put adapters on, with the layer inside that has the weight."""
    for module in model.modules():
        if isinstance(base := getattr(module, "base_layer", None), nn.Module):
            yield module, base


# --- Layers -----------------------------------------------------------------------------------------------------------

#: Kinds of layers, the default of ``CAC_WATCH`` first.
KINDS = ("conv", "linear")


def wrappers(model: nn.Module) -> list[nn.Module]:
    """Return the given module, every data-parallel or compiled wrapper inside it, and last the model itself."""
    levels = [model]
    while True:
        inner = getattr(levels[-1], "_orig_mod", None)
        if inner is None and type(levels[-1]).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = levels[-1].module
        if not isinstance(inner, nn.Module):
            return levels
        levels.append(inner)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside data-parallel and compiled wrappers."""
    return wrappers(model)[-1]


def numbered(groups: Sequence[dict[str, Any]], model: nn.Module | None) -> tuple[list[Tensor], list[str] | None]:
    """Return the parameters in the model's order, others last, or in that of the groups; and their names."""
    given = {id(p): p for group in groups for p in group["params"]}
    parameters = list(given.values())
    if model is not None:
        order = [(name, p) for name, p in unwrap(model).named_parameters() if id(p) in given]
        if not order:
            raise UserError("model= must be the model whose parameters the optimizer has, got one that shares none")
        known = {id(p) for _, p in order}
        rest = [p for p in parameters if id(p) not in known]
        extra = [f"outside the model, {number}" for number in range(len(rest))]
        return [p for _, p in order] + rest, [name for name, _ in order] + extra
    if all("param_names" in group for group in groups):
        names = {id(p): n for group in groups for p, n in zip(group["params"], group["param_names"], strict=True)}
        return parameters, [names[id(p)] for p in parameters]
    return parameters, None


def make_plan(
    parameters: Sequence[Tensor],
    watch: Sequence[str],
    *,
    model: nn.Module | None = None,
    whole_units: bool = False,
    order: Sequence[int] | None = None,
) -> LayerPlan:
    """Return the plan for numbered parameters.

    Args:
        parameters: in numbering order.
        watch: ``conv`` (4-D weights, as published), ``linear`` (2-D weights; embeddings are left out where the model is
            known), or class names of modules, each a layer as a whole. A parametrized weight is one layer, and so are
            a weight's adapters.
        model: owner of the parameters; needed for class names and whole units.
        whole_units: stop a layer with everything up to the next watched layer, in execution order; the last one with
            its bias and norm.
        order: the numbers in the order in which whole units stop; None for the numbering's own order.
    """
    layers = _watched_layers(parameters, watch, model)
    if not whole_units:
        units = [Unit(number=min(weights), watched=weights, end=max(members)) for weights, members in layers]
        units.sort(key=lambda unit: unit.end)
        numbers = tuple(range(len(parameters)))
        last_end = _end_of_last_unit(parameters, numbers, units[-1].end) if units and model is not None else -1
        return LayerPlan(order=numbers, units=tuple(units), last_end=last_end)
    if model is None:
        raise UserError("CAC_WHOLE_UNITS=1 needs the model, to know what belongs together: give model=")
    order = tuple(range(len(parameters)) if order is None else order)
    position = {number: place for place, number in enumerate(order)}
    beside = _beside(parameters, [members for _, members in layers], model)
    starts = sorted(
        (min(position[m] for m in (*members, *own)), weights, members)
        for (weights, members), own in zip(layers, beside, strict=True)
    )
    ends = [start - 1 for start, _, _ in starts[1:]]
    if starts:
        ends.append(_end_of_last_unit(parameters, order, max(position[m] for m in starts[-1][2])))
    units = [Unit(number=min(w), watched=w, end=end) for (_, w, _), end in zip(starts, ends, strict=True)]
    return LayerPlan(order=order, units=tuple(units), whole_units=True, ends=tuple(ends))


def _beside(parameters: Sequence[Tensor], layers: Sequence[tuple[int, ...]], model: nn.Module) -> list[set[int]]:
    """Return all parameters of each layer's module, such as a bias that is registered before the weight.

    Empty for a module with several layers (those of an LSTM), whose parameters keep their order.
    """
    number_of = {id(p): number for number, p in enumerate(parameters)}
    own_of: dict[int, set[int]] = {}
    for module in unwrap(model).modules():
        own = {number_of[id(p)] for p in own_parameters(module) if id(p) in number_of}
        for number in own:
            own_of.setdefault(number, own)
    found = [own_of.get(members[0], set()) for members in layers]
    return [own if found.count(own) == 1 else set() for own in found]


def _end_of_last_unit(parameters: Sequence[Tensor], order: Sequence[int], own: int) -> int:
    """Return where the last unit ends: with its bias and norm, before a matrix such as the classifier's."""
    matrices = (place for place in range(own + 1, len(order)) if parameters[order[place]].dim() >= 2)
    return next(matrices, len(order)) - 1


def _watched_layers(
    parameters: Sequence[Tensor], watch: Sequence[str], model: nn.Module | None
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (watched numbers, all numbers) of each layer, in numbering order."""
    number_of = {id(p): number for number, p in enumerate(parameters)}
    classes = [name for name in watch if name not in KINDS]
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    taken: set[int] = set()
    dims = {dim for name, dim in (("conv", 4), ("linear", 2)) if name in watch}
    if classes:
        for module in _outermost(classes, model):
            numbers = {number_of[id(p)] for p in module.parameters() if id(p) in number_of}
            members = tuple(sorted(numbers - taken))  # a shared parameter belongs to the first module that has it
            weights = tuple(m for m in members if parameters[m].dim() >= 2) or members
            if members:
                found.append((weights, members))
                taken |= set(members)
    embeddings = set()
    if model is not None:
        lookups = [m for m in unwrap(model).modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        embeddings = {id(p) for m in lookups for p in own_parameters(m)}
        for module, base in adapted_layers(unwrap(model)):
            numbers = {number_of[id(p)] for p in module.parameters() if id(p) in number_of}
            members = tuple(sorted(numbers - taken))
            adapters = set(members) - {number_of.get(id(p), -1) for p in base.parameters()}
            kinds = {p.dim() for p in base.parameters() if p.dim() >= 2} or {parameters[n].dim() for n in adapters}
            if adapters and kinds & dims:
                matrices = [n for n in members if n in adapters and parameters[n].dim() >= 2]
                found.append((tuple(matrices or sorted(adapters)), members))
                taken |= numbers
            taken |= adapters
        for module, parts in weight_parts(unwrap(model)):
            numbers = {number_of[id(p)] for p in parts if id(p) in number_of}
            members = tuple(sorted(numbers - taken))
            taken |= numbers
            if module not in lookups and any(parameters[m].dim() in dims for m in members):
                found.append((tuple(m for m in members if parameters[m].dim() >= 2), members))
    for number, parameter in enumerate(parameters):
        if parameter.dim() in dims and number not in taken and id(parameter) not in embeddings:
            found.append(((number,), (number,)))
    return sorted(found)


def _outermost(classes: Sequence[str], model: nn.Module | None) -> list[nn.Module]:
    if model is None:
        raise UserError(f"CAC_WATCH={','.join(classes)} names classes of modules and needs the model: give model=")
    class_of = {m: type_before_parametrizations(m).__name__ for m in unwrap(model).modules()}
    there = {name for module, name in class_of.items() if any(True for _ in module.parameters())}
    for name in classes:
        if name not in there:
            raise unknown_name("module class", name, {*there, *KINDS})
    found = {name: m for name, m in unwrap(model).named_modules() if name and class_of[m] in classes}
    inside = tuple(f"{name}." for name in found)
    return [module for name, module in found.items() if not name.startswith(inside)]


def unit_ends(parameters: Sequence[Tensor], model: nn.Module) -> tuple[int, ...]:
    """Return the last number of each whole unit whose stop leaves something to train.

    Units are convolutions and linear layers, whatever rules watch: a vision transformer has one convolution.
    """
    watch = watch_needed(parameters, model) or KINDS
    units = make_plan(parameters, watch, model=model, whole_units=True).units
    return tuple(unit.end for unit in units if unit.end < len(parameters) - 1)


def watch_needed(parameters: Sequence[Tensor], model: nn.Module | None) -> tuple[str, ...]:
    """Return the ``CAC_WATCH`` that finds layers to stop if the default finds none; empty if it finds some.

    It is linear layers, and the classes of convolutions of one or three dimensions, which only a model tells.
    """
    given = {id(p) for p in parameters}
    modules = () if model is None else unwrap(model).modules()
    convolutions = [m for m in modules if isinstance(m, _ConvNd) and any(id(p) in given for p in m.parameters())]
    watch = (*sorted({type_before_parametrizations(m).__name__ for m in convolutions}), "linear")
    plans = [make_plan(list(parameters), kinds, model=model) for kinds in (KINDS[:1], watch)]
    return watch if plans[1].units and not plans[0].units else ()
