"""What a search learns from its baseline, against trying every threshold and start."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import invented_blueprint, invented_trace
from thorough import rest_thorough

import search_spaces
from analysis.trace_replay.traces import RunTrace
from search_spaces import SpaceContext
from search_spaces.space import describe
from trainables.config import TrialConfig
from trainables.gradskip.replay import GradskipReplay
from tune_cac.study.search_options import SearchOptions
from tune_cac.tuning import run
from tune_cac.tuning.baseline import DrawnTrial, WarmStart, never_acts, outcome_identity, with_learned_ranges

BASE = TrialConfig(method="none", epochs=4)


STEPS = 40


def a_trace(seed: int, **more: Any) -> RunTrace:
    return invented_trace(random.Random(seed), layers=3, total_steps=STEPS, steps_per_epoch=10, **more)


def context_of(trace: RunTrace) -> SpaceContext:
    return SpaceContext(total_steps=trace.total_steps, layer_names=trace.layer_names, unit_ends=(0, 3, 6))


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
    assert with_learned_ranges(before, trace, [TrialConfig(CAC_NORM_STATISTICS="hold_all")]) == before  # another run's
    assert not never_acts(TrialConfig(CAC_WATCH=("linear",)), trace)
    assert not never_acts(TrialConfig(CAC_RULE="plasticity", CAC_RULE_INTERVAL=3), trace)
    assert never_acts(TrialConfig(CAC_VAR_START_THR=-1.0), trace)
    for acting in ({"CAC_NORM_STATISTICS": "hold_all"}, {"CAC_LR_FACTOR": 2.0}):
        assert not never_acts(TrialConfig(CAC_VAR_START_THR=-1.0, **acting), trace)
    assert not never_acts(TrialConfig(CAC_RULE="freezeout", CAC_RULE_END_ITR=90, CAC_RULE_START_ITR=80), trace)


@pytest.mark.parametrize("seed", rest_thorough(range(5)))
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


def test_how_a_stop_is_made_is_part_of_what_trains_alike() -> None:
    stopped, dense = {"stop_events": '[{"iteration": 3, "layer": 5}]'}, {"stop_events": "[]"}
    ways: list[dict[str, Any]] = [
        {}, {"CAC_NORM_STATISTICS": "hold"}, {"CAC_NORM_STATISTICS": "hold_all"}, {"CAC_PREFIX_MODE": "eval"},
        {"CAC_LR_FACTOR": 2.0},
    ]  # fmt: skip
    assert len({outcome_identity(stopped, values) for values in ways}) == len(ways)
    assert outcome_identity(stopped, {}) == outcome_identity(
        stopped, {"CAC_NORM_STATISTICS": "go_on", "CAC_PREFIX_MODE": "train", "CAC_LR_FACTOR": 1.0}
    )
    assert len({outcome_identity(dense, values) for values in ways}) == 3  # what acts from the start


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


@pytest.mark.slow
def test_what_was_trained_since_changes_nothing() -> None:
    """A resumed search learns what it would have learned before."""
    config = TrialConfig(CAC_VAR_START_ITR=0, CAC_VAR_SAMPLES=1)
    trace = a_trace(11, trained=[config, replace(config, CAC_VAR_START_THR=0.99)])
    assert len(trace.stages) > 1
    context = context_of(trace)
    for ask in (
        lambda t: with_learned_ranges(context, t, [TrialConfig()]),
        lambda t: never_acts(config, t),
    ):
        assert ask(trace) == ask(trace.dense_only())


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


@pytest.mark.slow
@pytest.mark.parametrize(("first", "acts"), rest_thorough([(STEPS, False), (0, True)], of_several=True))
def test_held_values_count(first: int, acts: bool) -> None:
    trace = a_trace(11)
    hold = {"CAC_VAR_START_THR": 1.0, "CAC_VAR_START_ITR": first, "CAC_VAR_SAMPLES": 1}
    space = search_spaces.load("braking_distance")
    known = WarmStart(space=space, context=context_of(trace), base=BASE, hold=hold, trace=trace)
    assert (known.why_little(0) == "") == acts
    assert all(values.items() >= hold.items() for _, values in known.drawn(0, 5))


def test_several_workers_have_no_forward_cache_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    of = partial(SearchOptions, space="frozen_prefix", workload="digits")
    assert [run._caches(of(workers_per_trial=workers)) for workers in (1, 2)] == [True, False]
    assert capsys.readouterr().err.startswith("no forward cache: with --workers-per-trial, the rows")
