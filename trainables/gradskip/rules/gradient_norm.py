"""Stop rule ``gradient_norm``: front layers stop whose gradients change least.

Symbols: T number of a measurement; g_T(l) the signal of layer l at it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import NEVER, Decision, MeasuredRule, SignalOf


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile with linear interpolation between order statistics; ``values`` must not be empty.

    >>> percentile([3.0, 1.0, 2.0], 50)
    2.0
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class GradientNormRule(MeasuredRule):
    """Rule that stops the front layers whose accumulated gradients change least from one interval to the next.

    g_T(l) is the norm of the sum of layer l's gradients over interval T; its change is
    |g_{T-1}(l) - g_T(l)| / g_{T-1}(l). Layers stop from the front as long as each one's change is at or below the given
    percentile of the changes of all layers that still train.

    Source: Liu, Agarwal, Venkataraman, "AutoFreeze: Automatically Freezing Model Blocks to Accelerate Fine-tuning",
    2021, section 4 (gradient norm test; the paper's percentile is the median).
    """

    name = "gradient_norm"
    decides_by = "change of gradient norms"
    reads = ("rule_start_itr", "rule_interval", "rule_percentile")
    searched = (("rule_percentile", 10.0, 90.0),)

    def __init__(self, settings: Any, targets: Sequence[int], stoppable: int) -> None:
        super().__init__(settings, targets, stoppable)
        self.percent = settings.rule_percentile
        self.compared = tuple(targets[stoppable:])  # never stop, but count in the percentile
        self.before: dict[int, float] = {}

    def first_stop(self) -> int:
        return self.start + self.interval if self.targets else NEVER  # a change needs two measurements

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if self.next_due(iteration) != iteration:
            return None
        norms = {layer: signal_of(layer) for layer in (*self.targets[self.position :], *self.compared)}
        before, self.before = self.before, norms
        changes = {
            layer: abs(before[layer] - norm) / before[layer] if before[layer] else math.nan
            for layer, norm in norms.items()
            if layer in before
        }
        finite = [change for change in changes.values() if math.isfinite(change)]
        if not finite:
            return None
        limit = percentile(finite, self.percent)
        found = None
        # A layer that was not measured before, because the user has just unfrozen it, has no change yet.
        while self.position < len(self.targets) and changes.get(self.targets[self.position], math.nan) <= limit:
            layer = self.stop_target()
            found = Decision(layer=layer, rule=self.name, ratio=changes[layer])
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "before": dict(self.before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_target(state)
        self.before = {int(layer): float(norm) for layer, norm in state["before"].items()}
