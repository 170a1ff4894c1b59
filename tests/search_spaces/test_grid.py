"""Points of a space with finite choices, against Optuna's own exhaustive sampler; and their parts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import optuna
import pytest

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
    assert sorted(keys(found)) == sorted(set(tried))
    assert len(found) == 3 * (1 + 5 + 2 + 3 + 4)
    assert found[0] == {
        "rule": "depth",
        "late": 4,
        "depth": 1,
        "from": 0,
    }  # open: the first
    assert found[1:3] == ({"rule": "none", "late": 0}, {"rule": "none", "late": 4})


def test_points_with_equal_settings_count_once_and_a_start_off_the_grid_is_one_more() -> None:
    def halves(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
        return {"half": trial.suggest_int("asked", 0, 5) // 2}

    space = replace(SPACE, suggest=halves, start=lambda _: {"asked": 9})
    assert [dict(point) for point in grid_points(space, CONTEXT)] == [{"asked": n} for n in (9, 0, 2, 4)]


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
