"""The braking distance alone."""

from __future__ import annotations

import optuna
import pytest

from search_spaces import SpaceContext, load
from search_spaces.space import describe, searched_fields


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
