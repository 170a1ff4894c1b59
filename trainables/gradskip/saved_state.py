"""State of a gradient-skip optimizer: what is saved, and how a run continues from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trainables.errors import UserError
from trainables.gradskip.execution_order import ModelTrace
from trainables.gradskip.replay import LayerPlan, StopEvent
from trainables.gradskip.settings import Settings
from trainables.gradskip.step import SkippingStep


def state_of(skip: SkippingStep) -> dict[str, Any]:
    """Return the complete state in plain types and tensors."""
    skip.stops.look_at_user()
    numbering = skip.numbering
    counted = {} if skip.step_record is None else {"step_record": skip.step_record.state_dict()}
    return {
        **counted,
        "machine": {**skip.machine.state_dict(), "iteration": skip.iteration},
        "events": [asdict(event) for event in skip.events],
        "decision_lrs": list(skip.learning_rates),
        "signal": skip.signal.state_dict(),
        "rule": rule_identity(skip.settings),
        "stops": {**skip.stops.state_dict(), "through": skip.machine.stopped_through},
        "trace": None if numbering.trace is None else numbering.trace.state_dict(),
        "order": list(numbering.order),
        "units": [unit.end for unit in skip.plan.units],
    }


def rule_identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that a rule's own state depends on, in plain types; with equal ones it can continue."""
    lists = (settings.stop_layer_num, settings.stop_layer_itr)
    return {
        "mode": settings.mode,
        "watch": list(settings.watch),
        "whole_units": settings.whole_units,
        "lists": [None if numbers is None else list(numbers) for numbers in lists],
    }


def check(skip: SkippingStep, state: dict[str, Any]) -> None:
    """Raise UserError for a state of another model, or of another version."""
    if not isinstance(state.get("stops"), dict):
        raise UserError(
            "the state to load is of another version of Gradient-Skip: train on with that version, or load torch's "
            "part alone by taking the entry 'gradskip' out of it"
        )
    if len(state["order"]) != len(skip.parameters):
        raise UserError(
            f"the state to load is of {len(state['order'])} parameters, but this optimizer has "
            f"{len(skip.parameters)}: load it into the model that it was saved from"
        )


def load(skip: SkippingStep, state: dict[str, Any]) -> None:
    """Load a state.

    Stopped parameters stay stopped. A rule with other settings than the saved ones begins anew, over the layers that
    its own settings watch and that have not stopped; changed thresholds alone do not make it another rule.
    """
    numbering, stops = skip.numbering, skip.stops
    if skip.step_record is not None and "step_record" in state:
        skip.step_record.load_state_dict(state["step_record"])
    if state["trace"] is not None:
        numbering.stop_recording()
        numbering.trace = ModelTrace.from_state(state["trace"])  # a resumed run has been traced already
    machine = dict(state["machine"])
    saved_order = tuple(state["order"])
    stopped = saved_order[state["stops"]["through"] + 1 : machine["stopped_through"] + 1]
    same_units = state["rule"]["whole_units"] == skip.settings.whole_units
    if not same_units or machine["iteration"] == 0:  # saved before the trace, which gives the order
        numbering.order = tuple(range(len(saved_order)))
        numbering.order_by_trace()
    else:
        numbering.order = saved_order
    stops.load_state_dict(state["stops"], stopped)
    asked = rule_identity(skip.settings)
    same = state["rule"] == asked
    skip.begin_rule(set(state["units"]) if same else None)
    if numbering.order != saved_order and machine["iteration"] > 0:
        machine.update(_through(numbering.order, {*stopped, *state["stops"]["rule"]}))
    fresh_rule = skip.machine.rule.state_dict()
    fits = same and machine["rule"].keys() <= fresh_rule.keys()  # older states lack some
    skip.machine.load_state_dict({**machine, "rule": machine["rule"] if fits else fresh_rule})
    if fits:
        skip.signal.load_state_dict(state["signal"])
        if skip.settings.mode != "manual":  # changes nothing, unless the user trains other layers now
            skip.machine.rule.begin_after(skip.machine.decided_through)
    else:
        through = skip.machine.decided_through
        passed = {*stops.numbers, *numbering.order[: through + 1]}
        skip.machine.rule.begin_after(_passed(skip.plan, through, passed))
    if not same and state["rule"]["mode"] != "off":
        skip.advice.say("rule", saved=_words(state["rule"]), asked=_words(asked))
    skip.events[:] = [StopEvent(**event) for event in state["events"]]
    skip.learning_rates = list(state["decision_lrs"])


def _through(order: tuple[int, ...], stopped: set[int]) -> dict[str, int]:
    """Return the machine's positions in another order; braking in progress is cancelled."""
    through = -1
    while through + 1 < len(order) and order[through + 1] in stopped:
        through += 1
    return {"stopped_through": through, "braking_through": -1, "braking_count": 0}


def _passed(plan: LayerPlan, through: int, stopped: set[int]) -> int:
    """Return the position up to which a new rule has nothing to watch: those layers have stopped or are braking."""
    for unit in plan.units:
        if unit.end > through and not stopped.issuperset(unit.watched):
            break
        through = max(through, unit.end)
    return through


def _words(rule: dict[str, Any]) -> str:
    layers, iterations = rule["lists"]
    if rule["mode"] == "off":
        return "rule off"
    if rule["mode"] == "manual":
        return f"rule manual (layers {','.join(map(str, layers))} at {','.join(map(str, iterations))})"
    watched = f"layers {','.join(map(str, layers))}" if layers else f"CAC_WATCH={','.join(rule['watch'])}"
    return f"rule {rule['mode']} ({watched}{', whole units' if rule['whole_units'] else ''})"
