"""Grids: points of a space against Optuna's exhaustive sampler; grid files against expansions by hand and by loops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import rest_thorough

import search_spaces
from search_spaces.grid import grid_points
from search_spaces.grid_file import MOST_POINTS, grid_space, read_grid
from search_spaces.space import Space, SpaceContext, Suggests, describe
from trainables.errors import UserError

RUN = SpaceContext(total_steps=300, unit_ends=(2, 5, 8), layer_names=tuple(f"layer{n}" for n in range(12)))


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
        conditional(trial, RUN)
        tried.extend(keys([trial.params]))
        return 0.0

    optuna.create_study(sampler=optuna.samplers.BruteForceSampler(seed=0)).optimize(objective)
    found = grid_points(SPACE, RUN)
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
    assert [dict(point) for point in grid_points(space, RUN)] == [{"asked": n} for n in (9, 0, 2, 4)]


@pytest.mark.parametrize(
    ("name", "said"),
    rest_thorough([
        ("stop_rules", "a grid needs finite choices, but linear.CAC_RULE_DEPTH of space stop_rules is continuous"),
        ("manual_layers", "a grid must have at most 10000 points, space manual_layers has more: search it"),
    ], of_several=True),
)  # fmt: skip
def test_what_is_no_grid_says_so(name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        grid_points(search_spaces.load(name), RUN)
    assert said in str(caught.value)
    assert "grid file (--grid FILE)" in str(caught.value)


CONTEXT = SpaceContext(total_steps=300)


def as_given(name: str, value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def points(text: str) -> list[dict[str, Any]]:
    return list(read_grid(text, "g.yaml", as_given)["settings"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "all: {a: [1, 2], b: x, c: [true, 0.5]}",
            [
                {"a": 1, "b": "x", "c": True}, {"a": 1, "b": "x", "c": 0.5},
                {"a": 2, "b": "x", "c": True}, {"a": 2, "b": "x", "c": 0.5},
            ],
        ),
        ("any: [all: {a: [1, 2]}, all: {b: 3}, all: {a: 2}]", [{"a": 1}, {"a": 2}, {"b": 3}]),
        (
            "join: [all: {a: [1, 2]}, any: [all: {b: 3}, all: {c: [4, 5]}]]",
            [
                {"a": 1, "b": 3}, {"a": 1, "c": 4}, {"a": 1, "c": 5},
                {"a": 2, "b": 3}, {"a": 2, "c": 4}, {"a": 2, "c": 5},
            ],
        ),
        (
            "all: {rule: [plain, {value: linear, then: {all: {depth: [1, 2]}}}, null], layers: [[3, 9], [5]]}",
            [
                {"rule": "plain", "layers": [3, 9]}, {"rule": "plain", "layers": [5]},
                {"rule": "linear", "depth": 1, "layers": [3, 9]}, {"rule": "linear", "depth": 1, "layers": [5]},
                {"rule": "linear", "depth": 2, "layers": [3, 9]}, {"rule": "linear", "depth": 2, "layers": [5]},
                {"layers": [3, 9]}, {"layers": [5]},
            ],
        ),
    ],
    ids=["product, the last varies fastest", "alternatives, equal ones once", "joined", "then, null and lists"],
)  # fmt: skip
def test_points_are_those_written_by_hand(text: str, expected: list[dict[str, Any]]) -> None:
    assert points(text) == expected


def test_excluded_variables_leave_the_name_and_not_the_trial() -> None:
    found = read_grid("exclude: b\nall: {a: [1, 2], b: 3}", "g.yaml", as_given)
    assert found == {"settings": [{"a": 1, "b": 3}, {"a": 2, "b": 3}], "unnamed": ["b"]}
    assert grid_space(found).suggest(optuna.trial.FixedTrial({"a": 2}), CONTEXT) == {"a": 2, "b": 3, "unnamed": ("b",)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "g.yaml: is empty: a grid needs one of the keys any, join and all"),
        ("- 1", "g.yaml:1: a grid must be a map with one of the keys any, join and all, got [1]"),
        ("exclude: a", "a grid must have one of the keys any, join and all, got none"),
        ("all: {a: 1}\nany: []", "a grid must have one of the keys any, join and all, got all, any: put them into"),
        ("al: {a: 1}", "g.yaml:1: al: unknown key 'al', did you mean 'all'? Valid: any, join, all; variables"),
        ("all: 3", "g.yaml:1: all: all must map variables to their values, got 3"),
        ("any: {all: {a: 1}}", "any: any must be a list of grids, got {'all': {'a': 1}}"),
        ("join: []", "join: join must be a list of grids, got []"),
        ("all:\n  a: 1\n  b: []", "g.yaml:3: all.b: b must have a value, got an empty list: leave it out"),
        ("all:\n  a: 1\n  a: 2", "g.yaml:3: all.a: is given twice, first in line 2"),
        ("all: {a: {then: 3}}", "all.a: a conditional value must be {value: ..., then: GRID}, got {'then': 3}"),
        ("all: {a: {value: 1, than: 3}}", "a conditional value must be {value: ..., then: GRID}"),
        ("join: [all: {a: 1}, all: {a: 2}]", "join: a is set twice in one trial: keep one of them"),
        ("any:\n- all: {a: 1}\n  exclude: a", "any.0.exclude: exclude must stand beside the outermost key"),
        ("exclude: [alpha]\nall: {alpa: 1}", "exclude.0: 'alpha' is no variable of this grid, did you mean 'alpa'?"),
        (f"all: {{a: {list(range(101))}, b: {list(range(100))}}}", f"at most {MOST_POINTS} points, got 10100"),
        ("all: {a: [1", "g.yaml:2: is not YAML"),
        ("all: {refused: [1, 2]}", "g.yaml:1: all.refused.0: refused must be 0"),
    ],
)  # fmt: skip
def test_an_error_names_the_place(text: str, said: str) -> None:
    def read(name: str, value: Any) -> Any:
        if name == "refused":
            raise UserError("refused must be 0")
        return value

    with pytest.raises(UserError) as caught:
        read_grid(text, "g.yaml", read)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# The same grids in the form of the grid run that they come from: lists of alternatives, tuples of joined grids, dicts.
leaves = st.sampled_from([0, 1, 2, None])


def grids(names: str) -> st.SearchStrategy[Any]:
    """Grids over these variables, each of them in one place of a join at most."""
    if len(names) < 2:
        return st.fixed_dictionaries({names: st.lists(leaves, min_size=1, max_size=3)})
    half = len(names) // 2
    one, other = grids(names[:half]), grids(names[half:])
    conditional = st.tuples(leaves, other)
    return st.one_of(
        st.fixed_dictionaries({name: st.lists(leaves, min_size=1, max_size=2) for name in names[:3]}),
        st.tuples(one, other),
        st.lists(st.one_of(one, other), min_size=1, max_size=3),
        st.fixed_dictionaries({names[0]: st.lists(st.one_of(leaves, conditional), min_size=1, max_size=2)}),
    )


def expanded(grid: Any) -> Iterator[list[tuple[str, Any]]]:
    if isinstance(grid, list):
        for part in grid:
            yield from expanded(part)
    elif isinstance(grid, tuple):
        for first in expanded(grid[0]):
            for rest in expanded(grid[1:]) if grid[1:] else [[]]:
                yield first + rest
    else:
        (name, values), *others = grid.items()
        for value in values:
            inner = expanded(value[1]) if isinstance(value, tuple) else [[]]
            for then in inner:
                for rest in expanded(dict(others)) if others else [[]]:
                    yield [(name, value[0] if isinstance(value, tuple) else value), *then, *rest]


def in_the_file(grid: Any) -> Any:
    if isinstance(grid, (list, tuple)):
        return {"any" if isinstance(grid, list) else "join": [in_the_file(part) for part in grid]}
    return {
        "all": {
            name: [{"value": v[0], "then": in_the_file(v[1])} if isinstance(v, tuple) else v for v in values]
            for name, values in grid.items()
        }
    }


@settings(max_examples=150, deadline=None)
@given(grids("abcde"))
def test_any_grid_expands_as_the_nested_loops_do(grid: Any) -> None:
    wanted: list[dict[str, Any]] = []
    for pairs in expanded(grid):
        point = {name: value for name, value in pairs if value is not None}
        if point not in wanted:
            wanted.append(point)
    found = read_grid(json.dumps(in_the_file(grid)), "<grid>", as_given)
    assert found["settings"] == wanted

    # Its space asks only for what tells its points apart, and returns each for its parameters.
    space = grid_space(found)
    parameters = space.suggest.parameters()  # type: ignore[attr-defined]
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for asked, point in zip(parameters, wanted, strict=True):
        study.enqueue_trial(asked)
        trial = study.ask()
        assert space.suggest(trial, CONTEXT) == point
        assert trial.params == asked  # nothing was drawn; and no parameter has other choices in another trial
    assert len({json.dumps(asked, sort_keys=True) for asked in parameters}) == len(wanted)
    assert {seen.name for seen in describe(space, CONTEXT)} == {name for asked in parameters for name in asked}


@pytest.mark.parametrize(
    ("text", "method", "saving"),
    [
        ("all: {CAC_VAR_START_THR: [0.9]}", "gradskip", "training"),
        ("all: {distill_temperature: [1, 2]}", "compression", "training"),
        ("all: {pruning_frequency: [1, 2]}", "compression", "sparse-inference"),
        ("all: {CAC_RULE: variance, pruning_frequency: [1, 2]}", "gradskip+compression", "both-sparse"),
        ("all: {forward_cache_mb: [0, 64]}", "none", "training"),
    ],
)
def test_the_method_is_that_of_the_variables(text: str, method: str, saving: str) -> None:
    space = grid_space(read_grid(text, "g.yaml", as_given))
    assert (space.method, space.saving) == (method, saving)


def test_points_of_a_grid_may_have_several_methods() -> None:
    text = """
    any:
    - all: {svrg_alpha: [0.5, 1.0], CAC_VAR_START_THR: null}
    - all: {cluster_count: 4}
    - all: {CAC_VAR_START_THR: 0.9}
    - all: {zero_threshold: 0.1, CAC_VAR_START_THR: 0.9}
    - all: {epochs: 9}
    """
    space = grid_space(read_grid(text, "g.yaml", as_given))
    wanted = ["svrg", "svrg", "gradient_clustering", "gradskip", "gradskip+zero_gradients", "none"]
    found = [space.suggest(optuna.trial.FixedTrial(asked), CONTEXT) for asked in space.suggest.parameters()]
    assert [point["method"] for point in found] == wanted
    assert space.methods == tuple(dict.fromkeys(wanted))
    assert space.method == "svrg+gradient_clustering+gradskip+zero_gradients"
    with pytest.raises(UserError, match="settings of svrg and kfac can't be searched together"):
        grid_space(read_grid("all: {svrg_alpha: 1, kfac_damping: 1}", "g.yaml", as_given))
