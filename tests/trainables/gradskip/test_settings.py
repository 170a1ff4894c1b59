"""Settings: the published defaults, the environment in both directions, every error message."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables.errors import UserError
from trainables.gradskip import VARIABLES, Settings


def test_nothing_set_is_auto_mode_with_the_published_defaults() -> None:
    settings = Settings.from_environment({})
    assert settings == Settings()
    assert settings.mode == "auto"
    assert settings.to_environment() == {
        "CAC_VAR_START_ITR": "5000",
        "CAC_VAR_START_THR": "0.95",
        "CAC_VAR_MT_COUNT_THR": "5",
        "CAC_VAR_MT_THR": "0.96",
        "CAC_VAR_SLOPE_THR": "0.98",
        "CAC_VAR_SAMPLES": "200",
        "CAC_BRAKING_DISTANCE": "0",
    }


def test_manual_lists_of_the_published_documentation() -> None:
    settings = Settings.from_environment({"CAC_STOP_LAYER_NUM": "10,20", "CAC_STOP_LAYER_ITR": "0, 100"})
    assert (settings.stop_layer_num, settings.stop_layer_itr) == ((10, 20), (0, 100))
    assert settings.mode == "manual"


def test_the_sampling_interval_is_the_braking_distance_where_only_that_is_set() -> None:
    assert Settings().sampling_interval == 200
    assert Settings(braking_distance=30).sampling_interval == 30
    assert Settings(braking_distance=30, samples=7).sampling_interval == 7


def test_overrides_win_and_may_be_fields_or_variables() -> None:
    environ = {"CAC_VAR_START_THR": "0.9"}
    assert Settings.from_environment(environ, start_thr=0.8).start_thr == 0.8
    assert Settings.from_environment(environ, CAC_VAR_START_THR="0.7").start_thr == 0.7
    assert Settings.from_environment(environ, reference=True).reference


ascending = st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True).map(lambda v: tuple(sorted(v)))
manual_settings = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 999), min_size=n, max_size=n, unique=True).map(sorted)] * 2)
)


@given(manual_settings, st.integers(0, 50))
def test_manual_settings_survive_the_environment(lists: tuple[list[int], list[int]], braking: int) -> None:
    settings = Settings(stop_layer_num=tuple(lists[0]), stop_layer_itr=tuple(lists[1]), braking_distance=braking)
    environment = settings.to_environment()
    assert set(environment) == {"CAC_STOP_LAYER_NUM", "CAC_STOP_LAYER_ITR", "CAC_BRAKING_DISTANCE"}
    assert Settings.from_environment(environment) == settings


LIST = "must be a comma list of integers >= 0 in strictly ascending order, such as 10,20, got"
LIST_OR_BEFORE = LIST.replace(">= 0", ">= -1")  # before the first step


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("CAC_VAR_START_THR", "abc", "CAC_VAR_START_THR must be in (0, 1] or -1 (off), got 'abc'"),
        ("CAC_VAR_START_THR", "1.01", "CAC_VAR_START_THR must be in (0, 1] or -1 (off), got 1.01"),
        ("CAC_VAR_START_THR", "0", "CAC_VAR_START_THR must be in (0, 1] or -1 (off), got 0.0"),
        ("CAC_VAR_START_THR", "nan", "CAC_VAR_START_THR must be in (0, 1] or -1 (off), got nan"),
        ("CAC_VAR_MT_THR", "-1", "CAC_VAR_MT_THR must be in (0, 1], got -1.0"),
        ("CAC_VAR_SLOPE_THR", "2", "CAC_VAR_SLOPE_THR must be in (0, 1], got 2.0"),
        ("CAC_VAR_START_ITR", "-5", "CAC_VAR_START_ITR must be an integer >= 0, got -5"),
        ("CAC_VAR_START_ITR", "1.5", "CAC_VAR_START_ITR must be an integer >= 0, got '1.5'"),
        ("CAC_VAR_MT_COUNT_THR", "x", "CAC_VAR_MT_COUNT_THR must be an integer >= 0, got 'x'"),
        ("CAC_VAR_SAMPLES", "0", "CAC_VAR_SAMPLES must be an integer >= 1, got 0"),
        ("CAC_BRAKING_DISTANCE", "-1", "CAC_BRAKING_DISTANCE must be an integer >= 0 (0: off), got -1"),
        ("CAC_STOP_LAYER_NUM", "20,10", f"CAC_STOP_LAYER_NUM {LIST} '20,10'"),
        ("CAC_STOP_LAYER_NUM", "1,1", f"CAC_STOP_LAYER_NUM {LIST} '1,1'"),
        ("CAC_STOP_LAYER_ITR", "-2,3", f"CAC_STOP_LAYER_ITR {LIST_OR_BEFORE} '-2,3'"),
        ("CAC_STOP_LAYER_ITR", "one", f"CAC_STOP_LAYER_ITR {LIST_OR_BEFORE} 'one'"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(name: str, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        Settings.from_environment({name: text})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("layers", "iterations", "rule"), [("1,2", "5", "variance"), ("", "5,6", "variance"), ("1,2", "", "plasticity")]
)
def test_manual_lists_of_different_length(layers: str, iterations: str, rule: str) -> None:
    lists = {"CAC_STOP_LAYER_NUM": layers, "CAC_STOP_LAYER_ITR": iterations}
    with pytest.raises(UserError, match="must have one entry for each stop, got"):
        Settings.from_environment({**lists, "CAC_RULE": rule})


def test_layer_numbers_alone_are_the_auto_rules_targets() -> None:
    """As in the published package (`test_published.py` compares the stops)."""
    settings = Settings.from_environment({"CAC_STOP_LAYER_NUM": "3,7"})
    assert (settings.mode, settings.targets) == ("auto", (3, 7))
    assert Settings.from_environment(settings.to_environment()) == replace(settings, samples=200)
    assert settings.to_environment()["CAC_STOP_LAYER_NUM"] == "3,7"
    assert Settings.from_environment({"CAC_STOP_LAYER_NUM": "3", "CAC_VAR_START_THR": "-1"}).mode == "off"
    assert Settings().targets is None


def test_values_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(UserError, match=r"CAC_VAR_SAMPLES must be an integer >= 1, got 2.5"):
        Settings(samples=2.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="CAC_VAR_START_ITR must be an integer >= 0, got True"):
        Settings(start_itr=True)
    with pytest.raises(UserError, match="reference must be True or False, got 1"):
        Settings(reference=1)  # type: ignore[arg-type]


def test_an_unknown_override_prints_the_nearest_name() -> None:
    with pytest.raises(UserError, match="unknown setting 'start_thrr': did you mean 'start_thr'"):
        Settings.from_environment({}, start_thrr=0.9)


def test_a_misspelt_variable_in_the_environment_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="unknown variable 'CAC_VAR_STRAT_ITR': did you mean 'CAC_VAR_START_ITR'"):
        Settings.from_environment({"CAC_VAR_STRAT_ITR": "1"})


def test_every_field_but_reference_is_a_variable() -> None:
    fields = {field.name for field in dataclasses.fields(Settings)} - {"reference"}
    assert {variable.field for variable in VARIABLES} == fields
    assert len([variable for variable in VARIABLES if variable.published]) == 9
