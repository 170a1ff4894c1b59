"""Stop rule ``plasticity``: the front layer stops when its representation has become stationary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import NEVER, Decision, MeasuredRule, SignalOf


class PlasticityRule(MeasuredRule):
    """Rule that stops the front layer when its plasticity has become stationary.

    Plasticity is how far the layer's representation of a batch has moved from that of a lagged copy of the model
    (`signals.PlasticitySignal`). It is averaged over a window W; the front layer stops when the slope of a
    least-squares line through the last W averages is, in absolute value, below a tolerance times the steepest slope of
    this layer so far.

    Source: Wang et al., "Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing", EuroSys 2023, section 4.
    In the paper the reference is quantised and runs on the CPU; here it is a copy one interval old.
    """

    name = "plasticity"
    decides_by = "change of representations"
    reads = ("rule_start_itr", "rule_interval", "rule_tolerance", "rule_window")
    searched = (("rule_tolerance", 0.02, 0.8, "log"), ("rule_window", 2, 8))

    def __init__(self, settings: Any, targets: Sequence[int], stoppable: int) -> None:
        super().__init__(settings, targets, stoppable)
        self.tolerance = settings.rule_tolerance
        self.window = settings.rule_window
        self.has_reference = False
        self.forget_target()

    def forget_target(self) -> None:
        self.values: list[float] = []
        self.averages: list[float] = []
        self.steepest = 0.0

    def first_stop(self) -> int:
        # One measurement for the reference, a window for the first slope, one more for a slope below the steepest.
        return self.start + (self.window + 1) * self.interval if self.targets else NEVER

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if self.next_due(iteration) != iteration:
            return None
        value = signal_of(self.targets[self.position])
        if not self.has_reference:  # the first measurement only creates the copy to compare with
            self.has_reference = True
            return None
        if not math.isfinite(value):
            return None
        self.values = [*self.values, value][-self.window :]
        self.averages = [*self.averages, sum(self.values) / len(self.values)][-self.window :]
        if len(self.averages) < self.window:
            return None
        steepness = abs(slope(self.averages))
        self.steepest = max(self.steepest, steepness)
        if steepness >= self.tolerance * self.steepest:
            return None
        ratio = steepness / self.steepest
        return Decision(layer=self.stop_target(), rule=self.name, ratio=ratio)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "has_reference": self.has_reference,
            "values": list(self.values),
            "averages": list(self.averages),
            "steepest": self.steepest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget_target()
        self.has_reference = bool(state["has_reference"])
        if self.load_target(state):
            self.values = [float(v) for v in state["values"]]
            self.averages = [float(v) for v in state["averages"]]
            self.steepest = float(state["steepest"])


def slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through ``values`` at 0, 1, 2, ...; at least two values.

    >>> slope([1.0, 3.0, 5.0])
    2.0
    """
    count = len(values)
    middle = (count - 1) / 2
    return sum((x - middle) * y for x, y in enumerate(values)) / sum((x - middle) ** 2 for x in range(count))
