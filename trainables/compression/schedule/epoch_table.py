"""Table of a schedule's actions in each epoch, as far as they are known before training. Pure, without torch."""

from __future__ import annotations

from collections.abc import Mapping

from trainables.compression.schedule.configs import GradualConfig, SparsityLevelParameterPrunerConfig
from trainables.compression.schedule.parts import Component, PlannedPolicy, PrunerPolicyConfig, Schedule
from trainables.compression.schedule.timing import gradual_share


def planned_share(component: Component, policy: PlannedPolicy, epoch: int) -> tuple[float, float] | None:
    """Return the least and greatest share that a pruner plans in an active epoch of its policy.

    Structure pruners plan a share of structures, element pruners a share of elements. None: it depends on the data.
    """
    settings, args = component.settings, policy.args
    if isinstance(settings, SparsityLevelParameterPrunerConfig):
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
    rows: list[tuple[int, int, str]] = []
    for epoch in range(epochs):
        active = [policy for policy in schedule.policies if policy.timing.is_active(epoch)]
        acts = ", ".join(_said(schedule.component(policy), policy, epoch) for policy in active)
        if rows and rows[-1][1:] == (epoch - 1, acts):
            rows[-1] = (rows[-1][0], epoch, acts)
        elif acts:
            rows.append((epoch, epoch, acts))
    return [
        ["epochs", "acts"],
        *([str(first) if first == last else f"{first}-{last}", acts] for first, last, acts in rows),
    ]


def _said(component: Component, policy: PlannedPolicy, epoch: int) -> str:
    if policy.kind != "pruner":
        return component.name
    share = planned_share(component, policy, epoch)
    if share is None:
        return f"{component.name} by data"
    least, greatest = share
    return f"{component.name} {least:.4g}" + (f" to {greatest:.4g}" if greatest != least else "")
