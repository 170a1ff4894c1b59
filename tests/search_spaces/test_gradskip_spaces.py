"""The spaces of Gradient-Skip: thresholds, the braking distance alone, manual stops, all rules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis
import hypothesis.strategies as st
import optuna
import pytest
from hypothesis import given

from search_spaces import SpaceContext, load
from search_spaces.auto_thresholds import threshold_grid
from search_spaces.manual_layers import in_order
from search_spaces.space import describe, searched_fields
from trainables.config import TrialConfig
from trainables.gradskip.variables import RULES, VARIABLES


def test_iterations_scale_with_the_run_and_thresholds_do_not() -> None:
    space = load("auto_thresholds")
    short = {f.name: f for f in describe(space, SpaceContext(total_steps=300))}
    long = {f.name: f for f in describe(space, SpaceContext(total_steps=30_000))}
    for name in ("CAC_VAR_START_ITR", "CAC_VAR_SAMPLES", "CAC_BRAKING_DISTANCE"):
        assert long[name].high == 100 * short[name].high
    assert str(short["CAC_VAR_SAMPLES"]) == "3 .. 15 in steps of 6"
    for name in ("CAC_VAR_START_THR", "CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR", "CAC_VAR_MT_COUNT_THR"):
        assert str(long[name]) == str(short[name])


def test_on_imagenet_the_start_is_the_published_default() -> None:
    start = load("auto_thresholds").start(SpaceContext(total_steps=90 * 5005))
    assert TrialConfig(**start).gradskip_settings() == TrialConfig(CAC_VAR_SAMPLES=200).gradskip_settings()


@pytest.mark.parametrize(
    ("known", "grid"),
    [
        ((0.92, 1.0), (0.92, 1.0, 0.02)),
        ((0.9152, 1.0), (0.92, 1.0, 0.02)),
        ((0.9931, 1.0), (0.994, 1.0, 0.002)),
        ((0.985, 1.0), (0.985, 1.0, 0.003)),
        ((0.8812, 1.0), (0.9, 1.0, 0.02)),
        ((0.9999, 1.0), (0.9999, 1.0, 0.0001)),
        ((0.31, 1.0), (0.4, 1.0, 0.2)),
        ((0.01, 1.0), (0.2, 1.0, 0.2)),  # never zero, which is no threshold
    ],
)
def test_thresholds_are_round_numbers_of_what_is_wanted(
    known: tuple[float, float], grid: tuple[float, float, float]
) -> None:
    assert threshold_grid(*known) == grid


def test_on_a_run_whose_trace_is_known_thresholds_are_those_that_make_a_difference() -> None:
    context = SpaceContext(
        total_steps=300, first_thresholds=(0.985, 1.0), later_thresholds=(0.93, 1.0), latest_start_itr=80
    )
    found = {f.name: f for f in describe(load("auto_thresholds"), context)}
    assert (found["CAC_VAR_START_THR"].low, found["CAC_VAR_START_THR"].step) == (0.985, 0.003)
    assert (found["CAC_VAR_MT_THR"].low, found["CAC_VAR_SLOPE_THR"].low) == (0.94, 0.94)
    assert found["CAC_VAR_START_ITR"].high == 60
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    values = [load("auto_thresholds").suggest(study.ask(), context)["CAC_VAR_START_THR"] for _ in range(50)]
    assert set(values) <= {0.985, 0.988, 0.991, 0.994, 0.997, 1.0}


@pytest.mark.parametrize(("steps", "text"), [(1, "0 .. 1"), (300, "0 .. 90"), (30_000, "0 .. 9000 in steps of 90")])
def test_the_range_is_three_tenths_of_the_run_on_a_fine_grid(steps: int, text: str) -> None:
    (found,) = describe(load("braking_distance"), SpaceContext(total_steps=steps))
    assert (found.name, str(found)) == ("CAC_BRAKING_DISTANCE", text)


def test_everything_else_is_held_where_auto_thresholds_starts() -> None:
    space, context = load("braking_distance"), SpaceContext(total_steps=300)
    assert searched_fields(space, context) == {"CAC_BRAKING_DISTANCE"}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        values = space.suggest(study.ask(), context)
        distance = values["CAC_BRAKING_DISTANCE"]
        assert values == {**load("auto_thresholds").start(context), "CAC_BRAKING_DISTANCE": distance}
    # Unset, the interval between decisions would follow the distance.
    assert values["CAC_VAR_SAMPLES"] == 1


NAMES = tuple(f"p{i}.weight" for i in range(20))
UNITS = SpaceContext(total_steps=300, layer_names=NAMES, unit_ends=(2, 5, 8))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
@hypothesis.example([(1, 5), (1, 9), (2, 9)])
def test_stops_are_strictly_ascending_and_made_of_what_was_asked_for(stops: list[tuple[int, int]]) -> None:
    found = in_order(stops)
    assert found
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(found))
    assert {d for d, _ in found} <= {d for d, _ in stops}
    assert {i for _, i in found} <= {i for _, i in stops}
    assert max(found)[0] == max(d for d, _ in stops)  # the deepest layer is never lost
    assert min(i for _, i in found) == min(i for _, i in stops)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
def test_dropping_a_stop_changes_nothing_that_happens(stops: list[tuple[int, int]]) -> None:
    pairs = list(zip(sorted(d for d, _ in stops), sorted(i for _, i in stops), strict=True))
    for now in range(6):
        assert max((d for d, i in in_order(stops) if i <= now), default=-1) == max(
            (d for d, i in pairs if i <= now), default=-1
        )


def test_layers_come_from_the_workload_and_every_depth_and_count_is_tried() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = [load("manual_layers").suggest(study.ask(), UNITS) for _ in range(300)]
    assert {n for values in found for n in values["CAC_STOP_LAYER_NUM"]} == {2, 5, 8}
    assert {len(values["CAC_STOP_LAYER_NUM"]) for values in found} == {1, 2, 3}
    assert all(0 <= i < 300 for values in found for i in values["CAC_STOP_LAYER_ITR"])


def test_the_notes_name_the_layers() -> None:
    assert [line for line in load("manual_layers").notes(UNITS) if "CAC_STOP" in line] == [
        "  0: p2.weight (CAC_STOP_LAYER_NUM=2)",
        "  1: p5.weight (CAC_STOP_LAYER_NUM=5)",
        "  2: p8.weight (CAC_STOP_LAYER_NUM=8)",
    ]


CONTEXT = SpaceContext(total_steps=300)


@pytest.fixture(scope="module")
def samples() -> dict[str, list[dict[str, Any]]]:
    space = load("stop_rules")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found: dict[str, list[dict[str, Any]]] = {rule: [] for rule in RULES}
    for _ in range(400):
        values = space.suggest(study.ask(), CONTEXT)
        found[values["CAC_RULE"]].append(values)
    return found


def test_every_rule_is_tried_and_stops_whole_units(samples: dict[str, list[dict[str, Any]]]) -> None:
    for rule in RULES:
        assert samples[rule]
        for values in samples[rule]:
            assert values["CAC_WHOLE_UNITS"] is True
            assert TrialConfig(**values).gradskip_settings().mode in (rule, "auto")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gets_its_own_variables_and_all_of_them(rule: str, samples: dict[str, list[dict[str, Any]]]) -> None:
    mode = "auto" if rule == "variance" else rule
    own = {v.name for v in VARIABLES if mode in v.mode.split(",")}
    shared = {"CAC_RULE", "CAC_WHOLE_UNITS"} | ({"CAC_BRAKING_DISTANCE"} if rule != "freezeout" else set())
    for values in samples[rule]:
        assert set(values) == own | shared


def test_the_variance_branch_is_auto_thresholds() -> None:
    found = describe(load("stop_rules"), CONTEXT)
    own = {r.name.removeprefix("variance."): str(r) for r in found if r.name.startswith("variance.")}
    assert own == {r.name: str(r) for r in describe(load("auto_thresholds"), CONTEXT)}


def test_ranges_of_the_other_rules() -> None:
    found = {r.name: str(r) for r in describe(load("stop_rules"), CONTEXT)}
    assert found["linear.CAC_RULE_START_ITR"] == "0 .. 150"
    assert found["freezeout.CAC_RULE_START_ITR"] == "30 .. 270"
    assert found["plasticity.CAC_RULE_INTERVAL"] == found["gradient_norm.CAC_RULE_INTERVAL"] == "1 .. 20 (log)"
    assert found["plasticity.CAC_RULE_TOLERANCE"] == "0.02 .. 0.8 (log)"
