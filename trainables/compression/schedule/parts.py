"""A checked schedule: arguments of policies, components, and what they do in each epoch. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainValidator, model_validator

from trainables.compression.schedule.configs import ComponentConfig, Flag, GradualConfig, Whole
from trainables.compression.schedule.document import Path, shown
from trainables.compression.schedule.timing import Timing, gradual_share

#: Section of each kind of policy. A policy with several kinds has the first of them, as in the original.
KINDS = {
    "pruner": "pruners",
    "regularizer": "regularizers",
    "quantizer": "quantizers",
    "lr_scheduler": "lr_schedulers",
    "extension": "extensions",
    "distiller": "distillers",
}
#: The pruners whose policies take ``levels``.
WITH_LEVELS = "SparsityLevelParameterPruner"
#: Keys of a policy's epochs, beside ``epochs``.
RANGE = ("starting_epoch", "ending_epoch", "frequency")


def _levels(given: Any) -> dict[str, float] | float | None:
    for name, level in given.items() if isinstance(given, Mapping) else [("", given)]:
        is_share = isinstance(level, (int, float)) and not isinstance(level, bool) and 0 <= level <= 1
        if not is_share and given is not None:
            raise ValueError(f"levels{f' of {name}' if name else ''} must be in [0, 1], got {shown(level)}")
    if isinstance(given, Mapping) and not given:
        raise ValueError("levels must name at least one parameter, got none")
    return dict(given) if isinstance(given, Mapping) else given


class PrunerPolicyConfig(ComponentConfig):
    """Options of a policy for its pruner's masks; all off by default. docs/compression.md says what each does."""

    class_: ClassVar[str] = "pruner policies"
    levels: Annotated[dict[str, float] | float | None, PlainValidator(_levels)] = None
    """Share of the elements by parameter name or pattern, or one for all, instead of the pruner's own levels."""
    keep_mask: Flag = False
    mini_batch_pruning_frequency: Annotated[Whole, Field(ge=0)] = 0
    """Number of optimizer steps of the run after which masks are computed again; 0: once per active epoch."""
    mask_on_forward_only: Flag = False
    mask_gradients: Flag = False
    use_double_copies: Flag = False
    discard_masks_at_minibatch_end: Flag = False
    skip_first_minibatch: Flag = False
    fold_batchnorm: Flag = False

    @model_validator(mode="after")
    def _gradients_need_forward_only(self) -> Self:
        if self.mask_gradients and not self.mask_on_forward_only:
            raise ValueError("mask_gradients needs mask_on_forward_only: set both, or leave mask_gradients out")
        return self


class RegularizerPolicyConfig(ComponentConfig):
    """Options of a policy for its regularizer's masks."""

    class_: ClassVar[str] = "regularizer policies"
    keep_mask: Flag = False  # true if weights that the threshold zeroed in the last active epoch stay zero


@dataclass(frozen=True, kw_only=True)
class Component:
    """A pruner, regularizer, quantizer, learning-rate scheduler, extension or distiller."""

    section: str
    name: str
    class_name: str  # as written in the schedule
    settings: ComponentConfig | None = None  # checked arguments; None for learning-rate schedulers
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Plain arguments of a learning-rate scheduler; empty for the others."""


@dataclass(frozen=True, kw_only=True)
class PlannedPolicy:
    """The times at which a component acts, and its manner."""

    kind: str  # one of `KINDS`
    instance_name: str  # the component's name
    timing: Timing
    args: PrunerPolicyConfig | RegularizerPolicyConfig | None = None
    """Arguments of pruner and regularizer policies, with defaults for those not given."""
    position: int = field(default=0, compare=False)  # position in the file's list of policies


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A compression schedule."""

    sections: Mapping[str, Mapping[str, Component]] = field(default_factory=dict)
    """Components by section and name, in the order of the file; at most one in ``quantizers``."""
    policies: tuple[PlannedPolicy, ...] = ()  # in the file's order, in which they act
    source: str = field(default="", compare=False)  # name used in messages
    lines: Mapping[Path, int] = field(default_factory=dict, compare=False, repr=False)
    """Line numbers of the file, by path."""

    def component(self, policy: PlannedPolicy) -> Component:
        """Return the component that a policy applies."""
        return self.sections[KINDS[policy.kind]][policy.instance_name]

    def components(self) -> Iterator[Component]:
        """Yield all components, section by section."""
        for section in self.sections.values():
            yield from section.values()


def planned_share(component: Component, policy: PlannedPolicy, epoch: int) -> tuple[float, float] | None:
    """Return the least and greatest share that a pruner plans in an active epoch of its policy.

    Structure pruners plan a share of structures, element pruners a share of elements. None: it depends on the data.
    """
    settings: Any = component.settings
    args = policy.args
    if component.class_name == WITH_LEVELS:
        levels = args.levels if isinstance(args, PrunerPolicyConfig) and args.levels is not None else settings.levels
        values = list(levels.values()) if isinstance(levels, Mapping) else [float(levels)]
        return min(values), max(values)
    if isinstance(settings, GradualConfig):
        share = gradual_share(settings.initial_sparsity, settings.final_sparsity, policy.timing.progress(epoch))
        return share, share
    desired: float | None = getattr(settings, "desired_sparsity", None)
    share_range: tuple[float, float] | None = getattr(settings, "sparsity_range", None)
    return share_range if desired is None else (desired, desired)


def epoch_table(schedule: Schedule, epochs: int) -> list[list[str]]:
    """Return the actions in epochs 0..epochs-1, with the planned shares, as text; the first row is the header.

    Consecutive epochs with the same actions have one row, epochs without actions none.
    """

    def acts_in(epoch: int) -> str:
        active = [policy for policy in schedule.policies if policy.timing.is_active(epoch)]
        return ", ".join(_said(schedule.component(policy), policy, epoch) for policy in active)

    rows = [["epochs", "acts"]]
    for acts, group in groupby(range(epochs), key=acts_in):
        first, *others = group
        if acts:
            rows.append([f"{first}-{others[-1]}" if others else str(first), acts])
    return rows


def _said(component: Component, policy: PlannedPolicy, epoch: int) -> str:
    if policy.kind != "pruner":
        return component.name
    share = planned_share(component, policy, epoch)
    if share is None:
        return f"{component.name} by data"
    least, greatest = share
    return f"{component.name} {least:.4g}" + (f" to {greatest:.4g}" if greatest != least else "")
