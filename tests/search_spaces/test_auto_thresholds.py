"""The space of the main job."""

from __future__ import annotations

import optuna
import pytest

from search_spaces import SpaceContext, load
from search_spaces.auto_thresholds import threshold_grid
from search_spaces.space import describe
from trainables.config import TrialConfig


def test_covers_the_seven_auto_variables() -> None:
    names = {found.name for found in describe(load("auto_thresholds"), SpaceContext(total_steps=300))}
    assert names == {
        "CAC_VAR_START_ITR",
        "CAC_VAR_START_THR",
        "CAC_VAR_MT_COUNT_THR",
        "CAC_VAR_MT_THR",
        "CAC_VAR_SLOPE_THR",
        "CAC_VAR_SAMPLES",
        "CAC_BRAKING_DISTANCE",
    }


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
