"""Warnings that are due when Gradient-Skip is attached to an optimizer, and after a stop."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from trainables.gradskip.advice.advice import Advice
from trainables.gradskip.advice.never_fires import never_fires
from trainables.gradskip.numbering import Numbering, is_compiled
from trainables.gradskip.settings import Settings
from trainables.gradskip.stops import Decisions, Stops


def advise_at_begin(
    advice: Advice,
    settings: Settings,
    optimizer: Optimizer,
    numbering: Numbering,
    decisions: Decisions,
    *,
    given_model: nn.Module | None,
    total_steps: int | None,
) -> None:
    """Warn of groups without a model, of settings that can stop nothing, and of many recompilations."""
    if len(optimizer.param_groups) > 1 and given_model is None and settings.mode != "off":
        advice.groups(len(optimizer.param_groups))
    plan, stoppable = decisions.plan, decisions.blueprint.stoppable
    watched = {id(numbering.parameters[n]) for unit in plan.units for n in unit.watched}
    decays = [
        float(group["weight_decay"])
        for group in optimizer.param_groups
        if "weight_decay" in group and any(id(p) in watched for p in group["params"])
    ]
    reason = never_fires(
        settings,
        units=len(plan.units),
        stoppable=stoppable,
        first_stop=decisions.machine.rule.first_stop(),
        weight_decays=decays or None,
        total_steps=total_steps,
        frozen=len(numbering.plan(lambda _: True).units) - len(plan.units),
    )
    if reason is not None:
        advice.never_fires(reason)
    if given_model is not None and is_compiled(given_model) and settings.mode != "off":
        stops = stoppable if settings.mode != "manual" else len(settings.stop_layer_num or ())
        limit = int(torch._dynamo.config.recompile_limit)
        if 2 * stops + 2 > limit:
            advice.recompilations(stops, limit)


def advise_after_stop(advice: Advice, numbering: Numbering, stops: Stops, *, example_given: bool, joined: bool) -> None:
    """Warn if nothing is left to train, or of what makes a stop save less than it could.

    Args:
        advice: gives the warnings.
        numbering: of the parameters.
        stops: the stopped and frozen parameters.
        example_given: whether the user has given example inputs.
        joined: whether our wrapper joins the processes.
    """
    if stops.all:
        advice.nothing_left()
    advise_of_left(advice, numbering, stops)
    if numbering.wants_trace and numbering.trace is None:
        advice.unseen(example_given=example_given)
    if not joined and _several_processes() and not numbering.is_sharded:
        advice.processes()


def advise_of_left(advice: Advice, numbering: Numbering, stops: Stops) -> None:
    """Warn of parameters that train before stopped layers."""
    left = stops.left_upstream()
    if left:
        unfrozen = sorted(stops.unfrozen.intersection(left))
        has_units = bool(numbering.plan(lambda _: True).units)
        advice.left_upstream(
            [numbering.name(n) for n in left], [numbering.name(n) for n in unfrozen], has_units=has_units
        )


def _several_processes() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
