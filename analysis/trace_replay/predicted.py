"""Results of the replay of n settings, and FLOPs that their stops save.

A stop decided at iteration t with braking distance d takes effect after the update of step t + max(d, 1) - 1, so the
steps from t + max(d, 1) on cost less.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.traces import RunTrace
from trainables.gradskip.replay import Blueprint


@dataclass(kw_only=True)
class Predicted:
    """Outcomes of n settings, filled while they are replayed."""

    stops: NDArray[np.int64]
    """(n,) stops decided."""
    stopped_through: NDArray[np.int64]
    """(n,) position of the last parameter stopped at the end, -1 for none."""
    first_stop: NDArray[np.int64]
    """(n,) iteration of the first decision, -1 for none."""
    events: NDArray[np.object_]
    """(n,) JSON of the stops of each setting, without the enclosing brackets."""
    spared: NDArray[Any]
    """(n,) FLOPs not executed."""
    spared_backward: NDArray[Any]
    """(n,) backward FLOPs not executed."""
    certain_until: NDArray[np.int64]
    """(n,) first iteration at which a value of another run was read; the run's length for none."""
    stage: NDArray[np.int64]
    """(n,) index of the deepest recorded stage on the setting's path."""
    own: NDArray[np.bool_]
    """(n,) whether the path ends in that stage."""
    unknown: NDArray[np.bool_]
    """(n,) whether a value was needed that no stage has recorded; the rest of the run is then not predicted."""

    @classmethod
    def nothing(cls, count: int, trace: RunTrace) -> Predicted:
        """Return the initial state of settings that have stopped nothing yet."""
        dtype = trace.costs_of(trace.trains).forward.dtype
        return cls(
            stops=np.zeros(count, np.int64),
            stopped_through=np.full(count, -1, np.int64),
            first_stop=np.full(count, -1, np.int64),
            events=np.full(count, "", object),
            spared=np.zeros(count, dtype),
            spared_backward=np.zeros(count, dtype),
            certain_until=np.full(count, trace.total_steps, np.int64),
            stage=np.zeros(count, np.int64),
            own=np.ones(count, bool),
            unknown=np.zeros(count, bool),
        )

    def put(self, rows: NDArray[np.int64], part: Predicted) -> None:
        """Take the outcomes of some of the settings from elsewhere."""
        for column in fields(self):
            getattr(self, column.name)[rows] = getattr(part, column.name)


def dense_costs(trace: RunTrace) -> tuple[int, int]:
    """Return the FLOPs of the run with nothing stopped, and those of its backward passes."""
    total, backward = trace.costs_of(trace.trains).before(trace.total_steps)
    return int(total), int(backward)


def trains_after(trace: RunTrace, blueprint: Blueprint, through: int) -> str:
    """Return which parameters train after all up to a position have stopped, in the form of `RunTrace.trains`.

    If no parameter is left, the last one stays in the graph so that the loss has a gradient, which is discarded. With
    ``CAC_PREFIX_AUTOGRAD=0``, running parameters before stopped ones stop, too; these depend on the model and are not
    removed here.
    """
    stopped = blueprint.stopped_numbers(through)
    flags = list(trace.trains)
    for number in stopped:
        flags[number] = "0"
    trained = [number for number in blueprint.plan.order[: through + 1] if trace.trains[number] == "1"]
    if "1" not in flags and trained:
        flags[trained[-1]] = "1"
    return "".join(flags)


def spared(trace: RunTrace, before: str, after: str, effective: NDArray[np.int64] | int) -> tuple[Any, Any]:
    """Return the FLOPs (all, backward) that a change of the training parameters saves, from a step to the end.

    Args:
        trace: recorded training, with the costs of both sets.
        before: the parameters that train, in the form of `RunTrace.trains`.
        after: the parameters that train from the step on.
        effective: first step (of each of m settings) that costs less, at most the run's length.
    """
    rest = []
    for trains in (before, after):
        costs = trace.costs_of(trains)
        whole, first = costs.before(trace.total_steps), costs.before(effective)
        rest.append((whole[0] - first[0], whole[1] - first[1]))
    return rest[0][0] - rest[1][0], rest[0][1] - rest[1][1]
