"""A dense run's recorded first part, extended to the whole run as earlier runs went on.

The weight variance of a layer is taken to change, from the end of the recorded part on, by the same factors as those
of earlier dense runs' layers of the nearest depth, at equal shares of the run: v(s) = v(s0) exp(mean of log v'(s) /
v'(s0)). Learning-rate schedule and weight decay, which drive it, are alike in runs that a prior comes from; what else
differs is in the error that leaving one out gives. Without such a layer the variance stays as it is.

Shapes: T steps of the full run, U steps that are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from analysis.trace_replay.traces import RunTrace
from tune_cac.tuning.outcomes.prior import Depths


def extended(trace: RunTrace, until: int, earlier: Sequence[RunTrace]) -> RunTrace:
    """Return the trace with a dense run of the full length as its only stage; what follows step ``until`` is predicted.

    Args:
        trace: recorded training.
        until: U, >= 1; what is recorded beyond is not read.
        earlier: complete dense runs; of them those of the same workload count, if there are any.
    """
    depths = Depths(trace)
    alike = [one for one in earlier if one.run.get("workload") == trace.run.get("workload")]
    others = [(one, Depths(one)) for one in alike or earlier]
    signals = {}
    for name in trace.variances:
        known = trace.dense.signal(name)[0][:until]
        shares = np.arange(until - 1, trace.total_steps) / trace.total_steps
        found = [_log_of_nearest(one, at, depths.of(_number(name)), shares) for one, at in others]
        logs = [log for log in found if log is not None]
        change = np.exp(np.mean([log - log[0] for log in logs], axis=0)) if logs else np.ones(len(shares))
        signals[name] = np.concatenate([known, known[-1] * change[1:]])
    return trace.of_signals(signals)


def _log_of_nearest(
    trace: RunTrace, depths: Depths, depth: float, shares: NDArray[np.float64]
) -> NDArray[np.float64] | None:
    """Return the logarithm of the variance of the layer that is nearest in depth, at shares of the run."""
    for name in sorted(trace.variances, key=lambda name: abs(depths.of(_number(name)) - depth)):
        values = trace.dense.signal(name)[0]
        if len(values) == trace.total_steps and np.isfinite(values).all() and (values > 0).all():
            return np.interp(shares, np.arange(len(values)) / len(values), np.log(values))
    return None


def _number(name: str) -> int:
    return int(name.partition(":")[2].split("+")[0])
