"""Watched layers, the parameters that stop with them, and the machine built from them. Pure, without torch.

A `Blueprint` contains all that a rule needs of a model: with it any settings can be replayed over a recorded run
without building the model again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainables.gradskip.rules.choice import make_rule
from trainables.gradskip.rules.state_machine import SkipMachine
from trainables.gradskip.rules.stop_rule import Decision
from trainables.gradskip.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A watched layer and the position at which its stop ends."""

    number: int
    """The layer's number: that of its (first) watched parameter."""
    watched: tuple[int, ...]
    """Numbers of the weights that the rule measures: one, or a block's weights together."""
    end: int
    """Position of the last parameter that stops with it; everything before stops too."""


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """The watched layers, and the order in which parameters stop."""

    order: tuple[int, ...]
    """Position to number; a permutation of 0..P-1."""
    units: tuple[Unit, ...]
    """Watched layers by ascending `Unit.end`."""
    whole_units: bool = False
    """True if a manual stop includes the whole unit of its layer."""
    ends: tuple[int, ...] = ()
    """Positions at which whole units end, ascending, those of layers that the user has frozen included."""

    def position_of_stop(self, number: int) -> int:
        """Return the last position that a manual stop of this number includes."""
        position = self.order.index(number)
        if not self.whole_units or not self.ends:  # without ends no layer is watched, so no units are known
            return position
        return next((end for end in self.ends if end >= position), len(self.order) - 1)

    def without_last(self, trains: Callable[[int], bool]) -> tuple[Unit, ...]:
        """Return the units that a rule may stop: those that leave a parameter for which ``trains(number)`` holds."""
        last = max((position for position, number in enumerate(self.order) if trains(number)), default=-1)
        return tuple(unit for unit in self.units if unit.end < last)


@dataclass(frozen=True, kw_only=True)
class StopEvent:
    """One stop decision."""

    iteration: int
    """Optimizer steps before the one that decided, from 0."""
    layer: int
    """The layer's number; it and everything before it stop."""
    name: str | None
    """The parameter's name, where a model or named parameters were given."""
    ratio: float | None
    """Number compared with the threshold, such as weight variance over its peak; None where nothing is measured."""
    rule: str
    """``start``, ``mountain``, ``slope``, ``manual``, or the name of another rule."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Everything that a rule needs to know of a model."""

    plan: LayerPlan
    """Its layers."""
    stoppable: int
    """The number of the plan's units, from the front, that a rule may stop."""
    names: tuple[str, ...] | None
    """Names of the parameters by number, where known."""
    single_precision: bool
    """True if ratios are compared in float32, as the published code does with float32 weights."""

    def machine(self, settings: Settings) -> SkipMachine:
        """Return a machine in its initial state."""
        manual = None
        if settings.mode == "manual" and settings.stop_layer_num is not None:
            manual = [self.plan.position_of_stop(number) for number in settings.stop_layer_num]
        rule = make_rule(
            settings,
            [unit.end for unit in self.plan.units],
            stoppable=self.stoppable,
            manual=manual,
            single_precision=self.single_precision,
        )
        return SkipMachine(settings, rule)

    def event(self, iteration: int, decision: Decision, settings: Settings) -> StopEvent:
        """Return the event of a decision."""
        if decision.rule == "manual":
            assert settings.stop_layer_num is not None
            number = settings.stop_layer_num[decision.index]
        else:
            number = next(unit.number for unit in self.plan.units if unit.end == decision.layer)
        return StopEvent(
            iteration=iteration,
            layer=number,
            name=None if self.names is None else self.names[number],
            ratio=decision.ratio,
            rule=decision.rule,
        )

    def stopped_numbers(self, through: int) -> tuple[int, ...]:
        """Return the numbers of the parameters up to a position, ascending."""
        return tuple(sorted(self.plan.order[: through + 1]))

    def order_digest(self) -> str:
        """Return a digest of the stop order; empty where parameters stop in numbering order."""
        order = self.plan.order
        if order == tuple(range(len(order))):
            return ""
        return hashlib.sha256(repr(order).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Return the blueprint in plain types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Blueprint:
        """Build the blueprint from the result of `to_dict`, also after a conversion to JSON and back."""
        plan = values["plan"]
        return cls(
            plan=LayerPlan(
                order=tuple(plan["order"]),
                units=tuple(Unit(number=u["number"], watched=tuple(u["watched"]), end=u["end"]) for u in plan["units"]),
                whole_units=plan["whole_units"],
                ends=tuple(plan["ends"]),
            ),
            stoppable=values["stoppable"],
            names=None if values["names"] is None else tuple(values["names"]),
            single_precision=values["single_precision"],
        )
