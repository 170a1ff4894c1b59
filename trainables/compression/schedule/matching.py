"""Matching of a schedule's names with a model's parameters and modules, given as plain data. Does not import torch.

Shapes: a convolution's weight (filters, channels, height, width), one-dimensional (filters, channels, length); a
linear layer's (out, in).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainables.compression.schedule.configs import ComponentConfig
from trainables.compression.schedule.names import match_names, plain_name
from trainables.compression.schedule.parts import Component, Schedule
from trainables.compression.schedule.policy_configs import KINDS, Findings, Path, PrunerPolicyConfig
from trainables.compression.structures import group_count, lacking_weight, ranked_group
from trainables.errors import UserError

#: Arguments that contain names of parameters, and the argument that contains names of modules.
PARAMETERS = ("weights", "sensitivities", "thresholds", "levels", "reg_regims")
MODULES = "overrides"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model that a schedule is checked against."""

    parameters: Mapping[str, tuple[int, ...]]
    """Shapes by name, in the model's order."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Class names by module name, in the model's order."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A schedule matched with a model."""

    schedule: Schedule
    """The schedule; with the compatibility switch, names that match nothing are left out, and components that have no
    names left, with their policies."""
    names: Mapping[tuple[str, str], tuple[str, ...]]
    """By section and component: parameters of pruners and regularizers, modules with overrides of quantizers."""
    values: Mapping[tuple[str, str], Mapping[str, Any]]
    """The same with each name's sensitivity, threshold, level, or [strength, group]; empty without these."""
    facts: ModelFacts
    """Of the model."""

    def of(self, component: Component) -> tuple[str, ...]:
        """Return a component's names: in the model's order if given as a map, else in the schedule's order."""
        return self.names.get((component.section, component.name), ())


def resolve(schedule: Schedule, facts: ModelFacts, compatible: bool = False) -> Resolved:
    """Match a schedule with a model.

    Args:
        schedule: read and checked.
        facts: of the model.
        compatible: whether names that match nothing are left out with a warning.

    Raises:
        ScheduleError: names match nothing, or weights do not have the structures to be pruned.
    """
    findings = Findings(schedule.source, schedule.lines, compatible=compatible)
    resolved = match_schedule(schedule, facts, findings)
    findings.settle()
    return resolved


def match_schedule(schedule: Schedule, facts: ModelFacts, findings: Findings) -> Resolved:
    """Match as `resolve`, but collect problems instead of raising an error."""
    names: dict[tuple[str, str], tuple[str, ...]] = {}
    values: dict[tuple[str, str], Mapping[str, Any]] = {}
    sections: dict[str, Any] = {section: {} for section in KINDS.values()}
    for component in schedule.components():
        key = (component.section, component.name)
        argument = names_argument(component.settings)
        if argument is not None and component.settings is not None:
            matched = _match(component.settings, argument, facts, key, findings)
            names[key], values[key] = tuple(matched.values), matched.values if matched.has_values else {}
            _check_structures(component.settings, matched, facts, (*key, argument), findings)
            if not matched.kept and argument != MODULES:
                continue
            component = replace(component, settings=_only(component.settings, argument, matched.kept))
        sections[component.section][component.name] = component
    policies = [policy for policy in schedule.policies if policy.instance_name in sections[KINDS[policy.kind]]]
    for policy in policies:
        levels = policy.args.levels if isinstance(policy.args, PrunerPolicyConfig) else None
        if isinstance(levels, Mapping):
            path: Path = ("policies", policy.position, "pruner", "args", "levels")
            for pattern in levels:
                _matches(pattern, list(facts.parameters), (*path, pattern), findings, match_names)
    kept = replace(schedule, **sections, policies=tuple(policies))
    return Resolved(schedule=kept, names=names, values=values, facts=facts)


def names_argument(settings: ComponentConfig | None) -> str | None:
    """Return the argument that names parameters or modules, or None."""
    fields = type(settings).model_fields if settings is not None else {}
    return next((name for name in (*PARAMETERS, MODULES) if name in fields), None)


def match_modules(pattern: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that match a key of ``overrides``, in their order; at least one.

    The key is matched like parameter names; if nothing is found, as a regular expression for the whole name without
    ``re:``, as in published schedules.

    Raises:
        UserError: nothing matches.
    """
    try:
        return match_names(pattern, known, "module")
    except UserError as error:
        try:
            found = tuple(name for name in known if re.fullmatch(pattern, plain_name(name)))
        except re.error:
            found = ()
        if not found:
            raise error from None
        return found


# --- one component --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Matched:
    """Names that the patterns of a component match."""

    values: dict[str, Any]
    """By name: the value of its pattern."""
    patterns: dict[str, str | int]
    """By name: the pattern, or its position in the list."""
    kept: list[str]
    """Patterns that match at least one name."""
    has_values: bool
    """True if patterns have values."""


def _match(settings: ComponentConfig, argument: str, facts: ModelFacts, key: Path, findings: Findings) -> _Matched:
    given = getattr(settings, argument)
    modules = argument == MODULES
    known, match = list(facts.modules if modules else facts.parameters), match_modules if modules else match_names
    in_list = not isinstance(given, Mapping)
    entries: Iterable[tuple[str, Any]] = ((pattern, None) for pattern in given) if in_list else given.items()
    exact: dict[str, bool] = {}
    values: dict[str, Any] = {}
    patterns: dict[str, str | int] = {}
    kept = []
    for position, (pattern, value) in enumerate(entries):
        place = position if in_list else pattern
        matches = _matches(pattern, known, (*key, argument, place), findings, match)
        if matches:
            kept.append(pattern)
        named = len(matches) == 1 and not any(sign in pattern for sign in "*?[")
        for name in matches:
            # As in `names.assigned`: an exact name takes precedence over patterns, then the first pattern.
            if name not in values or (named and not exact[name] and not in_list):
                values[name], exact[name], patterns[name] = value, named, place
    order = list(values) if in_list else [name for name in known if name in values]
    return _Matched({name: values[name] for name in order}, patterns, kept, not in_list)


def _matches(
    pattern: str, known: Sequence[str], path: Path, findings: Findings, match: Callable[..., tuple[str, ...]]
) -> tuple[str, ...]:
    try:
        return match(pattern, known)
    except UserError as error:
        findings.lenient(path, str(error))
        return ()


def _only(settings: ComponentConfig, argument: str, kept: Sequence[str]) -> ComponentConfig:
    """Return the settings without patterns that match nothing."""
    given = getattr(settings, argument)
    if len(kept) == len(given):
        return settings
    if isinstance(given, Mapping):
        return settings.model_copy(update={argument: {pattern: given[pattern] for pattern in kept}})
    return settings.model_copy(update={argument: tuple(kept)})


def _check_structures(
    settings: ComponentConfig, matched: _Matched, facts: ModelFacts, path: Path, findings: Findings
) -> None:
    """Check that every weight has the requested structures."""
    common = getattr(settings, "group_type", None)
    counts: dict[str, int] = {}
    for name, value in matched.values.items():
        groups = common or (value[1] if isinstance(value, tuple) else None)
        if groups is None:
            continue
        shape, place = facts.parameters[name], (*path, matched.patterns[name])
        wanted = lacking_weight(groups, shape)
        if wanted:
            findings.error(place, f"{groups} of {name} need {wanted}, got shape {_shape(shape)}")
            continue
        if groups == "Blocks" and common:
            block = settings.kwargs.block_shape  # type: ignore[attr-defined]  # its settings ask for it
            if any(size % part for size, part in zip(shape, block, strict=True)):
                findings.error(
                    place, f"block_shape {_shape(block)} must divide the shape of {name}, got {_shape(shape)}"
                )
        if common and common != "Blocks":
            counts[name] = group_count(shape, ranked_group(common))
    if getattr(settings, "group_dependency", None) == "Leader" and len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        findings.error(path, f"must have equally many structures with group_dependency Leader, got {said}")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"
