"""The space of the main job."""

from __future__ import annotations

import optuna

from search_spaces import SpaceContext, load
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


def test_no_braking_is_an_ordinary_choice() -> None:
    space, context = load("auto_thresholds"), SpaceContext(total_steps=300)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    distances = [space.suggest(study.ask(), context)["CAC_BRAKING_DISTANCE"] for _ in range(300)]
    assert set(distances) == {0, 6, 12, 18, 24, 30}
    assert 25 <= distances.count(0) <= 75  # one of six, not one of thirty-one


def test_iterations_scale_with_the_run_and_thresholds_do_not() -> None:
    space = load("auto_thresholds")
    short = {f.name: f for f in describe(space, SpaceContext(total_steps=300))}
    long = {f.name: f for f in describe(space, SpaceContext(total_steps=30_000))}
    for name in ("CAC_VAR_START_ITR", "CAC_VAR_SAMPLES", "CAC_BRAKING_DISTANCE"):
        assert long[name].high == 100 * short[name].high
    for name in ("CAC_VAR_START_THR", "CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR", "CAC_VAR_MT_COUNT_THR"):
        assert str(long[name]) == str(short[name])


def test_on_imagenet_the_start_is_the_published_default() -> None:
    start = load("auto_thresholds").start(SpaceContext(total_steps=90 * 5005))
    assert TrialConfig(**start).gradskip_settings() == TrialConfig(CAC_VAR_SAMPLES=200).gradskip_settings()
