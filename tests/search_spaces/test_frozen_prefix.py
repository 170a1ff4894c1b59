"""The order in which a frozen prefix is searched, against losses of invented runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optuna
import pytest

from search_spaces import SpaceContext, load
from search_spaces.frozen_prefix import HELD, LATER, MOVING, NORMS, next_point, start
from search_spaces.space import Tried

SPACE = load("frozen_prefix")
UNITS = 16
CONTEXT = SpaceContext(
    total_steps=180, epochs=6, layer_names=tuple(f"p{n}" for n in range(2 * UNITS + 1)),
    unit_ends=tuple(range(1, 2 * UNITS, 2)), has_norms=True, forward_cache_mb=50,
)  # fmt: skip
Loss = Callable[[dict[str, Any], int], float]


def searched(loss: Loss, context: SpaceContext = CONTEXT, allowed: float = 0.005) -> list[Tried]:
    """Train what the space asks for, one after the other."""
    found: list[Tried] = []
    wanted: Tried | None = Tried(parameters=start(context), epochs=context.epochs)
    while wanted is not None:
        running = [*found, wanted]
        assert next_point(context, running) is None  # all of it depends on the one that runs
        lost = loss(dict(wanted.parameters), wanted.epochs)
        found.append(
            Tried(
                parameters=wanted.parameters, epochs=wanted.epochs, has_ended=True, lost=lost, is_within=lost <= allowed
            )
        )
        wanted = next_point(context, found)
        assert len(found) < 20
    return found


def at_full_length(tried: list[Tried]) -> list[int]:
    return [
        one.parameters["depth"] for one in tried if one.parameters.get("start") == 0 and one.epochs == CONTEXT.epochs
    ]


@pytest.mark.parametrize("deepest", range(-1, UNITS))
def test_the_deepest_prefix_is_found_by_bisection(deepest: int) -> None:
    tried = searched(lambda p, epochs: 0.0 if p.get("depth", -1) <= deepest else 0.1)
    depths = at_full_length(tried)
    assert len(depths) <= math.ceil(math.log2(UNITS + 1))
    assert max([d for d in depths if d <= deepest], default=-1) == deepest
    if deepest < UNITS - 1:
        assert deepest + 1 in depths
        assert tried[-1].parameters["depth"] == deepest + 1
        assert tried[-1].parameters["start"] == LATER


def test_of_many_layers_the_answer_is_a_sixteenth_of_the_depth_too_shallow_at_most() -> None:
    many = SpaceContext(
        total_steps=180, epochs=6, layer_names=("p",) * 101, unit_ends=tuple(range(100)), has_norms=True
    )
    for deepest in range(100):
        tried = searched(lambda p, epochs, deepest=deepest: 0.0 if p.get("depth", -1) <= deepest else 0.1, many)
        found = max([d for d in at_full_length(tried) if d <= deepest], default=-1)
        assert deepest - 6 < found <= deepest
        assert len(at_full_length(tried)) <= 5


@pytest.mark.parametrize(("gain", "norms"), [(0.1, HELD), (0.0, HELD), (-0.01, MOVING)])
def test_norms_are_decided_first(gain: float, norms: str) -> None:
    tried = searched(lambda p, epochs: -gain if p[NORMS] == HELD else 0.0)
    assert tried[0].parameters == {NORMS: HELD, "frozen": "nothing"}
    assert {one.parameters[NORMS] for one in tried[1:]} == {norms}


def test_fewer_epochs_are_tried_at_the_deepest_prefix_until_they_lose_too_much() -> None:
    tried = searched(lambda p, epochs: 0.0 if p.get("depth", 0) <= 9 and epochs >= 4 else 0.1)
    shorter = [(one.parameters["depth"], one.epochs) for one in tried if one.epochs < 6]
    assert shorter == [(9, 4), (9, 3), (4, 3)]


def test_a_failed_run_counts_as_too_great_a_loss() -> None:
    tried = searched(lambda p, epochs: math.inf if p.get("depth", 0) > 3 else 0.0)
    assert max(d for d in at_full_length(tried) if d <= 3) == 3


def test_without_norms_or_layers() -> None:
    plain = SpaceContext(total_steps=10, epochs=2, layer_names=("a", "b"), unit_ends=(0,))
    prefix = {"frozen": "prefix", "depth": 0, "start": 0.0, "CAC_PREFIX_MODE": "eval"}
    assert [(one.parameters, one.epochs) for one in searched(lambda p, epochs: 0.0, plain)] == [
        (prefix, 2),
        (prefix, 1),
    ]
    none = SpaceContext(total_steps=10, epochs=2, layer_names=("a",), unit_ends=())
    assert searched(lambda p, epochs: 0.0, none)[0].parameters == {}


def test_its_points_are_settings_of_the_space() -> None:
    for one in searched(lambda p, epochs: 0.0 if p.get("depth", 0) <= 9 else 0.1):
        trial = optuna.trial.FixedTrial(dict(one.parameters))
        values = SPACE.suggest(trial, CONTEXT)
        assert trial.params == one.parameters  # it asks for these and no others
        if one.parameters["frozen"] == "nothing":
            assert values == {"CAC_VAR_START_THR": -1.0, NORMS: HELD}
        else:
            assert values == {
                "CAC_STOP_LAYER_NUM": (2 * one.parameters["depth"] + 1,),
                "CAC_STOP_LAYER_ITR": (round(180 * one.parameters["start"]),),
                "CAC_PREFIX_MODE": "eval", "forward_cache_mb": 50, NORMS: HELD,
            }  # fmt: skip
