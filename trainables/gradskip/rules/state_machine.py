"""State machine of a rule with braking: one call per step returns the optimizer's work in it. Pure, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainables.gradskip.rules.braking import braking_factor
from trainables.gradskip.rules.stop_rule import Decision, SignalOf, StopRule
from trainables.gradskip.settings import Settings


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Work of one optimizer step in addition to its ordinary update."""

    decision: Decision | None = None
    """A stop decided at the start of this step."""
    scaled: tuple[tuple[range, float], ...] = ()
    """Positions whose update is multiplied in this step, with the factor: [0, 1) while braking."""
    stop_through: int | None = None
    """The parameters at positions 0..this need no gradient after this step's update."""


#: Plan of a step with nothing to do: a single object, so that an ordinary step allocates nothing.
ORDINARY = StepPlan()


class SkipMachine:
    """State machine that counts iterations, asks the rule, brakes and stops; decides no stop while a layer brakes."""

    def __init__(self, settings: Settings, rule: StopRule) -> None:
        self.rule = rule
        self.distance = settings.braking_distance
        self.iteration = 0
        """Steps begun so far; the next step has this number."""
        self.stopped_through = -1
        """Position of the last stopped parameter, -1 for none."""
        self.braking_through = -1
        """Position of the last braking parameter while a layer brakes, else -1."""
        self.braking_count = 0

    def step(self, signal_of: SignalOf) -> StepPlan:
        """Begin step number `iteration` and return its plan."""
        iteration = self.iteration
        self.iteration += 1
        decision = None
        if self.braking_through < 0:
            scaled = self._scaled_by_rule(iteration)
            decision = self.rule.decide(iteration, signal_of)
            if self.distance == 0 or decision is None:
                if decision is None:
                    return StepPlan(scaled=scaled) if scaled else ORDINARY
                self.stopped_through = max(self.stopped_through, decision.layer)
                return StepPlan(decision=decision, scaled=scaled, stop_through=self.stopped_through)
            self.braking_through = decision.layer
            self.braking_count = self.distance
        self.braking_count -= 1
        braking = range(self.stopped_through + 1, self.braking_through + 1)
        factor = braking_factor(self.braking_count, self.distance or 1)  # braking may have begun under other settings
        scaled = ((braking, factor),)
        if self.braking_count > 0:
            return StepPlan(decision=decision, scaled=scaled)
        self.stopped_through = max(self.stopped_through, self.braking_through)
        self.braking_through = -1
        return StepPlan(decision=decision, scaled=scaled, stop_through=self.stopped_through)

    def _scaled_by_rule(self, iteration: int) -> tuple[tuple[range, float], ...]:
        scaled = []
        begin = self.stopped_through + 1
        for through, factor in self.rule.factors(iteration):
            scaled.append((range(begin, through + 1), factor))
            begin = through + 1
        return tuple(scaled)

    def quiet_until(self) -> int:
        """Return the first step with anything to do; before it, `step` would return `ORDINARY` and only count."""
        return self.iteration if self.braking_through >= 0 else self.rule.next_due(self.iteration)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, in plain numbers."""
        return {
            "iteration": self.iteration,
            "stopped_through": self.stopped_through,
            "braking_through": self.braking_through,
            "braking_count": self.braking_count,
            "rule": self.rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.iteration = int(state["iteration"])
        self.stopped_through = int(state["stopped_through"])
        self.braking_through = int(state["braking_through"])
        self.braking_count = min(int(state["braking_count"]), self.distance or 1)
        self.rule.load_state_dict(state["rule"])

    @property
    def decided_through(self) -> int:
        """Return the position of the last parameter with a decided stop, braking parameters included; -1 for none."""
        return max(self.stopped_through, self.braking_through)
