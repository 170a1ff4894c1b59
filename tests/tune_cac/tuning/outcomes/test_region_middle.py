"""The middle of an outcome's region, on a recorded run that was really trained, by trying every value."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from searchers import learning
from tiny_workload import tiny  # noqa: F401 - a fixture

from analysis.trace_replay.same_run import RESOLUTION
from analysis.trace_replay.step_by_step import replay_one
from analysis.trace_replay.traces import RunTrace
from trainables.config import TrialConfig
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.outcomes.distinct_outcomes import Outcome, distinct_outcomes
from tune_cac.tuning.outcomes.region_middle import at_middle
from tune_cac.tuning.warm_start.baseline import completed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny")]


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[RunTrace, list[Outcome]]:
    known = learning(tmp_path).learn()
    return known.trace, distinct_outcomes(known, known.drawn(3, 300))[0]


def stops(trace: RunTrace, config: Any) -> list[tuple[int, int]]:
    """(iteration, layer) of each stop, replayed step by step."""
    events = json.loads(f"[{replay_one(trace, TrialConfig.from_mapping(config)).events[0]}]")
    return [(event["iteration"], event["layer"]) for event in events]


def test_it_trains_alike_and_lies_in_the_middle(recorded: tuple[RunTrace, list[Outcome]]) -> None:
    trace, outcomes = recorded
    moved = 0
    for one in outcomes:
        middle = at_middle(one, trace)
        moved += middle.parameters != one.parameters
        assert stops(trace, middle.config) == stops(trace, one.config)
        assert {name: middle.config[name] for name in middle.parameters} == middle.parameters
        # The variable that is moved last: no later one has changed its range.
        values = range(1, trace.total_steps + 1)
        same = [stops(trace, {**middle.config, "CAC_VAR_SAMPLES": value}) == list(one.stops) for value in values]
        own = middle.config["CAC_VAR_SAMPLES"]
        low = own - next(k for k in range(own + 1) if own - k == 0 or not same[own - k - 1]) + 1
        high = own + next(k for k in range(len(same) + 1) if own + k > len(same) or not same[own + k - 1]) - 1
        assert own == pytest.approx((low + high) / 2, abs=0.5)
    assert moved > len(outcomes) / 2


def test_a_threshold_alone_is_moved_to_the_middle_of_its_values(recorded: tuple[RunTrace, list[Outcome]]) -> None:
    trace, outcomes = recorded
    name = "CAC_VAR_START_THR"
    grid = np.linspace(RESOLUTION, 1, 4000)
    tried = 0
    for one in outcomes[:: max(1, len(outcomes) // 5)]:
        middle = at_middle(Outcome(**{**vars(one), "parameters": {name: one.parameters[name]}}), trace)
        same = [value for value in grid if stops(trace, {**one.config, name: value}) == list(one.stops)]
        runs = np.split(same, np.flatnonzero(np.diff(same) > RESOLUTION) + 1)  # of neighbours
        around = next(
            (run for run in runs if len(run) and run[0] - 1e-9 <= one.parameters[name] <= run[-1] + 1e-9), None
        )
        if around is None or len(around) < 4:
            continue
        tried += 1
        assert middle.parameters[name] == pytest.approx((around[0] + around[-1]) / 2, abs=RESOLUTION)
        assert middle.config == {**one.config, name: middle.parameters[name]}
    assert tried


def test_explicit_stops_and_other_rules_have_no_middle(tmp_path: Path) -> None:
    known = learning(tmp_path, space="manual_layers").learn()
    drawn = known.drawn(3, 20)
    trace = completed(StageStore(tmp_path / "tree", known.trace.root), known.trace, [values for _, values in drawn])
    outcomes, _ = distinct_outcomes(replace(known, trace=trace), drawn)
    assert outcomes
    for one in outcomes:
        assert at_middle(one, trace) == one
