"""The signals along one trial's path through the stage tree, as a run of its own on which stops are replayed.

Beside another method, such as pruning, weights change as in no run without it. So stops are predicted on the path of a
trial that had its setting: exactly up to that trial's own first stop. What a layer's variance would have done after the
layer was stopped there is taken from the dense run, relative to its value then.

Shapes: T steps of the run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.traces import RunTrace, TraceStage
from trainables.stage_tree.store import Chunk, Stage


def along(trace: RunTrace, end: str) -> RunTrace | None:
    """Return the trace with a path's signals as its only stage; None if the path is not recorded.

    Args:
        trace: all recorded runs.
        end: id of the path's last stage.
    """
    place = next((number for number, stage in enumerate(trace.stages) if stage.id == end), None)
    path: list[TraceStage] = []
    while place is not None:
        path.append(trace.stages[place])
        place = trace.stages[place].parent
    if not path or path[0].known_until < trace.total_steps:
        return None
    names = [name for name in trace.dense.recorded.names if name.startswith("variance:")]
    columns = [_signal(path[::-1], trace, name) for name in names]
    stage = Stage(None, "", trace.root, 0)
    values = np.array(columns).T.reshape(trace.total_steps, len(names))
    stage.add(Chunk(begin=0, end=trace.total_steps, names=tuple(names), values=values))
    return replace(trace, stages=(TraceStage(recorded=stage, parent=None, intervention=None),))


def _signal(path: list[TraceStage], trace: RunTrace, name: str) -> NDArray[np.float64]:
    """Return (T,) the values of a signal along a path, from its first stage on."""
    found = np.full(trace.total_steps, np.nan)
    for stage in path:  # a later stage replaces what its parent recorded after the intervention
        found[stage.start :] = np.nan
        values, _ = stage.signal(name)
        found[stage.start : stage.start + len(values)] = values[: trace.total_steps - stage.start]
    dense = trace.dense.signal(name)[0]
    missing = np.flatnonzero(np.isnan(found))
    if len(missing) and missing[0] > 0 and len(dense) == trace.total_steps:
        last = missing[0] - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            found[missing] = found[last] * dense[missing] / dense[last]
    return found
