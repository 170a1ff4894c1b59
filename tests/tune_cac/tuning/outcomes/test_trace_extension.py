"""A dense run's first part, extended by the factors of earlier runs, against variances with a closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from recorded_runs import invented_blueprint, invented_costs

from analysis.trace_replay.predicted import trains_after
from analysis.trace_replay.traces import RunTrace, TraceStage
from trainables.stage_tree.store import Chunk, Stage
from tune_cac.tuning.outcomes.trace_extension import extended


def trace(layers: int, steps: int, *, begin: list[float], rates: list[float], until: int | None = None) -> RunTrace:
    """A dense run whose variances are b exp(-r s) at share s of the run, recorded until a step."""
    until, blueprint = until or steps, invented_blueprint(layers)
    shares = np.arange(until)[:, None] / steps
    stage = Stage(None, "", "root", 0)
    names = tuple(f"variance:{3 * layer}" for layer in range(layers))
    values = np.array(begin) * np.exp(-np.array(rates) * shares)
    stage.add(Chunk(begin=0, end=until, names=names, values=values))
    masks = ["1" * (3 * layers + 2)]
    made = RunTrace(
        root="root", run={}, total_steps=steps, steps_per_epoch=10, layer_names=tuple(blueprint.names or ()),
        trains=masks[0], stages=(TraceStage(recorded=stage, parent=None, intervention=None),), facts={"f": blueprint},
    )  # fmt: skip
    masks += [trains_after(made, blueprint, unit.end) for unit in blueprint.plan.units]
    return RunTrace(**{**vars(made), "costs": {mask: invented_costs(mask, 10, steps) for mask in masks}})


def test_it_goes_on_by_the_factors_of_the_nearest_layer_in_depth() -> None:
    """Of another length and scale, and of as many layers, so that each has its own."""
    partial = trace(2, 100, begin=[3.0, 5.0], rates=[1.0, 2.0], until=25)
    other = trace(2, 60, begin=[0.1, 0.2], rates=[1.0, 2.0])
    found = extended(partial, 25, [other])
    assert found.dense.known_until == 100
    whole = trace(2, 100, begin=[3.0, 5.0], rates=[1.0, 2.0])
    for name in ("variance:0", "variance:3"):
        values, truth = (one.dense.signal(name)[0] for one in (found, whole))
        np.testing.assert_array_equal(values[:25], truth[:25])
        np.testing.assert_allclose(values[25:97], truth[25:97], rtol=1e-9)  # the other run ends at share 59/60


def test_of_several_runs_the_mean_of_the_logarithms_counts_and_what_is_beyond_is_not_read() -> None:
    whole = trace(1, 100, begin=[3.0], rates=[9.0])
    others = [trace(1, 100, begin=[1.0], rates=[rate]) for rate in (1.0, 3.0)]
    values = extended(whole, 30, others).dense.signal("variance:0")[0]
    assert values[29] == whole.dense.signal("variance:0")[0][29]
    assert values[79] == pytest.approx(values[29] * np.exp(-2.0 * 0.5))


def test_without_another_run_the_variance_stays() -> None:
    values = extended(trace(1, 40, begin=[3.0], rates=[2.0], until=10), 10, []).dense.signal("variance:0")[0]
    assert set(values[10:].tolist()) == {values[9]}


def test_runs_of_the_same_workload_count_if_there_are_any() -> None:
    own = replace(trace(1, 100, begin=[3.0], rates=[9.0], until=30), run={"workload": "a"})
    a, b = (trace(1, 100, begin=[1.0], rates=[rate]) for rate in (1.0, 3.0))
    others = [replace(a, run={"workload": "a"}), replace(b, run={"workload": "b"})]
    for count, rate in ((2, 1.0), (1, 3.0)):
        values = extended(own, 30, others[-count:]).dense.signal("variance:0")[0]
        assert values[79] == pytest.approx(values[29] * np.exp(-rate * 0.5))
