"""Features by which the model of the quality knows a run: savings, length, how long each part of the network trained.

A stop is told by its share of the full run and by its depth, the share of the backward pass's FLOPs that it spares.

Shapes: k layers of the run, ascending by depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.predicted import trains_after
from analysis.trace_replay.traces import RunTrace
from trainables.errors import UserError
from trainables.savings import share_saved


class Depths:
    """Share of a model's backward FLOPs that stops through its layers spare.

    Args:
        trace: recorded training of the model, with the costs of its units' stops.
    """

    def __init__(self, trace: RunTrace) -> None:
        _, whole = trace.costs_of(trace.trains).before(trace.steps_per_epoch)
        found: dict[int, float] = {}
        for blueprint in trace.facts.values():
            for unit in blueprint.plan.units[: blueprint.stoppable]:
                try:
                    left = trace.costs_of(trains_after(trace, blueprint, unit.end)).before(trace.steps_per_epoch)[1]
                except UserError:  # a plan whose settings were never drawn
                    continue
                # An event of auto mode names the layer's weight, one of manual mode the last parameter.
                found[unit.number] = found[blueprint.plan.order[unit.end]] = float(share_saved(left, whole))
        self._known = found
        self._plans = [blueprint.plan for blueprint in trace.facts.values()]

    @property
    def levels(self) -> list[float]:
        """Return the depths of its layers, ascending."""
        return sorted(set(self._known.values()))

    def of(self, number: int) -> float:
        """Return the depth of a stop through a parameter; that of the last layer that stops with it if it is none."""
        if number in self._known:
            return self._known[number]
        plan = next((plan for plan in self._plans if number in plan.order), None)
        stopped = () if plan is None else plan.order[: plan.position_of_stop(number) + 1]
        return max((self._known[one] for one in stopped if one in self._known), default=0.0)

    def of_stops(self, stops: Iterable[tuple[int, int]], total_steps: int) -> tuple[tuple[float, float], ...]:
        """Return (share of the full run, depth) of each stop.

        Args:
            stops: (iteration, parameter) of each.
            total_steps: of the full run.
        """
        return tuple((when / total_steps, self.of(number)) for when, number in stops)


def shares_at(stops: Iterable[tuple[float, float]], depths: Sequence[float], *, end: float) -> NDArray[np.float64]:
    """Return (k,) shares of the full run that layers trained, each a mean over the depths that the layer takes up.

    >>> shares_at([(0.1, 0.3), (0.5, 0.6)], [0.2, 0.4, 0.8], end=1.0).round(9).tolist()
    [0.1, 0.3, 0.75]

    Args:
        stops: (share of the full run, depth) of each stop.
        depths: at which the layers end, ascending.
        end: share of the full run at which the run ends.
    """
    stops = list(stops)

    def trained(depth: float) -> float:
        return min((when for when, through in stops if through >= depth - 1e-9), default=end)

    found = []
    for low, high in pairwise([0.0, *depths]):
        if high - low < 1e-9:
            found.append(trained(high))
            continue
        cuts = sorted({low, high, *(through for _, through in stops if low < through < high)})
        found.append(sum((b - a) * trained(b) for a, b in pairwise(cuts)) / (high - low))
    return np.array(found)


def features_of(
    stops: Iterable[tuple[float, float]], depths: Sequence[float], *, end: float, saved: float
) -> NDArray[np.float64]:
    """Return (k + 2,) features by which `quality_model` knows a run.

    Args:
        stops: (share of the full run, depth) of each stop.
        depths: at which the layers end, ascending.
        end: share of the full run at which the run ends.
        saved: compute saved, a fraction of that of the full run.
    """
    return np.array([saved, end, *shares_at(stops, depths, end=end)])
