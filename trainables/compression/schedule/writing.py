"""Schedules as mappings and as readable YAML: sections in order, short lists on one line. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from yaml.nodes import SequenceNode

from trainables.compression.schedule.document import plain
from trainables.compression.schedule.parts import Component, PlannedPolicy, Schedule
from trainables.compression.schedule.policy_configs import KINDS, RANGE
from trainables.compression.schedule.positions import FLOAT, FLOAT_BEGINS
from trainables.compression.schedule.reading import SECTIONS, VERSION

LINE_WIDTH = 100


class _Writer(yaml.SafeDumper):
    """Write block style, except that a list of scalars that fits is written on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_list(self, data: Iterable[Any]) -> SequenceNode:
        data = list(data)
        scalars = not any(isinstance(item, (dict, list)) for item in data)
        short = scalars and sum(len(str(item)) + 4 for item in data) <= LINE_WIDTH
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=short)


_Writer.add_representer(list, _Writer.represent_list)
# Text that the reader would read as a number is quoted.
_Writer.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, FLOAT_BEGINS)


def dump(schedule: Mapping[str, Any]) -> str:
    """Return a schedule's mapping as YAML; `read_schedule` reads the same schedule from it.

    Args:
        schedule: plain values. Sections are written in the language's order, unknown sections before the policies.
    """
    values = plain(schedule)
    unknown = [name for name in values if name not in SECTIONS]
    order = [*SECTIONS[:-1], *unknown, SECTIONS[-1]]
    parts = [
        yaml.dump(
            {name: values[name]}, Dumper=_Writer, sort_keys=False, default_flow_style=False, allow_unicode=True,
            width=LINE_WIDTH,
        )
        for name in order
        if name in values
    ]  # fmt: skip
    return "\n".join(parts)


def to_mapping(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule as plain values, as in a file: only arguments that were given, ``version`` 1."""
    sections = {
        section: {name: _component(component) for name, component in schedule.section(section).items()}
        for section in KINDS.values()
    }
    return {
        "version": VERSION,
        **{section: components for section, components in sections.items() if components},
        "policies": [_policy(policy) for policy in schedule.policies],
    }


def _component(component: Component) -> dict[str, Any]:
    settings = component.settings
    given = component.arguments if settings is None else settings.model_dump(exclude_unset=True)
    return {"class": component.class_name, **plain(given)}


def _policy(policy: PlannedPolicy) -> dict[str, Any]:
    inner: dict[str, Any] = {"instance_name": policy.instance_name}
    args = {} if policy.args is None else plain(policy.args.model_dump(exclude_unset=True))
    if args:
        inner["args"] = args
    timing = policy.timing
    if timing.epochs is not None:
        return {policy.kind: inner, "epochs": list(timing.epochs)}
    return {policy.kind: inner, **{key: getattr(timing, key) for key in RANGE}}
