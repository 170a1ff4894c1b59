"""Parts of a checked schedule: components, policies, and the schedule itself. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainables.compression.schedule.configs import ComponentConfig
from trainables.compression.schedule.policy_configs import KINDS, Path, PrunerPolicyConfig, RegularizerPolicyConfig
from trainables.compression.schedule.timing import Timing


@dataclass(frozen=True, kw_only=True)
class Component:
    """A pruner, regularizer, quantizer, learning-rate scheduler, extension or distiller."""

    section: str
    name: str
    class_name: str
    """As written in the schedule."""
    settings: ComponentConfig | None = None
    """Checked arguments; None for learning-rate schedulers."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Plain arguments of a learning-rate scheduler; empty for the others."""


@dataclass(frozen=True, kw_only=True)
class PlannedPolicy:
    """The times at which a component acts, and its manner."""

    kind: str
    """One of `KINDS`."""
    instance_name: str
    """The component's name."""
    timing: Timing
    args: PrunerPolicyConfig | RegularizerPolicyConfig | None = None
    """Arguments of pruner and regularizer policies, with defaults for those not given."""
    position: int = field(default=0, compare=False)
    """Position in the file's list of policies."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A compression schedule. Components are stored by name, in the order of the file."""

    pruners: Mapping[str, Component] = field(default_factory=dict)
    regularizers: Mapping[str, Component] = field(default_factory=dict)
    quantizers: Mapping[str, Component] = field(default_factory=dict)
    """At most one."""
    lr_schedulers: Mapping[str, Component] = field(default_factory=dict)
    extensions: Mapping[str, Component] = field(default_factory=dict)
    distillers: Mapping[str, Component] = field(default_factory=dict)
    policies: tuple[PlannedPolicy, ...] = ()
    """In the file's order, in which they act."""
    source: str = field(default="", compare=False)
    """Name used in messages."""
    lines: Mapping[Path, int] = field(default_factory=dict, compare=False, repr=False)
    """Line numbers of the file, by path."""

    def section(self, name: str) -> Mapping[str, Component]:
        """Return the components of a section, such as ``pruners``."""
        found: Mapping[str, Component] = getattr(self, name)
        return found

    def component(self, policy: PlannedPolicy) -> Component:
        """Return the component that a policy applies."""
        return self.section(KINDS[policy.kind])[policy.instance_name]

    def components(self) -> Iterator[Component]:
        """Yield all components, section by section."""
        for section in KINDS.values():
            yield from self.section(section).values()
