"""The signals along one trial's path through the stage tree, as a run of its own on which stops are replayed.

Beside another method, such as pruning, weights change as in no run without it. So stops are predicted on the path of a
trial that had its setting: exactly up to that trial's own first stop. What a layer's variance would have done after the
layer was stopped there is taken from the dense run, relative to its value then.

Shapes: T steps of the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.traces import RunTrace
from trainables.stage_tree.store import Stage, StageStore


def along(trace: RunTrace, store: StageStore, end: str) -> RunTrace | None:
    """Return the trace with a path's signals as its only stage; None if the path is not recorded.

    Only the path's own stages are read: those of a long study need not fit into memory.

    Args:
        trace: with the dense run.
        store: of its root.
        end: id of the path's last stage.
    """
    links, path = store.links(), []
    stage: str | None = end
    while stage is not None:
        if stage not in links:
            return None
        link = links[stage]
        path.append(store.stage(stage, 0 if link is None else link[1].iteration + 1))
        path[-1].refresh()
        stage = None if link is None else link[0]
    if path[0].known_until < trace.total_steps:
        return None
    return trace.of_signals({name: _signal(path[::-1], trace, name) for name in trace.variances})


def _signal(path: Sequence[Stage], trace: RunTrace, name: str) -> NDArray[np.float64]:
    """Return (T,) the values of a signal along a path, from its first stage on."""
    found = np.full(trace.total_steps, np.nan)
    for stage in path:  # a later stage replaces what its parent recorded after the intervention
        found[stage.start :] = np.nan
        values = stage.dense(name)[: trace.total_steps - stage.start]
        found[stage.start : stage.start + len(values)] = values
    dense = trace.dense.signal(name)[0]
    missing = np.flatnonzero(np.isnan(found))
    if len(missing) and missing[0] > 0 and len(dense) == trace.total_steps:
        last = missing[0] - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            found[missing] = found[last] * dense[missing] / dense[last]
    return found
