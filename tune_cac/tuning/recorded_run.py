"""Configurations of a run whose training was recorded. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainables.config import TrialConfig

if TYPE_CHECKING:
    from analysis.trace_replay.traces import RunTrace


def of_run(trace: RunTrace, values: Mapping[str, Any]) -> TrialConfig:
    """Return a configuration of the trace's run, on the CPU."""
    run = trace.run
    return TrialConfig(
        workload=run["workload"],
        workload_options=tuple(run.get("workload_options", ())),
        epochs=run["epochs"],
        seed=run["seed"],
        threads=run["threads"],
        **values,
    )
