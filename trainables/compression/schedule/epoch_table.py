"""Table of a schedule's actions in each epoch, as far as they are known before training. Pure, without torch.

Symbols (Zhu & Gupta 2017, eq. 1): s_i, s_f initial and final share pruned; p in [0, 1] the position of an epoch between
the policy's first and last active epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainables.compression.schedule.agp import gradual_share
from trainables.compression.schedule.configs import AutomatedGradualPrunerConfig, SparsityLevelParameterPrunerConfig
from trainables.compression.schedule.matching import Resolved
from trainables.compression.schedule.names import patterns_of
from trainables.compression.schedule.parts import Component, PlannedPolicy, Schedule
from trainables.compression.schedule.policy_configs import PrunerPolicyConfig
from trainables.compression.schedule.reading import is_gradual

#: Least and greatest share of elements or structures that a pruner plans; None: it depends on the data.
Share = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Act:
    """One active policy."""

    kind: str
    """The policy's kind."""
    name: str
    """The component's name."""
    share: Share = None
    """The share that a pruner plans."""


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """Consecutive epochs with the same actions."""

    first: int
    last: int
    acts: tuple[Act, ...]
    """In the order of the policies; at least one."""
    total: float | None
    """Share of all weights (parameters of two dimensions or more) that is pruned after these epochs; None if it depends
    on the data, or no model is given."""


def planned_share(component: Component, policy: PlannedPolicy, epoch: int) -> Share:
    """Return the share that a pruner plans in an active epoch of its policy; None if it depends on the data.

    Structure pruners plan a share of structures, element pruners a share of elements.
    """
    settings, args = component.settings, policy.args
    if isinstance(settings, SparsityLevelParameterPrunerConfig):
        levels = args.levels if isinstance(args, PrunerPolicyConfig) and args.levels is not None else settings.levels
        values = list(levels.values()) if isinstance(levels, Mapping) else [float(levels)]
        return min(values), max(values)
    if is_gradual(settings):
        share = gradual_share(
            settings.initial_sparsity,  # type: ignore[union-attr]  # gradual pruners have both
            settings.final_sparsity,  # type: ignore[union-attr]
            policy.timing.progress(epoch),
        )
        return share, share
    desired: float | None = getattr(settings, "desired_sparsity", None)
    share_range: Share = getattr(settings, "sparsity_range", None)
    return share_range if desired is None else (desired, desired)


def epoch_table(schedule: Schedule, epochs: int, resolved: Resolved | None = None) -> list[EpochRow]:
    """Return the actions in epochs 0..epochs-1; epochs without actions have no row.

    A schedule matched with a model is used instead of the checked one, and gives the totals.
    """
    schedule = schedule if resolved is None else resolved.schedule
    total = _Total(resolved)
    rows: list[EpochRow] = []
    for epoch in range(epochs):
        acts = []
        for policy in schedule.policies:
            if not policy.timing.is_active(epoch):
                continue
            component = schedule.component(policy)
            share = planned_share(component, policy, epoch) if policy.kind == "pruner" else None
            acts.append(Act(kind=policy.kind, name=policy.instance_name, share=share))
            if policy.kind == "pruner":
                total.prune(component, policy, share)
        if not acts:
            continue
        row = EpochRow(first=epoch, last=epoch, acts=tuple(acts), total=total.share())
        if rows and (rows[-1].last, rows[-1].acts, rows[-1].total) == (epoch - 1, row.acts, row.total):
            rows[-1] = replace(rows[-1], last=epoch)
        else:
            rows.append(row)
    return rows


class _Total:
    """The planned share of all weights, updated from epoch to epoch: masks stay after their policy's epochs."""

    def __init__(self, resolved: Resolved | None) -> None:
        self._resolved = resolved
        shapes = {} if resolved is None else resolved.facts.parameters
        self._sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
        self._pruned: dict[str, int | None] = dict.fromkeys(self._sizes, 0)
        """Elements by weight; None if that depends on data."""

    def prune(self, component: Component, policy: PlannedPolicy, share: Share) -> None:
        """Record a pruner's decision; it replaces earlier decisions on the same weights."""
        if self._resolved is None:
            return
        targets, settings = self._resolved.of(component), component.settings
        args = policy.args if isinstance(policy.args, PrunerPolicyConfig) else PrunerPolicyConfig()
        shares: Mapping[str, float | None] = dict.fromkeys(targets)  # by structures or data, or of a temporary mask
        if args.discard_masks_at_minibatch_end:
            pass
        elif isinstance(settings, AutomatedGradualPrunerConfig):
            shares = dict.fromkeys(targets, share[0] if share else None)
        elif isinstance(settings, SparsityLevelParameterPrunerConfig):
            shares = self._resolved.values[component.section, component.name]
            if isinstance(args.levels, Mapping):
                found = patterns_of(args.levels, list(self._resolved.facts.parameters), on_error=lambda *_: None)
                shares = {name: args.levels[pattern] for name, pattern in found.items()}
            elif args.levels is not None:
                shares = dict.fromkeys(targets, args.levels)
        for name in self._sizes.keys() & shares.keys():
            one = shares[name]
            self._pruned[name] = None if one is None else int(one * self._sizes[name])

    def share(self) -> float | None:
        pruned = [count for count in self._pruned.values() if count is not None]
        if not self._sizes or len(pruned) < len(self._sizes):
            return None
        return sum(pruned) / sum(self._sizes.values())


def table_cells(rows: Sequence[EpochRow], *, with_totals: bool) -> list[list[str]]:
    """Return the table as text: epochs, actions with their planned share, and optionally the total."""
    header = ["epochs", "acts", *(["weights pruned"] if with_totals else [])]
    cells = [header]
    for row in rows:
        total = "by data" if row.total is None else f"{100 * row.total:.2f} %"
        epochs = str(row.first) if row.first == row.last else f"{row.first}-{row.last}"
        cells.append([epochs, ", ".join(map(_said, row.acts)), *([total] if with_totals else [])])
    return cells


def _said(act: Act) -> str:
    if act.kind != "pruner":
        return act.name
    if act.share is None:
        return f"{act.name} by data"
    least, greatest = act.share
    return f"{act.name} {least:.4g}" + (f" to {greatest:.4g}" if greatest != least else "")
