"""The published stop rules, manual and automatic, as pure state machines.

Symbols of the auto rule (published CAC library, `CAC_VAR_*`):
    v       unbiased variance of the current target's weight
    peak    largest v seen since the target became current
    count   how often v >= peak held (peak updates)
    ratio   v / peak
    T       START_THR for the first target; later MT_THR where count > MT_COUNT_THR (mountain), else SLOPE_THR (slope)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import NEVER, Decision, InOrder, Iterations, SignalOf, StopRule


class ManualRule(StopRule):
    """Manual rule: the k-th stop is due at the k-th given iteration (`CAC_STOP_LAYER_NUM`, `CAC_STOP_LAYER_ITR`).

    A stop that is due while another layer brakes is made at the first step after the braking; with ``exact=True``
    (published code) it is missed, and so is every later one.
    """

    def __init__(self, layers: Sequence[int], iterations: Sequence[int], *, exact: bool = False) -> None:
        self.layers = tuple(layers)
        self.iterations = tuple(iterations)
        self.exact = exact
        self.done = 0

    def first_stop(self) -> int:
        return self.iterations[0]

    def before_first_step(self) -> Decision | None:
        return self.decide(-1, lambda _: math.nan)

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if self.done == len(self.layers):
            return None
        due = self.iterations[self.done]
        if iteration != due if self.exact else iteration < due:
            return None
        self.done += 1
        return Decision(layer=self.layers[self.done - 1], rule="manual", ratio=None, index=self.done - 1)

    def next_due(self, iteration: int) -> int:
        if self.done == len(self.layers):
            return NEVER
        due = self.iterations[self.done]
        if due < iteration:
            return NEVER if self.exact else iteration
        return due

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = int(state["done"])


def next_examination(iteration: Iterations, interval: Iterations) -> Iterations:
    """Return the first multiple of the interval from an iteration on."""
    return -(-iteration // interval) * interval


def _to_single(value: float) -> float:
    """Round to float32, as the published code's tensor arithmetic does."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class AutoRule(InOrder):
    """Auto rule: a target stops when its weight variance is far enough below its peak; see the module's symbols.

    Targets are examined one after the other. On a stop, peak and count start anew with the next target at the same
    iteration: this sets the next target's first peak (count 1), so it cannot stop there. With ``single_precision`` it
    divides and compares in float32, as the published code does with float32 weights.
    """

    def __init__(self, settings: Any, targets: Sequence[int], *, single_precision: bool = True) -> None:
        super().__init__(targets)
        self.settings = settings
        self._round = _to_single if single_precision else float
        self._interval = settings.sampling_interval
        self.forget_target()

    def forget_target(self) -> None:
        self.peak, self.peak_updates = 0.0, 0

    def first_stop(self) -> int:
        # The first examination only sets the peak.
        return self.next_due(0) + self._interval if self.targets else NEVER

    def next_due(self, iteration: int) -> int:
        if self.position == len(self.targets):
            return NEVER
        return next_examination(max(iteration, self.settings.start_itr), self._interval)

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if self.next_due(iteration) != iteration:
            return None
        variance = signal_of(self.targets[self.position])
        if self._is_peak(variance):
            return None
        # Only a NaN variance with a peak of zero has no ratio here; a NaN never fires.
        ratio = self._round(variance / self.peak) if self.peak else float("nan")
        if self.position == 0:
            rule, threshold = "start", self.settings.start_thr
        elif self.peak_updates > self.settings.mt_count_thr:
            rule, threshold = "mountain", self.settings.mt_thr
        else:
            rule, threshold = "slope", self.settings.slope_thr
        if not ratio < self._round(threshold):
            return None
        target = self.stop_target()
        if self.position < len(self.targets):
            self._is_peak(signal_of(self.targets[self.position]))
        return Decision(layer=target, rule=rule, ratio=ratio)

    def _is_peak(self, variance: float) -> bool:
        if variance >= self.peak:
            self.peak = variance
            self.peak_updates += 1
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "peak": self.peak, "peak_updates": self.peak_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forget_target()
        if self.load_target(state):
            self.peak = float(state["peak"])
            self.peak_updates = int(state["peak_updates"])
