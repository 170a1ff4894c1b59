"""The stop rules as pure state machines: no torch, no clock, no environment.

A rule is asked once a step and may name one layer to stop. It sees weight variances or other signals only through a
function, so the same object runs inside an optimizer (which computes a variance) and over a recorded trace (which
looks it up). Layers are positions, see `layers`.

Symbols of the auto rule (published CAC library, `CAC_VAR_*`):
    v       unbiased variance of the current target's weight
    peak    largest v seen since the target became current
    count   how often v >= peak held (peak updates)
    ratio   v / peak
    T       START_THR for the first target; later MT_THR where count > MT_COUNT_THR (mountain), else SLOPE_THR (slope)
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainables.gradskip.settings import Settings

#: Gives a layer's signal (for the published rule its unbiased weight variance), by position, at the step in question.
SignalOf = Callable[[int], float]

#: An iteration that no run reaches.
NEVER = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A rule's word that a layer is to stop."""

    layer: int
    """Position of the parameter; it and every one before it stop."""
    rule: str
    """``start``, ``mountain``, ``slope``, ``manual``, or the rule's name."""
    ratio: float | None
    """What the threshold was compared with, such as variance over its peak; None where nothing is measured."""


class StopRule(Protocol):
    """What decides which layer stops when. One call a step, with ascending iterations."""

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        """The layer whose stop is decided at the start of this step, or None."""

    def next_due(self, iteration: int) -> int:
        """The first iteration from this one on at which `decide` may do anything; `NEVER` if none."""

    def first_stop(self) -> int:
        """The earliest iteration at which this rule, before its first step, can decide a stop; `NEVER` if none."""

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        """(position through which, factor on the learning rate) of layers that still train, ascending; mostly none."""

    def state_dict(self) -> dict[str, Any]:
        """The rule's whole state, in plain numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""


class OffRule:
    """Stops nothing."""

    def first_stop(self) -> int:
        return NEVER

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        return None

    def next_due(self, iteration: int) -> int:
        return NEVER

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ManualRule:
    """The k-th stop comes at the k-th iteration given (`CAC_STOP_LAYER_NUM`, `CAC_STOP_LAYER_ITR`).

    A stop that falls due while another layer brakes comes at the first step after the braking; with
    ``exact=True`` (published code) it is missed, and with it every later one.
    """

    def __init__(self, layers: Sequence[int], iterations: Sequence[int], *, exact: bool = False) -> None:
        self.layers = tuple(layers)
        self.iterations = tuple(iterations)
        self.exact = exact
        self.done = 0

    def first_stop(self) -> int:
        return self.iterations[0]

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if self.done == len(self.layers):
            return None
        due = self.iterations[self.done]
        if iteration != due if self.exact else iteration < due:
            return None
        self.done += 1
        return Decision(layer=self.layers[self.done - 1], rule="manual", ratio=None)

    def next_due(self, iteration: int) -> int:
        if self.done == len(self.layers):
            return NEVER
        due = self.iterations[self.done]
        if due < iteration:
            return NEVER if self.exact else iteration
        return due

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = int(state["done"])


def _to_single(value: float) -> float:
    """Round to float32, as the published code's tensor arithmetic does."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class AutoRule:
    """A target stops when its weight variance has fallen far enough below its peak; see the module's symbols.

    Targets are examined one after the other. On a stop, peak and count start anew with the next target at the same
    iteration: this sets its first peak (count 1), and it cannot stop there.

    Args:
        settings: thresholds and timing.
        targets: parameter indices to watch, ascending.
        single_precision: divide and compare in float32, as the published code does with float32 weights.
    """

    def __init__(self, settings: Settings, targets: Sequence[int], *, single_precision: bool = True) -> None:
        self.settings = settings
        self.targets = tuple(targets)
        self._round = _to_single if single_precision else float
        self._interval = settings.sampling_interval
        self.position = 0
        self.peak = 0.0
        self.peak_updates = 0

    def first_stop(self) -> int:
        # The first examination sets the peak.
        return self.next_due(0) + self._interval if self.targets else NEVER

    def due(self, iteration: int) -> bool:
        """Whether this iteration examines a target at all."""
        return (
            self.position < len(self.targets)
            and iteration >= self.settings.start_itr
            and iteration % self._interval == 0
        )

    def next_due(self, iteration: int) -> int:
        if self.position == len(self.targets):
            return NEVER
        first = max(iteration, self.settings.start_itr)
        return -(-first // self._interval) * self._interval

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if not self.due(iteration):
            return None
        target = self.targets[self.position]
        verdict = self._examine(signal_of(target))
        if verdict is None:
            return None
        rule, ratio = verdict
        self.position += 1
        self.peak, self.peak_updates = 0.0, 0
        if self.position < len(self.targets):
            self._examine(signal_of(self.targets[self.position]))
        return Decision(layer=target, rule=rule, ratio=ratio)

    def _examine(self, variance: float) -> tuple[str, float] | None:
        """Update peak and count; the rule that fires and the ratio, or None. A NaN never fires."""
        if variance >= self.peak:
            self.peak = variance
            self.peak_updates += 1
            return None
        # A NaN variance against a peak of zero is the one way to get here without a quotient.
        ratio = self._round(variance / self.peak) if self.peak else float("nan")
        rule, threshold = self._threshold()
        return (rule, ratio) if ratio < self._round(threshold) else None

    def _threshold(self) -> tuple[str, float]:
        if self.position == 0:
            return "start", self.settings.start_thr
        if self.peak_updates > self.settings.mt_count_thr:
            return "mountain", self.settings.mt_thr
        return "slope", self.settings.slope_thr

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "peak": self.peak, "peak_updates": self.peak_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])
        self.peak = float(state["peak"])
        self.peak_updates = int(state["peak_updates"])
