"""What is read of a study's tree, and what is said when it is not there."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import ROOT, invented_blueprint, invented_trace, new_study

from analysis import load_trace
from analysis.trace_replay.traces import StepCosts, facts_key
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.interventions import Intervention
from trainables.stage_tree.store import Chunk, Stage, StageStore

BASE = TrialConfig(method="none", epochs=2)
VALUES = {
    "workload": "digits", "epochs": 2, "seed": 0, "threads": 1, "device": "cpu", "steps_per_epoch": 5,
    "total_steps": 10, "layer_names": ["a", "b"], "trains": "11",
}  # fmt: skip
STOP = Intervention(iteration=3, action='{"stop":[0]}')
STOP_LATER = Intervention(iteration=6, action='{"stop":[0,1]}')


def chunk(begin: int, end: int, *, level: float = 1.0, ends: bool = False) -> Chunk:
    values = level * np.arange(begin, end, dtype=np.float64).reshape(-1, 1)
    rows = {end: {"quality": 0.5 + level}} if ends else {}
    return Chunk(begin=begin, end=end, names=("variance:0",), values=values, rows=rows)


def a_tree(store: StageStore, *, dense_until: int = 10) -> tuple[Stage, Stage]:
    store.write("root.json", VALUES)
    store.write("facts-1.json", {"key": json.loads(facts_key(TrialConfig())), "facts": invented_blueprint(1).to_dict()})
    store.write("costs-1.json", {"trains": "11", "steps": [[4, 10, 20], [1, 3, 5]]})
    root = store.first()
    store.publish(root, chunk(0, 4), None)
    store.publish(root, chunk(4, dense_until, ends=True), None)
    child = store.child(root, STOP)
    store.publish(child, chunk(4, 8, level=2.0), (root, STOP))
    below = store.child(child, STOP_LATER)
    store.publish(below, chunk(7, 10, level=3.0, ends=True), (child, STOP_LATER))
    return child, below


def test_a_tree_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = new_study(tmp_path / "study", BASE)
    child, below = a_tree(store)
    trace = load_trace(tmp_path / "study")
    assert (trace.root, trace.total_steps, trace.steps_per_epoch, trace.trains) == (ROOT, 10, 5, "11")
    assert trace.layer_names == ("a", "b")
    assert [stage.id for stage in trace.stages] == [ROOT, child.id, below.id]
    assert [stage.parent for stage in trace.stages] == [None, 0, 1]
    assert [stage.known_until for stage in trace.stages] == [10, 8, 10]
    assert trace.dense.children == {3: {STOP.action: 1}}
    assert trace.stages[1].children == {6: {STOP_LATER.action: 2}}
    assert [stage.result(10) for stage in trace.stages] == [{"quality": 1.5}, None, {"quality": 3.5}]
    values, there = trace.stages[2].signal("variance:0")
    assert list(values) == [21.0, 24.0, 27.0]
    assert there.all()
    assert not trace.dense.signal("variance:9")[1].any()
    assert trace.blueprint(TrialConfig()) == invented_blueprint(1)
    # One epoch of 4 steps and a smaller one, then two steps more.
    assert trace.costs["11"].before(7) == (4 * 30 + 8 + 2 * 30, 4 * 20 + 5 + 2 * 20)
    alone = trace.dense_only()
    assert (len(alone.stages), alone.dense.children, alone.costs) == (1, {}, trace.costs)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no study in"):
        load_trace(tmp_path)
    store = new_study(tmp_path / "study", BASE)
    with pytest.raises(UserError, match=r"has no recorded training \(tree/\): .* --name study \(without --no-sharing"):
        load_trace(tmp_path / "study")
    a_tree(store, dense_until=7)
    with pytest.raises(UserError, match=re.escape("is recorded for 7 of 10 steps in")):
        load_trace(tmp_path / "study")


def test_a_gap_in_the_recording_is_not_a_nan_in_it() -> None:
    trace = invented_trace(random.Random(0), layers=1, total_steps=10, steps_per_epoch=5)
    stage = trace.dense.recorded
    values = np.array([[1.0], [np.nan], [2.0]])
    stage.add(Chunk(begin=0, end=3, names=("variance:7",), values=values))
    found, there = trace.dense.signal("variance:7")
    assert list(there) == [True] * 3 + [False] * 7
    assert list(np.isnan(found)) == [False, True, False] + [True] * 7


@given(
    runs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=4),
    large=st.sampled_from([1, 10**25]),
    steps=st.integers(0, 40),
)
def test_costs_are_summed_over_whole_and_broken_epochs(
    runs: list[tuple[int, int, int]], large: int, steps: int
) -> None:
    costs = StepCosts.of_epoch([(count, forward * large, backward * large) for count, forward, backward in runs], 40)
    epoch = [(forward, backward) for count, forward, backward in runs for _ in range(count)]
    done = [epoch[step % len(epoch)] for step in range(steps)]
    expected = (large * sum(f + b for f, b in done), large * sum(b for _, b in done))
    assert tuple(int(value) for value in costs.before(steps)) == expected
    many = costs.before(np.array([steps, 0]))
    assert [int(value) for value in many[0]] == [expected[0], 0]


def test_facts_of_other_methods_are_passed_over(tmp_path: Path) -> None:
    store = new_study(tmp_path / "study", BASE)
    a_tree(store)
    store.write("facts-2.json", {"key": ["compression"], "facts": {"steps_per_epoch": 5}})
    trace = load_trace(tmp_path / "study")
    assert list(trace.facts) == [facts_key(TrialConfig())]
