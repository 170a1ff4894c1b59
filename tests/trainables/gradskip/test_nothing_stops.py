"""Why nothing stopped, against the rule itself over variances that fall as fast as they can."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from machine_runs import stops_of

from trainables.gradskip.nothing_stops import too_late, why_nothing_stopped
from trainables.gradskip.settings import Settings


@given(st.integers(0, 60), st.integers(1, 30), st.integers(0, 9), st.integers(1, 80))
def test_it_is_too_late_exactly_where_the_rule_cannot_stop(start: int, samples: int, braking: int, steps: int) -> None:
    settings = Settings(start_itr=start, samples=samples, braking_distance=braking, start_thr=0.9)
    falls = bool(stops_of(settings, (0,), lambda iteration, _: 0.5**iteration, steps))
    assert (too_late(settings, steps) == "") == falls
    if not falls:
        found = why_nothing_stopped(settings, steps)
        assert found == too_late(settings, steps)
        assert f"the run has {steps} steps: set both lower, such as CAC_VAR_START_ITR={steps // 5} and " in found


def test_what_it_names_acts() -> None:
    for steps in (10, 300, 5000):
        names = too_late(Settings(), steps).partition("such as ")[2].split(" and ")
        begin, often = (int(name.partition("=")[2]) for name in names)
        settings = Settings(start_itr=begin, samples=often)
        assert stops_of(settings, (0,), lambda iteration, _: 0.5 ** (iteration / 9), steps)


def test_other_reasons() -> None:
    assert why_nothing_stopped(Settings(start_thr=-1.0), 300) == "CAC_VAR_START_THR is -1 (off)"
    assert why_nothing_stopped(Settings(rule="plasticity"), 300) == "rule plasticity named no layer within 300 steps"
    assert too_late(Settings(rule="plasticity"), 300) == ""
    assert why_nothing_stopped(Settings(start_itr=60, samples=5), 300).startswith(
        "at no decision (from iteration 60 on, every 5) had the first layer's weight variance fallen below "
        "CAC_VAR_START_THR=0.95 of its peak: raise it"
    )
