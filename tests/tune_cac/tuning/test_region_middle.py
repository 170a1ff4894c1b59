"""The middle of an outcome's region, on a recorded run that was really trained, by trying every value."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import FixedTrial
from searchers import learning
from tiny_workload import tiny  # noqa: F401 - a fixture

from analysis.trace_replay.replay_frame import replay_one
from analysis.trace_replay.same_run import RESOLUTION
from analysis.trace_replay.traces import RunTrace
from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.baseline import WarmStart, completed
from tune_cac.tuning.outcomes import Outcome, at_middle, distinct_outcomes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny")]


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[WarmStart, list[Outcome]]:
    known = learning(tmp_path).learn()
    return known, distinct_outcomes(known, known.drawn(3, 300))[0]


def stops(trace: RunTrace, config: Any) -> list[tuple[int, int]]:
    """(iteration, layer) of each stop, replayed step by step."""
    events = json.loads(f"[{replay_one(trace, TrialConfig.from_mapping(config)).events[0]}]")
    return [(event["iteration"], event["layer"]) for event in events]


def ranges(known: WarmStart, one: Outcome) -> dict[str, Any]:
    """Optuna's distributions of a setting's parameters."""
    drawn = FixedTrial(dict(one.parameters))
    known.space.suggest(drawn, known.context)
    return drawn.distributions


def test_thresholds_as_optuna_steps_to_them_are_moved_as_those_that_a_space_has_rounded(
    recorded: tuple[WarmStart, list[Outcome]],
) -> None:
    """Optuna's third value from 0.9 in steps of 0.02 is 0.9400000000000001."""
    known, outcomes = recorded
    moved = 0
    for one in outcomes[:: max(1, len(outcomes) // 10)]:
        own = one.parameters["CAC_VAR_START_THR"]
        stepped = replace(one, parameters={**one.parameters, "CAC_VAR_START_THR": float(np.nextafter(own, 2.0))})
        middle = at_middle(one, known, known.trace)
        moved += middle.config["CAC_VAR_START_THR"] != own
        assert at_middle(stepped, known, known.trace).config == middle.config
    assert moved


def test_it_trains_alike_in_the_middle_of_the_values_of_the_space_that_do(
    recorded: tuple[WarmStart, list[Outcome]],
) -> None:
    known, outcomes = recorded
    moved = 0
    for one in outcomes:
        middle = at_middle(one, known, known.trace)
        moved += middle.parameters != one.parameters
        assert stops(known.trace, middle.config) == stops(known.trace, one.config)
        assert {name: middle.config[name] for name in middle.parameters} == middle.parameters
        for name, asked in ranges(known, one).items():
            assert asked.low <= middle.parameters[name] <= asked.high
            if isinstance(asked, IntDistribution):
                assert (middle.parameters[name] - asked.low) % asked.step == 0
    assert moved > len(outcomes) / 4


def test_variables_of_a_branch_are_moved_under_their_parameters_names(tmp_path: Path) -> None:
    known = learning(tmp_path, space="stop_rules").learn()
    drawn = [one for one in known.drawn(3, 300) if one[0]["CAC_RULE"] == "variance"]
    trace = completed(StageStore(tmp_path / "tree", known.trace.root), known.trace, [values for _, values in drawn])
    known = replace(known, trace=trace)
    moved = set()
    for one in distinct_outcomes(known, drawn)[0]:
        middle = at_middle(one, known, trace)
        changed = {name for name, value in middle.parameters.items() if value != one.parameters[name]}
        assert {name.removeprefix("variance."): middle.parameters[name] for name in changed} == {
            name: value for name, value in middle.config.items() if value != one.config[name]
        }
        assert stops(trace, middle.config) == list(one.stops)
        moved |= changed
    assert "variance.CAC_VAR_START_THR" in moved


def test_one_variable_alone_is_moved_to_the_middle_unless_all_its_values_are_alike(
    recorded: tuple[WarmStart, list[Outcome]],
) -> None:
    known, outcomes = recorded
    moved = left = 0
    names = ("CAC_VAR_START_THR", "CAC_VAR_START_ITR", "CAC_VAR_MT_COUNT_THR", "CAC_VAR_SLOPE_THR")
    for one, name in product(outcomes[:: max(1, len(outcomes) // 8)], names):
        asked, own = ranges(known, one)[name], one.parameters[name]
        alone = at_middle(
            replace(one, parameters={name: own}), replace(known, space=space_of(asked, name)), known.trace
        )
        if isinstance(asked, IntDistribution):
            grid = np.arange(asked.low, asked.high + 1, asked.step)
        else:
            grid = np.unique(np.append(np.linspace(asked.low, asked.high, 800), own))
        same = [stops(known.trace, {**one.config, name: value.item()}) == list(one.stops) for value in grid]
        if all(same):
            left += 1
            assert alone.config[name] == own
            continue
        place = int(np.flatnonzero(grid == own)[0])
        down, up = same[:place][::-1], same[place + 1 :]
        low, high = grid[place - run_of_true(down)], grid[place + run_of_true(up)]
        moved += alone.config[name] != own
        if isinstance(asked, IntDistribution):
            assert low <= alone.config[name] <= high
        else:  # to a sixteenth of the last step, which is at most as wide as what trains alike
            assert alone.config[name] == pytest.approx((low + high) / 2, abs=2 * RESOLUTION + (high - low) / 16)
    assert moved
    assert left


def space_of(asked: Any, name: str) -> Space:
    """A space of one variable."""

    def suggest(trial: Any, context: SpaceContext) -> dict[str, Any]:
        if isinstance(asked, IntDistribution):
            return {name: trial.suggest_int(name, asked.low, asked.high, step=asked.step)}
        return {name: trial.suggest_float(name, asked.low, asked.high)}

    return Space(name="own", method="gradskip", suggest=suggest, start=lambda context: {})


def run_of_true(values: list[bool]) -> int:
    """Count those that are true before the first that is not."""
    return next((place for place, value in enumerate(values) if not value), len(values))


def test_explicit_stops_have_no_middle(tmp_path: Path) -> None:
    known = learning(tmp_path, space="manual_layers").learn()
    drawn = known.drawn(3, 20)
    trace = completed(StageStore(tmp_path / "tree", known.trace.root), known.trace, [values for _, values in drawn])
    outcomes, _ = distinct_outcomes(replace(known, trace=trace), drawn)
    assert outcomes
    for one in outcomes:
        assert at_middle(one, known, trace) == one


def test_choices_of_the_user_stay_choices(recorded: tuple[WarmStart, list[Outcome]]) -> None:
    known, outcomes = recorded
    name = "CAC_VAR_START_THR"
    choices = sorted({one.parameters[name] for one in outcomes})
    space = Space(
        name="own", method="gradskip", start=lambda context: {},
        suggest=lambda trial, context: {name: trial.suggest_categorical(name, choices)},
    )  # fmt: skip
    for one in outcomes:
        alone = replace(one, parameters={name: one.parameters[name]})
        assert at_middle(alone, replace(known, space=space), known.trace) == alone
