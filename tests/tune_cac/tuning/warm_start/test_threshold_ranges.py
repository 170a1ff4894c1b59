"""What a search learns from its baseline, against trying every threshold and start on the same run."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import invented_blueprint, invented_trace

import search_spaces
from analysis import replay
from analysis.trace_replay.traces import RunTrace, facts_key
from search_spaces import Space, SpaceContext
from search_spaces.space import describe
from trainables.config import TrialConfig
from trainables.gradskip.replay import GradskipReplay
from tune_cac.tuning.warm_start.baseline import DrawnTrial, WarmStart, never_acts, with_learned_ranges

BASE = TrialConfig(method="none", epochs=4)
STEPS = 40


def a_trace(seed: int, **more: Any) -> RunTrace:
    return invented_trace(random.Random(seed), layers=3, total_steps=STEPS, steps_per_epoch=10, **more)


def context_of(trace: RunTrace) -> SpaceContext:
    return SpaceContext(total_steps=trace.total_steps, layer_names=trace.layer_names, unit_ends=(0, 3, 6))


def spread_starts(
    space: Space, context: SpaceContext, trace: RunTrace, base: TrialConfig, hold: dict[str, Any], count: int, seed: int
) -> list[dict[str, Any]]:
    return WarmStart(space=space, context=context, base=base, hold=hold, trace=trace).spread(count, seed)


def acts(trace: RunTrace, until: int = 3 * STEPS // 4, **values: Any) -> bool:
    """Whether the machine, stepped over the dense run, does anything; in the first three quarters unless told."""
    replay = GradskipReplay(TrialConfig(**values), invented_blueprint(3))
    return replay.advance(trace.dense.recorded, until) is not None


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_ranges_end_where_thresholds_stop_mattering(seed: int) -> None:
    trace = a_trace(seed)
    before = context_of(trace)
    found = with_learned_ranges(before, trace, [TrialConfig()])
    if found.first_thresholds is None:
        assert not acts(trace, CAC_VAR_START_ITR=0, CAC_VAR_START_THR=1.0, CAC_VAR_SAMPLES=1)
        assert found.latest_start_itr is None
        return
    low, high = found.first_thresholds
    assert 0 < low < high == 1.0
    for start in range(0, STEPS, 7):
        for samples in (1, 2, 5):  # nothing looks deeper than every step from the first on
            timing = {"CAC_VAR_START_ITR": start, "CAC_VAR_SAMPLES": samples}
            assert not acts(trace, CAC_VAR_START_THR=low - 3e-6, **timing) or low == 0.01
    # Every value of the range does something.
    assert acts(trace, CAC_VAR_START_ITR=0, CAC_VAR_START_THR=low, CAC_VAR_SAMPLES=1)
    possible = [
        start
        for start in range(3 * STEPS // 4)
        if acts(trace, CAC_VAR_START_ITR=start, CAC_VAR_START_THR=1.0, CAC_VAR_SAMPLES=1)
    ]
    assert found.latest_start_itr == max(possible)
    assert replace(found, first_thresholds=None, later_thresholds=None, latest_start_itr=None) == before


def test_what_is_not_known_changes_nothing() -> None:
    trace = a_trace(0)
    before = context_of(trace)
    unknown = [TrialConfig(CAC_WATCH=("linear",)), BASE, TrialConfig(CAC_RULE="linear", CAC_RULE_END_ITR=9)]
    assert with_learned_ranges(before, trace, unknown) == before
    assert with_learned_ranges(before, replace(trace, facts={}), [TrialConfig()]) == before
    assert not never_acts(TrialConfig(CAC_WATCH=("linear",)), trace)
    assert not never_acts(TrialConfig(CAC_RULE="plasticity", CAC_RULE_INTERVAL=3), trace)
    assert not never_acts(TrialConfig(CAC_RULE="freezeout", CAC_RULE_END_ITR=90, CAC_RULE_START_ITR=80), trace)


@pytest.mark.parametrize("seed", range(5))
def test_never_acts_is_what_the_machine_says(seed: int) -> None:
    trace = a_trace(seed)
    rng = random.Random(seed)
    said = []
    for _ in range(60):
        values = {
            "CAC_VAR_START_ITR": rng.randint(0, STEPS),
            "CAC_VAR_START_THR": rng.choice([0.5, 0.9, 0.95, 0.99]),
            "CAC_VAR_SAMPLES": rng.choice([1, 3, 10]),
        }
        said.append(never_acts(TrialConfig(**values), trace))
        assert said[-1] == (not acts(trace, STEPS, **values))
    assert True in said


def test_spaces_take_the_learned_ranges() -> None:
    context = SpaceContext(total_steps=300)
    space = search_spaces.load("auto_thresholds")
    learned = replace(context, first_thresholds=(0.97, 1.0), later_thresholds=(0.8, 1.0), latest_start_itr=40)
    ranges = {found.name: found for found in describe(space, learned)}
    # Grids begin no lower.
    assert 0.97 <= ranges["CAC_VAR_START_THR"].low <= 0.98
    assert 0.8 <= ranges["CAC_VAR_MT_THR"].low <= 0.85
    assert 0.8 <= ranges["CAC_VAR_SLOPE_THR"].low <= 0.85
    assert {ranges[f"CAC_VAR_{name}_THR"].high for name in ("START", "MT", "SLOPE")} == {1.0}
    assert 20 <= ranges["CAC_VAR_START_ITR"].high <= 40
    early = {found.name: found for found in describe(space, replace(learned, latest_start_itr=0))}
    assert 1 <= early["CAC_VAR_START_ITR"].high <= 20  # a range, all the same
    late = {found.name: found for found in describe(space, replace(learned, latest_start_itr=290))}
    assert late["CAC_VAR_START_ITR"].high == 150  # never later than without
    rules = {found.name: found for found in describe(search_spaces.load("stop_rules"), learned)}
    assert rules["variance.CAC_VAR_MT_THR"].low == ranges["CAC_VAR_MT_THR"].low
    assert [str(r) for r in describe(space, context)] == [
        str(r) for r in describe(space, SpaceContext(total_steps=300))
    ]


def predicted(trace: RunTrace, space: Any, params: list[dict[str, Any]]) -> Any:
    context = with_learned_ranges(context_of(trace), trace, [TrialConfig()])
    settings_of = [space.suggest(optuna.trial.FixedTrial(p), context) for p in params]
    return replay(trace, settings_of)


@pytest.mark.slow
def test_a_start_is_spread_over_outcomes() -> None:
    space, trace = search_spaces.load("auto_thresholds"), a_trace(11)
    context = with_learned_ranges(context_of(trace), trace, [TrialConfig()])
    params = spread_starts(space, context, trace, BASE, {}, 8, 3)
    assert len(params) == 8
    found = predicted(trace, space, params)
    assert found["stops"].min() >= 1
    outcomes = {json.dumps([(e["iteration"], e["layer"]) for e in json.loads(text)]) + str(p["CAC_BRAKING_DISTANCE"])
                for text, p in zip(found["stop_events"], params, strict=True)}  # fmt: skip
    assert len(outcomes) == 8
    saved = found["compute_saved"]
    assert list(saved) == sorted(saved)
    # Evenly spaced: no gap is much wider than it has to be.
    assert np.diff(saved).max() <= 2.5 * (saved.max() - saved.min()) / 7
    assert spread_starts(space, context, trace, BASE, {}, 8, 3) == params
    assert spread_starts(space, context, trace, BASE, {}, 8, 4) != params
    assert spread_starts(space, context, trace, BASE, {}, 0, 3) == []


@pytest.mark.slow
def test_what_was_trained_since_changes_nothing() -> None:
    """A resumed search learns what it would have learned before."""
    space, config = search_spaces.load("auto_thresholds"), TrialConfig(CAC_VAR_START_ITR=0, CAC_VAR_SAMPLES=1)
    trace = a_trace(11, trained=[config, replace(config, CAC_VAR_START_THR=0.99)])
    assert len(trace.stages) > 1
    context = context_of(trace)
    for ask in (
        lambda t: with_learned_ranges(context, t, [TrialConfig()]),
        lambda t: spread_starts(space, context, t, BASE, {}, 5, 3),
        lambda t: never_acts(config, t),
    ):
        assert ask(trace) == ask(trace.dense_only())


@pytest.mark.slow
def test_a_space_of_which_a_part_can_be_predicted_gets_as_large_a_part() -> None:
    trace = a_trace(2)
    whole = {
        facts_key(TrialConfig(CAC_WHOLE_UNITS=True, **more)): invented_blueprint(3)
        for more in ({}, {"CAC_RULE": "linear", "CAC_RULE_END_ITR": 9})
    }
    trace = replace(trace, facts={**trace.facts, **whole})
    space = search_spaces.load("stop_rules")
    params = spread_starts(space, context_of(trace), trace, BASE, {}, 10, 0)
    assert 4 <= len(params) <= 6  # three of six rules
    assert {p["CAC_RULE"] for p in params} <= {"variance", "linear", "freezeout"}
    assert spread_starts(space, context_of(trace), replace(trace, facts={}), BASE, {}, 10, 0) == []


def test_held_values_count() -> None:
    trace = a_trace(11)
    space = search_spaces.load("braking_distance")
    off = spread_starts(space, context_of(trace), trace, BASE, {"CAC_VAR_START_ITR": STEPS}, 5, 0)
    assert off == []
    some = spread_starts(
        space,
        context_of(trace),
        trace,
        BASE,
        {"CAC_VAR_START_THR": 1.0, "CAC_VAR_START_ITR": 0, "CAC_VAR_SAMPLES": 1},
        5,
        0,
    )
    assert 1 <= len(some) <= 5
    assert len({p["CAC_BRAKING_DISTANCE"] for p in some}) == len(some)


def test_draws_cover_their_ranges() -> None:
    rng = random.Random(0)
    trials = [DrawnTrial(rng) for _ in range(4000)]
    for trial in trials:
        trial.suggest_int("i", 2, 11, step=3)
        trial.suggest_int("log", 1, 20, log=True)
        trial.suggest_float("f", 0.5, 2.0)
        trial.suggest_float("flog", 0.01, 1.0, log=True)
        trial.suggest_float("step", 0.0, 1.0, step=0.25)
        trial.suggest_categorical("c", (False, True))
    drawn = {name: [trial.params[name] for trial in trials] for name in trials[0].params}
    assert set(drawn["i"]) == {2, 5, 8, 11}
    assert set(drawn["log"]) == set(range(1, 21))
    assert drawn["log"].count(1) > 3 * drawn["log"].count(10)
    assert min(drawn["f"]) >= 0.5
    assert max(drawn["f"]) <= 2.0
    assert np.median(drawn["flog"]) == pytest.approx(0.1, rel=0.15)
    assert set(drawn["step"]) == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert set(drawn["c"]) == {False, True}
