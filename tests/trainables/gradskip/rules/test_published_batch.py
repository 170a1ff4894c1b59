"""The vectorised auto rule against the state machine, one step after the other, on random runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_runs import stops_of

from trainables.gradskip.rules.published_batch import CONDITIONS, AutoNumbers, Curve, examinations
from trainables.gradskip.rules.state_machine import first_step_after
from trainables.gradskip.settings import Settings

#: Few distinct values, so that equal variances, zeros, overflows of the ratio and NaN all occur often.
VARIANCES = st.sampled_from([0.0, 1e-300, 0.5, 0.9, 0.94, 0.95, 0.951, 0.98, 0.99, 1.0, 1.1, 3e38, float("nan")])
THRESHOLDS = st.sampled_from([0.5, 0.94, 0.95, 0.96, 0.98, 0.99, 1.0])


@st.composite
def some_settings(draw: st.DrawFn) -> Settings:
    return Settings(
        start_itr=draw(st.integers(0, 12)),
        start_thr=draw(THRESHOLDS),
        mt_count_thr=draw(st.integers(0, 3)),
        mt_thr=draw(THRESHOLDS),
        slope_thr=draw(THRESHOLDS),
        samples=draw(st.one_of(st.none(), st.integers(1, 4))),
        braking_distance=draw(st.integers(0, 5)),
    )


def numbers_of(several: list[Settings]) -> AutoNumbers:
    return AutoNumbers(
        start_itr=np.array([s.start_itr for s in several]),
        start_thr=np.array([s.start_thr for s in several]),
        mt_count_thr=np.array([s.mt_count_thr for s in several]),
        mt_thr=np.array([s.mt_thr for s in several]),
        slope_thr=np.array([s.slope_thr for s in several]),
        interval=np.array([s.sampling_interval for s in several]),
        braking=np.array([s.braking_distance for s in several]),
    )


def vectorised(setting: Settings, variances: np.ndarray, single: bool) -> list[tuple[int, int, str, float]]:
    """(iteration, target, condition, ratio) of each stop, target by target."""
    found = []
    anchor, begin = None, 0
    for target, values in enumerate(variances.T):
        looks = examinations(
            begin=begin, end=len(values), start_itr=setting.start_itr, interval=setting.sampling_interval, anchor=anchor
        )
        curve = Curve.of(looks, values[looks], single_precision=single)
        places, conditions = curve.stops(numbers_of([setting]), first=target == 0, single_precision=single)
        if places[0] == len(looks):
            break
        anchor = int(looks[places[0]])
        begin = first_step_after(anchor, setting.braking_distance)
        found.append((anchor, target, CONDITIONS[conditions[0]], float(curve.ratios[places[0]])))
    return found


@pytest.mark.slow
@given(some_settings(), st.lists(st.tuples(VARIANCES, VARIANCES, VARIANCES), min_size=1, max_size=40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_stop_is_the_state_machines(setting: Settings, run: list[tuple[float, ...]], single: bool) -> None:
    variances = np.array(run)
    expected = stops_of(
        setting, range(3), lambda iteration, layer: run[iteration][layer], len(run), single_precision=single
    )
    assert vectorised(setting, variances, single) == [(i, d.layer, d.rule, d.ratio) for i, d in expected]


@pytest.mark.thorough
@pytest.mark.slow
@given(
    st.lists(some_settings(), min_size=1, max_size=8),
    st.lists(VARIANCES, min_size=1, max_size=30),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_many_settings_at_once_are_each_alone(
    several: list[Settings], values: list[float], first: bool, single: bool
) -> None:
    curve = Curve.of(np.arange(len(values)), np.array(values), single_precision=single)
    numbers = numbers_of(several)
    places, conditions = curve.stops(numbers, first=first, single_precision=single)
    for row in range(len(several)):
        alone = curve.stops(numbers, np.array([row]), first=first, single_precision=single)
        assert (places[row], conditions[row]) == (alone[0][0], alone[1][0])
