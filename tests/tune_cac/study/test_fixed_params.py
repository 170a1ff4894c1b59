"""What a search may hold, given as text or as values."""

from __future__ import annotations

import re
from typing import Any

import pytest

import search_spaces
import tune_cac
from search_spaces import SpaceContext
from trainables.errors import UserError
from tune_cac.study.fixed_params import check_hold, check_hold_on_run, shown_hold
from tune_cac.study.search_options import SearchOptions


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"CAC_VAR_START_THR": "0.97"}, {"CAC_VAR_START_THR": 0.97}),
        ({"CAC_WATCH": "conv, linear"}, {"CAC_WATCH": ["conv", "linear"]}),
        ({"CAC_WATCH": ["conv", "linear"]}, {"CAC_WATCH": ["conv", "linear"]}),
        ({"CAC_WHOLE_UNITS": "1"}, {"CAC_WHOLE_UNITS": True}),
        ({"CAC_RULE": "linear", "CAC_RULE_END_ITR": "300"}, {"CAC_RULE": "linear", "CAC_RULE_END_ITR": 300}),
        ({"forward_cache_mb": "64"}, {"forward_cache_mb": 64}),
        ({}, {}),
    ],
)
def test_text_and_values_are_the_same_hold_and_hold_themselves(given: dict[str, Any], held: dict[str, Any]) -> None:
    options = SearchOptions(space="braking_distance", hold=given)
    assert options.hold == held
    assert SearchOptions(space="braking_distance", hold=options.hold).hold == held  # as read back from study.json


@pytest.mark.parametrize(
    ("hold", "message"),
    [
        ({"CAC_VAR_SAMPLES": 2.5}, "CAC_VAR_SAMPLES must be an integer >= 1, got 2.5"),
        ({"CAC_WHOLE_UNITS": 2}, "CAC_WHOLE_UNITS must be 0 or 1, got 2"),
        (
            {"CAC_BRAKING_DISTANCE": 0},
            "CAC_BRAKING_DISTANCE is searched by space auto_thresholds, so it can't be fixed, got "
            "CAC_BRAKING_DISTANCE=0: leave it out, or take another space",
        ),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(hold: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        tune_cac.search(hold=hold)


def test_what_a_space_fixes_may_be_held() -> None:
    fixed = {"CAC_WHOLE_UNITS": "0", "CAC_RULE_END_ITR": "500"}
    held = check_hold(search_spaces.load("stop_rules"), fixed)
    check_hold_on_run(search_spaces.load("stop_rules"), held, SpaceContext(total_steps=300))
    assert shown_hold(held) == "CAC_WHOLE_UNITS=0 CAC_RULE_END_ITR=500"


def test_what_would_fail_in_some_trials_only_is_refused_too() -> None:
    """Braking is 0 at the lower end of the range, where freezeout would still be valid."""
    hold = {"CAC_RULE": "freezeout", "CAC_RULE_END_ITR": 300}
    with pytest.raises(UserError) as error:
        check_hold_on_run(search_spaces.load("braking_distance"), hold, SpaceContext(total_steps=300))
    assert str(error.value) == (
        "CAC_RULE=freezeout CAC_RULE_END_ITR=300 can't be fixed in space braking_distance: CAC_BRAKING_DISTANCE "
        "must be "
        "0 with CAC_RULE=freezeout, whose learning rates fall to zero by themselves, got 90"
    )
