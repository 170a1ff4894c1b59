"""Checks for entries that are well-formed but have no effect or are contradictory. Does not import torch.

The original silently accepted: unknown sections, unknown keys of policies and of pruners' args, keys given twice,
components that no policy uses, ``epochs`` beside a range, ``levels`` for pruners that have none, names that match
nothing (`matching`), and a second line of Baidu's rule that begins outside of its policy. By default these are errors;
with the compatibility switch each gives a warning, and the entries that the original ignored are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainables.compression.schedule.configs import ComponentConfig
from trainables.compression.schedule.parts import Component, PlannedPolicy, Schedule
from trainables.compression.schedule.policy_configs import PrunerPolicyConfig
from trainables.compression.schedule.problems import Findings, Path, nearest
from trainables.compression.schedule.pruner_configs import (
    AutomatedGradualPrunerConfig,
    BaiduRNNPrunerConfig,
    SparsityLevelParameterPrunerConfig,
)


def is_gradual(settings: ComponentConfig | None) -> bool:
    """Return whether a pruner's share grows by Zhu & Gupta's cubic, ``initial_sparsity`` to ``final_sparsity``."""
    return isinstance(settings, AutomatedGradualPrunerConfig) or (
        settings is not None and settings.class_.endswith("_AGP")  # common suffix of the names
    )


def known_keys(given: Mapping[str, Any], known: Sequence[str], path: Path, what: str, findings: Findings) -> None:
    """Report unknown keys; the readers ignore them."""
    for key in given:
        if key not in known:
            findings.lenient((*path, key), f"unknown key of {what}{nearest(key, known)}")


def check_uses(schedule: Schedule, findings: Findings, used: set[tuple[str, str]]) -> None:
    """Check that components and policies fit each other.

    Args:
        schedule: as far as it could be read.
        findings: collects the problems.
        used: sections and names that policies mention, including policies that could not be read.
    """
    for component in schedule.components():
        if (component.section, component.name) not in used:
            path = (component.section, component.name)
            findings.lenient(path, "is used by no policy: add one, or leave it out")
    for policy in schedule.policies:
        _check_use(policy, schedule.component(policy), findings)


def _check_use(policy: PlannedPolicy, component: Component, findings: Findings) -> None:
    path: Path = ("policies", policy.position)
    settings = component.settings
    if is_gradual(settings) and len(policy.timing.active_epochs()) == 1:
        findings.error(
            path,
            f"{component.class_name} {component.name!r} rises over its active epochs, so it needs at least two, got "
            f"{policy.timing.starting_epoch}",
        )
    if isinstance(settings, BaiduRNNPrunerConfig):
        first, last = policy.timing.starting_epoch, policy.timing.last_epoch
        ramp_epoch = settings.ramp_from(first)
        if not first <= ramp_epoch <= last:
            given = "ramp_epoch" if settings.ramp_epoch is not None else "ramp_epoch_offset"
            findings.lenient(
                (component.section, component.name, given),
                f"must be in the epochs {first} to {last} of its policy, got {ramp_epoch}",
            )
    levels = policy.args.levels if isinstance(policy.args, PrunerPolicyConfig) else None
    if levels is not None and not isinstance(settings, SparsityLevelParameterPrunerConfig):
        findings.lenient(
            (*path, "pruner", "args", "levels"),
            f"has no effect on {component.class_name}: only {SparsityLevelParameterPrunerConfig.class_} has levels",
        )
