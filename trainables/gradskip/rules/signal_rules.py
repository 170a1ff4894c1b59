"""Stop rules that use a measured signal other than weight variance: gradients and representations.

Symbols: T number of a measurement; g_T(l) the signal of layer l at it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import NEVER, Decision, InOrder, SignalOf
from trainables.gradskip.settings import Settings


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


class _Timed(InOrder):
    """Base of rules that measure at ``start`` and every ``interval`` iterations after it, while targets are left."""

    def __init__(self, settings: Settings, targets: Sequence[int]) -> None:
        super().__init__(targets)
        self.start = settings.rule_start_itr
        self.interval = settings.rule_interval

    def next_due(self, iteration: int) -> int:
        if self.position == len(self.targets):
            return NEVER
        missed = max(0, iteration - self.start)
        return self.start + -(-missed // self.interval) * self.interval


class GradientNormRule(_Timed):
    """Rule that stops the front layers whose accumulated gradients change least from one interval to the next.

    g_T(l) is the norm of the sum of layer l's gradients over interval T; its change is
    |g_{T-1}(l) - g_T(l)| / g_{T-1}(l). Layers stop from the front as long as each one's change is at or below the given
    percentile of the changes of all layers that still train.

    Source: Liu, Agarwal, Venkataraman, "AutoFreeze: Automatically Freezing Model Blocks to Accelerate Fine-tuning",
    2021, section 4 (gradient norm test; the paper's percentile is the median).

    Args:
        settings: timing and percentile.
        targets: positions of the layers that may stop.
        compared: positions of layers that never stop but count in the percentile.
    """

    def __init__(self, settings: Settings, targets: Sequence[int], compared: Sequence[int] = ()) -> None:
        super().__init__(settings, targets)
        self.percent = settings.rule_percentile
        self.compared = tuple(compared)
        self.before: dict[int, float] = {}

    def unmoved(self, before: float, now: float) -> bool:
        return before == now == 0  # no gradient

    def first_stop(self) -> int:
        return self.start + self.interval if self.targets else NEVER  # a change needs two measurements

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if self.next_due(iteration) != iteration:
            return None
        layers = (*self.passed, *self.targets[self.position :], *self.compared)
        norms = {layer: signal_of(layer) for layer in layers}
        self.moving_signal(iteration, norms.__getitem__)
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
            found = Decision(layer=layer, rule="gradient_norm", ratio=changes[layer])
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**self.target_state(), "before": dict(self.before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_target(state)
        self.before = {int(layer): float(norm) for layer, norm in state["before"].items()}


class PlasticityRule(_Timed):
    """Rule that stops the front layer when its plasticity has become stationary.

    Plasticity is how far the layer's representation of a batch has moved from that of a lagged copy of the model
    (`signals.PlasticitySignal`). It is averaged over a window W; the front layer stops when the slope of a
    least-squares line through the last W averages is, in absolute value, below a tolerance times the steepest slope of
    this layer so far.

    Source: Wang et al., "Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing", EuroSys 2023, section 4.
    In the paper the reference is quantised and runs on the CPU; here it is a copy one interval old.
    """

    def __init__(self, settings: Settings, targets: Sequence[int]) -> None:
        super().__init__(settings, targets)
        self.tolerance = settings.rule_tolerance
        self.window = settings.rule_window
        self.has_reference = False
        self.forget_target()

    def unmoved(self, before: float, now: float) -> bool:
        return before == now == 0  # its representation is that of an interval before

    def forget_target(self) -> None:
        super().forget_target()
        self.values: list[float] = []
        self.averages: list[float] = []
        self.steepest = 0.0

    def first_stop(self) -> int:
        # One measurement for the reference, a window for the first slope, one more for a slope below the steepest.
        return self.start + (self.window + 1) * self.interval if self.targets else NEVER

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if self.next_due(iteration) != iteration:
            return None
        value = self.moving_signal(iteration, signal_of)
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
        return Decision(layer=self.stop_target(), rule="plasticity", ratio=ratio)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.target_state(),
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
