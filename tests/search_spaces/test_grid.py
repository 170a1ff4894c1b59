"""Points of a space with finite choices, against Optuna's own exhaustive sampler; and their parts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

import search_spaces
from search_spaces.grid import grid_points
from search_spaces.space import Space, SpaceContext, Suggests
from trainables.errors import UserError

CONTEXT = SpaceContext(total_steps=300, unit_ends=(2, 5, 8), layer_names=tuple(f"layer{n}" for n in range(12)))


def conditional(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    rule = trial.suggest_categorical("rule", ("none", "thresholds", "depth"))
    found: dict[str, Any] = {"rule": rule, "late": trial.suggest_int("late", 0, 10, step=4)}
    if rule == "thresholds":
        found["share"] = trial.suggest_float("share", 0.1, 0.5, step=0.1)
    if rule == "depth":
        found["depth"] = trial.suggest_int("depth", 1, 3)
        found["from"] = trial.suggest_int("from", 0, found["depth"])
    return found


SPACE = Space(name="conditional", method="gradskip", suggest=conditional, start=lambda _: {"rule": "depth", "late": 4})


def keys(parameters: Any) -> list[str]:
    return [json.dumps(dict(point), sort_keys=True) for point in parameters]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_the_points_are_those_of_optunas_exhaustive_search_after_the_starting_point() -> None:
    tried: list[str] = []

    def objective(trial: optuna.Trial) -> float:
        conditional(trial, CONTEXT)
        tried.extend(keys([trial.params]))
        return 0.0

    optuna.create_study(sampler=optuna.samplers.BruteForceSampler(seed=0)).optimize(objective)
    found = grid_points(SPACE, CONTEXT)
    assert sorted(keys(found.parameters)) == sorted(set(tried))
    assert found.total == len(found.parameters) == 3 * (1 + 5 + 2 + 3 + 4)
    assert found.has_start
    assert found.parameters[0] == {
        "rule": "depth",
        "late": 4,
        "depth": 1,
        "from": 0,
    }  # open: the first
    assert found.parameters[1:3] == ({"rule": "none", "late": 0}, {"rule": "none", "late": 4})


@given(st.integers(1, 60), st.data())
def test_parts_are_disjoint_complete_and_even(parts: int, data: Any) -> None:
    whole = grid_points(SPACE, CONTEXT)
    parts = min(parts, whole.total)
    dealt = [grid_points(SPACE, CONTEXT, (number, parts)) for number in range(1, parts + 1)]
    together = [key for part in dealt for key in keys(part.parameters)]
    assert len(together) == len(set(together)) == whole.total
    assert set(together) == set(keys(whole.parameters))
    assert max(len(part.parameters) for part in dealt) - min(len(part.parameters) for part in dealt) <= 1
    assert [part.has_start for part in dealt] == [True] + [False] * (parts - 1)
    number = data.draw(st.integers(0, whole.total - 1))
    assert keys(whole.parameters)[number] in keys(dealt[number % parts].parameters)  # round robin


def test_points_with_equal_settings_count_once_and_a_start_off_the_grid_is_one_more() -> None:
    def halves(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
        return {"half": trial.suggest_int("asked", 0, 5) // 2}

    space = replace(SPACE, suggest=halves, start=lambda _: {"asked": 9})
    assert [dict(point) for point in grid_points(space, CONTEXT).parameters] == [{"asked": n} for n in (9, 0, 2, 4)]


def test_a_built_in_space() -> None:
    found = grid_points(search_spaces.load("distillation"), CONTEXT)
    assert found.total == 8 * 9 * 6
    assert grid_points(search_spaces.load("braking_distance"), CONTEXT).total == 91  # 0 to 90 iterations


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stop_rules", "a grid needs finite choices, but linear.CAC_RULE_DEPTH of space stop_rules is continuous"),
        ("manual_layers", "a grid must have at most 10000 points, space manual_layers has more: search it"),
    ],
)  # fmt: skip
def test_what_is_no_grid_says_so(name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        grid_points(search_spaces.load(name), CONTEXT)
    assert said in str(caught.value)
    assert "grid file (--grid FILE)" in str(caught.value)


def test_a_part_without_a_point_says_so() -> None:
    with pytest.raises(UserError, match="--part 46/50 has no point, for the grid has 45: deal it into fewer"):
        grid_points(SPACE, CONTEXT, (46, 50))
