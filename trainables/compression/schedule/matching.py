"""Matching of a schedule's names with a model's parameters and modules, given as plain data. Does not import torch.

Shapes: a convolution's weight (filters, channels, height, width), one-dimensional (filters, channels, length); a
linear layer's (out, in).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trainables.compression.schedule.configs import ComponentConfig
from trainables.compression.schedule.document import Findings, Path, Problem
from trainables.compression.schedule.names import match_names, patterns_of, plain_name
from trainables.compression.schedule.parts import KINDS, Component, PrunerPolicyConfig, Schedule
from trainables.compression.structures import check_group, ranked_structures
from trainables.errors import UserError

#: Arguments that contain names of parameters, and the argument that contains names of modules.
PARAMETERS = ("weights", "sensitivities", "thresholds", "levels", "reg_regims")
MODULES = "overrides"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model that a schedule is checked against."""

    parameters: Mapping[str, tuple[int, ...]]  # shapes by name, in the model's order
    modules: Mapping[str, str] = field(default_factory=dict)  # class names by module name, in the model's order


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A schedule matched with a model."""

    schedule: Schedule
    """The schedule; with the compatibility switch, names that match nothing are left out, and components that have no
    names left, with their policies."""
    values: Mapping[tuple[str, str], Mapping[str, Any]]
    """By section and component: parameters of pruners and regularizers, modules with overrides of quantizers, with each
    name's sensitivity, threshold, level, or [strength, group]; None without these."""
    facts: ModelFacts

    def of(self, component: Component) -> tuple[str, ...]:
        """Return a component's names: in the model's order if given as a map, else in the schedule's order."""
        return tuple(self.values.get((component.section, component.name), ()))


def resolve(schedule: Schedule, facts: ModelFacts, compatible: bool = False) -> Resolved:
    """Match a checked schedule with a model, else ScheduleError.

    With ``compatible``, names that match nothing only cause a warning.
    """
    findings = Findings(schedule.source, schedule.lines, compatible=compatible)
    resolved = match_schedule(schedule, facts, findings)
    findings.raise_or_warn()
    return resolved


def match_schedule(schedule: Schedule, facts: ModelFacts, findings: Findings) -> Resolved:
    """Match as `resolve`, but collect problems instead of raising an error."""
    values: dict[tuple[str, str], Mapping[str, Any]] = {}
    sections: dict[str, dict[str, Component]] = {section: {} for section in schedule.sections}
    for component in schedule.components():
        argument = names_argument(component.settings)
        if argument is not None and component.settings is not None:
            key = (component.section, component.name)
            values[key], settings = _match(component.settings, argument, facts, key, findings)
            if settings is None:
                continue
            component = replace(component, settings=settings)
        sections[component.section][component.name] = component
    policies = [policy for policy in schedule.policies if policy.instance_name in sections[KINDS[policy.kind]]]
    for policy in policies:
        levels = policy.args.levels if isinstance(policy.args, PrunerPolicyConfig) else None
        if isinstance(levels, Mapping):
            places: dict[str, Path] = {p: ("policies", policy.position, "pruner", "args", "levels", p) for p in levels}
            patterns_of(levels, list(facts.parameters), partial(_report, findings, places))
    return Resolved(schedule=replace(schedule, sections=sections, policies=tuple(policies)), values=values, facts=facts)


def names_argument(settings: ComponentConfig | None) -> str | None:
    """Return the argument that names parameters or modules, or None."""
    return next((name for name in (*PARAMETERS, MODULES) if getattr(settings, name, None) is not None), None)


def match_modules(pattern: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that match a key of ``overrides`` as `match_names` does.

    If nothing is found, it is a regular expression for the whole name without ``re:``, as in published schedules.
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


def _report(findings: Findings, places: Mapping[str, Path], pattern: str, error: UserError) -> None:
    findings.lenient(places[pattern], str(error))


def _match(
    settings: ComponentConfig, argument: str, facts: ModelFacts, key: Path, findings: Findings
) -> tuple[dict[str, Any], ComponentConfig | None]:
    """Return the names that a component's patterns match with their values, and its settings without other patterns.

    The settings are None if no pattern of a component that needs one matches.
    """
    given = getattr(settings, argument)
    path, is_map = (*key, argument), isinstance(given, Mapping)
    places: dict[str, Path] = {p: (*path, p if is_map else given.index(p)) for p in given}
    kept = list(given)

    def on_error(pattern: str, error: UserError) -> None:
        kept.remove(pattern)
        _report(findings, places, pattern, error)

    known, match = (facts.modules, match_modules) if argument == MODULES else (facts.parameters, match_names)
    found = patterns_of(given, list(known), on_error, match)
    values = {name: given[found[name]] for name in known if name in found} if is_map else dict.fromkeys(found)
    findings.errors += _structure_problems(settings, values, facts, {name: places[found[name]] for name in found})
    if not kept and argument != MODULES:
        return values, None
    left = {pattern: given[pattern] for pattern in kept} if is_map else tuple(kept)
    return values, settings.model_copy(update={argument: left}) if len(kept) < len(given) else settings


def _structure_problems(
    settings: ComponentConfig, values: Mapping[str, Any], facts: ModelFacts, places: Mapping[str, Path]
) -> Iterator[Problem]:
    if ":" in settings.class_:  # the user's own, whose arguments mean what they say
        return
    common = getattr(settings, "group_type", None)
    counts: dict[str, int] = {}
    for name, value in values.items():
        groups = common or (value[1] if isinstance(value, tuple) else None)
        if groups is None:
            continue
        shape = facts.parameters[name]
        try:
            check_group(groups, name, shape)
            if common:
                structures = ranked_structures(settings)
                structures.check(name, shape)
                counts[name] = structures.count(shape)
        except UserError as error:
            yield Problem(places[name], str(error))
    if getattr(settings, "group_dependency", None) == "Leader" and len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        text = f"must have equally many structures with group_dependency Leader, got {said}"
        yield Problem(places[name][:-1], text)
