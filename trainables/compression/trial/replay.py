"""Replay of a compression schedule over recorded training: when each policy first acts. Does not import torch.

A policy's whole effect is determined by its component, its timing and the training before it, so it is one
intervention: at the first step of the first epoch in which it acts, or in which its component starts to observe
training (statistics of activations and gradients).

Symbols: i iteration, S steps of an epoch, e epoch: an epoch's first step is i = e S.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainables.compression.schedule.parts import KINDS, RANGE
from trainables.compression.schedule.timing import Timing
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from trainables.gradskip import replay as gradskip
from trainables.gradskip.replay import JointReplay
from trainables.interventions import Intervention, PlannedActs, action_text
from trainables.metrics import METHOD_DEFAULTS


def blueprint_key(config: TrialConfig) -> tuple[Any, ...]:
    """Return a key: configurations of one workload with equal keys have equal facts."""
    return ("gradskip+compression", *gradskip.blueprint_key(config)) if config.skips_gradients else ("compression",)


def start_replay(config: TrialConfig, facts: Mapping[str, Any]) -> PlannedActs | JointReplay:
    """Create the replay of a configuration's schedule, beside that of Gradient-Skip where it is joined with it."""
    own = facts["compression"] if config.skips_gradients else facts
    acts = interventions_of(schedule_of(config), steps_per_epoch=int(own["steps_per_epoch"]), epochs=config.epochs)
    planned = PlannedActs(acts, METHOD_DEFAULTS)
    if not config.skips_gradients:
        return planned
    return JointReplay(gradskip.start_replay(config, facts["gradskip"]), planned, "compression")


def timing_of(policy: Mapping[str, Any]) -> Timing:
    """Return the timing of a policy of a plain schedule."""
    if "epochs" in policy:
        return Timing(epochs=tuple(policy["epochs"]))
    return Timing(**{key: policy[key] for key in RANGE if key in policy})


def late_policies(schedule: Mapping[str, Any], epochs: int) -> list[int]:
    """Return the positions of a plain schedule's policies that begin after the last epoch of a run."""
    policies = schedule.get("policies", [])
    return [place for place, policy in enumerate(policies) if timing_of(policy).starting_epoch >= epochs]


def looks_from(kind: str, class_name: str, timing: Timing) -> int:
    """Return the first epoch in which a policy changes training or its component observes it."""
    observes = kind == "pruner" and class_name.startswith(("Activation", "Gradient"))  # from the epoch before on
    return max(0, timing.starting_epoch - (1 if observes else 0))


def interventions_of(schedule: Mapping[str, Any], *, steps_per_epoch: int, epochs: int) -> list[Intervention]:
    """Return the interventions of a plain schedule, ascending, at most one per iteration.

    Policies that begin after the epochs of the run never act.
    """
    acts: dict[int, list[Any]] = {}
    policies = schedule.get("policies", [])
    if any("lr_scheduler" in policy for policy in policies):
        acts.setdefault(0, []).append("the schedule's learning rates")  # the workload's schedule is off from the start
    for place, policy in enumerate(policies):
        kind = next(kind for kind in KINDS if kind in policy)
        name = policy[kind]["instance_name"]
        component = schedule[KINDS[kind]][name]
        begin = looks_from(kind, str(component["class"]), timing_of(policy))
        if begin < epochs:
            part = {"place": place, "policy": policy, "component": component, **_content(component)}
            acts.setdefault(begin, []).append(part)
    return [
        Intervention(iteration=epoch * steps_per_epoch, action=action_text({"compression": what}))
        for epoch, what in sorted(acts.items())
    ]


def _content(component: Mapping[str, Any]) -> dict[str, str]:
    """Hash a teacher's checkpoint, since the same file may have other weights in the next search; empty without one."""
    checkpoint = component.get("checkpoint")
    if checkpoint is None:
        return {}
    path = Path(str(checkpoint))
    digest = hashlib.sha256()
    try:
        for file in sorted(path.glob("*.pt")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    except OSError:
        return {}  # reported when the teacher is built
    return {"content": digest.hexdigest()[:24]}
