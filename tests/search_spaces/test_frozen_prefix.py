"""The order in which a frozen prefix is searched, against losses of invented runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import optuna
import pytest

from search_spaces import SpaceContext, load
from search_spaces.frozen_prefix import HALF, HELD, MOVING, NORMS, RATE, next_point, start
from search_spaces.space import Tried, describe

SPACE = load("frozen_prefix")
UNITS = 16
CONTEXT = SpaceContext(
    total_steps=180, epochs=6, layer_names=tuple(f"p{n}" for n in range(2 * UNITS + 1)),
    unit_ends=tuple(range(1, 2 * UNITS, 2)), has_norms=True,
)  # fmt: skip
Loss = Callable[[dict[str, Any], int], float]
SHALLOW = {"frozen": "prefix", "start": 0.0}


def searched(
    loss: Loss, context: SpaceContext = CONTEXT, allowed: float = 0.005, elsewhere: Loss | None = None
) -> list[Tried]:
    """Train what the space asks for, one after the other; ``elsewhere`` is an answer's mean loss over further seeds."""
    found: list[Tried] = []
    wanted: Tried | None = Tried(parameters=start(context), epochs=context.epochs)
    while wanted is not None:
        assert wanted.among(found) is None
        assert next_point(context, [*found, wanted]) is None  # all depends on the one that runs
        p, epochs = dict(wanted.parameters), wanted.epochs
        depth = p.get("depth", -1) + (1 - HALF) * p.get("deeper", 0)
        saved = (
            1 - (1 - (1 - p.get("start", 0.0)) * (depth + 1) / (len(context.unit_ends) + 4)) * epochs / context.epochs
        )
        lost = loss(p, epochs)
        found.append(replace(wanted, has_ended=True, saved=saved, lost=lost, is_within=lost <= allowed))
        while (wanted := next_point(context, found)) is None and elsewhere is not None:
            answer = max((one for one in found if one.is_within), key=lambda one: one.saved)
            if elsewhere(dict(answer.parameters), answer.epochs) <= allowed:
                break
            found[found.index(answer)] = replace(answer, is_within=False)
        assert len(found) < 20
    return found


def deepest_frozen(p: Mapping[str, Any]) -> int:
    """Return the depth that is frozen from the first step on."""
    return int(p.get("depth", -1)) if p.get("start", 0.0) == 0 else -1


def at_full_length(tried: list[Tried]) -> list[int]:
    return [
        one.parameters["depth"]
        for one in tried
        if {**one.parameters, **SHALLOW, RATE: 1.0} == one.parameters and one.epochs == CONTEXT.epochs
    ]


@pytest.mark.parametrize("deepest", range(-1, UNITS))
def test_the_deepest_prefix_is_found_by_bisection_and_then_what_follows_it(deepest: int) -> None:
    tried = searched(lambda p, epochs: 0.1 if deepest_frozen(p) > deepest or p.get("deeper", 0) > 2 else 0.0)
    depths = at_full_length(tried)
    assert len(depths) <= math.ceil(math.log2(UNITS + 1)) + 1
    assert max([d for d in depths if d <= deepest], default=-1) == deepest
    assert deepest + 1 in [*depths, UNITS]
    later = [one.parameters for one in tried if one.is_within and one.epochs == CONTEXT.epochs]
    if deepest < 0:
        assert {"frozen": "prefix", "depth": UNITS - 1, "start": HALF}.items() <= later[-2].items()
    elif deepest < UNITS - 1:
        reached = {p["depth"] + p["deeper"] for p in later if p["frozen"] == "deepening"}
        assert max(reached) == min(deepest + 2, UNITS - 1)


def test_of_many_layers_the_answer_is_a_sixteenth_of_the_depth_too_shallow_at_most() -> None:
    many = SpaceContext(
        total_steps=180, epochs=6, layer_names=("p",) * 101, unit_ends=tuple(range(100)), has_norms=True
    )
    for deepest in range(100):
        tried = searched(lambda p, epochs, deepest=deepest: 0.0 if deepest_frozen(p) <= deepest else 0.1, many)
        found = max([d for d in at_full_length(tried) if d <= deepest], default=-1)
        assert deepest - 6 < found <= deepest
        assert len(at_full_length(tried)) <= 6


@pytest.mark.parametrize(("held", "moving", "norms"), [(0.0, 0.1, HELD), (0.02, 0.03, HELD), (0.01, 0.0, MOVING)])
def test_norms_are_decided_first(held: float, moving: float, norms: str) -> None:
    tried = searched(lambda p, epochs: held if p[NORMS] == HELD else moving)
    assert tried[0].parameters == {NORMS: HELD, RATE: 1.0, **SHALLOW, "depth": 7, "CAC_PREFIX_MODE": "eval"}
    assert {one.parameters[NORMS] for one in tried[2:]} == {norms}
    alone = {NORMS: HELD, RATE: 1.0, "frozen": "nothing"}
    assert (tried[-1].parameters == alone) == (norms == HELD)  # the control of what norms gain


@pytest.mark.parametrize("gains", [0, 3])
def test_what_is_too_deep_is_tried_with_doubled_learning_rates(gains: int) -> None:
    def lost(p: Mapping[str, Any], epochs: int) -> float:
        reaches = 9 + (gains if p[RATE] == 2 else 0)
        return 0.1 if deepest_frozen(p) > reaches or "deeper" in p or epochs < 6 else 0.0

    tried = searched(lost)
    doubled = [one.parameters["depth"] for one in tried if one.parameters[RATE] == 2 and one.epochs == 6 and
               one.parameters["frozen"] == "prefix"]  # fmt: skip
    assert doubled[0] == 10  # the first that is too deep
    assert max(one.parameters["depth"] for one in tried if one.is_within and "depth" in one.parameters) == 9 + gains
    assert tried[-1].parameters == {NORMS: HELD, RATE: 2.0 if gains else 1.0, "frozen": "nothing"}


def test_a_length_that_fails_at_both_rates_is_no_reason_for_what_saves_less() -> None:
    tried = searched(lambda p, epochs: 0.1 if deepest_frozen(p) > 14 or "deeper" in p or epochs < 6 else 0.0)
    assert [(one.parameters["depth"], one.parameters[RATE], one.epochs) for one in tried if one.epochs < 6] == [
        (14, 1.0, 4), (14, 2.0, 4),
    ]  # fmt: skip


def test_so_is_the_first_length_that_loses_too_much() -> None:
    tried = searched(lambda p, epochs: 0.1 if p.get("depth", 0) > 9 or "deeper" in p or epochs < 6 / p[RATE] else 0.0)
    assert [(one.parameters["depth"], one.parameters[RATE], one.epochs) for one in tried if one.epochs < 6] == [
        (9, 1.0, 4), (9, 2.0, 4), (9, 2.0, 3),
    ]  # fmt: skip


def test_fewer_epochs_are_tried_at_the_deepest_prefix_until_they_lose_too_much() -> None:
    deep = 9
    tried = searched(lambda p, epochs: 0.1 if p.get("depth", 0) + p.get("deeper", 0) > deep or epochs < 4 else 0.0)
    assert [(one.parameters["depth"], one.epochs) for one in tried if one.epochs < 6] == [
        (9, 4),
        (9, 3),
        (9, 3),
        (4, 3),
    ]


def test_an_answer_that_loses_too_much_over_further_seeds_is_too_deep() -> None:
    tried = searched(
        lambda p, epochs: 0.0 if p.get("depth", 0) <= 9 and epochs == 6 and "deeper" not in p else 0.1,
        elsewhere=lambda p, epochs: 0.1 if p["depth"] > 8 else 0.0,
    )
    assert at_full_length(tried) == [7, 11, 9, 10, 8]
    deepest = max((one for one in tried if one.is_within), key=lambda one: one.saved)
    assert deepest.parameters["depth"] == 8


def test_no_deepening_begins_a_cache_anew_for_little() -> None:
    cached = replace(CONTEXT, forward_cache_mb=50)
    kinds = [{one.parameters["frozen"] for one in searched(lambda p, epochs: 0.1 * (deepest_frozen(p) > 9), c)}
             for c in (cached, CONTEXT)]  # fmt: skip
    assert ["deepening" in found for found in kinds] == [False, True]


@pytest.mark.parametrize(
    ("fixed", "asked"),
    [
        ({"CAC_STOP_LAYER_NUM": [9]}, {"start", "CAC_PREFIX_MODE", NORMS, RATE}),
        ({"CAC_STOP_LAYER_ITR": [0]}, {"depth", "CAC_PREFIX_MODE", NORMS, RATE}),
        ({"CAC_PREFIX_MODE": "train", NORMS: MOVING, RATE: 1.0}, {"frozen", "depth", "start", "deeper", "later"}),
    ],
)
def test_a_choice_may_be_fixed(fixed: dict[str, Any], asked: set[str]) -> None:
    context = replace(CONTEXT, fixed=fixed)
    assert {one.name for one in describe(SPACE, context)} == asked
    for lost in (0.1, 0.05):
        tried = searched(
            lambda p, epochs, lost=lost: 0.0 if p.get("depth", 0) <= 9 else lost / p.get(RATE, 1), context, 0.03
        )
    assert {name for one in tried for name in one.parameters} <= asked
    assert len({(str(one.parameters), one.epochs) for one in tried}) == len(tried)


def test_a_failed_run_counts_as_too_great_a_loss() -> None:
    tried = searched(lambda p, epochs: math.inf if p.get("depth", 0) > 3 else 0.0)
    assert max(d for d in at_full_length(tried) if d <= 3) == 3


def test_without_norms_or_layers() -> None:
    plain = SpaceContext(total_steps=10, epochs=2, layer_names=("a", "b"), unit_ends=(0,))
    prefix = {"frozen": "prefix", "depth": 0, "start": 0.0, "CAC_PREFIX_MODE": "eval", RATE: 1.0}
    assert [(one.parameters, one.epochs) for one in searched(lambda p, epochs: 0.0, plain)] == [
        (prefix, 2),
        (prefix, 1),
    ]
    doubled = [one.parameters for one in searched(lambda p, epochs: 0.1 if p[RATE] == 1 else 0.0, plain)]
    assert doubled == [prefix, {**prefix, RATE: 2.0}, {**prefix, RATE: 2.0}, {RATE: 2.0, "frozen": "nothing"}]
    none = SpaceContext(total_steps=10, epochs=2, layer_names=("a",), unit_ends=())
    assert searched(lambda p, epochs: 0.0, none)[0].parameters == {}


def test_its_points_are_settings_of_the_space() -> None:
    def stop(depth: int, share: float) -> tuple[int, int]:
        return 2 * depth + 1, round(180 * share) if share else -1  # never trains

    kinds = set()
    for one in searched(lambda p, epochs: 0.0 if deepest_frozen(p) <= 9 else 0.1):
        p = one.parameters
        trial = optuna.trial.FixedTrial(dict(p))
        values = SPACE.suggest(trial, CONTEXT)
        assert trial.params == p  # it asks for these and no others
        kinds.add(p["frozen"])
        if p["frozen"] == "nothing":
            assert values == {"CAC_VAR_START_THR": -1.0, NORMS: HELD}
            continue
        rate = {RATE: 2.0} if p[RATE] == 2 else {}
        stops = [stop(p["depth"], p["start"])]
        if p["frozen"] == "deepening":
            stops.append(stop(p["depth"] + p["deeper"], p["start"] + (1 - p["start"]) * p["later"]))
        layers, iterations = zip(*stops, strict=True)
        stopping = {"CAC_STOP_LAYER_NUM": layers, "CAC_STOP_LAYER_ITR": iterations, "CAC_PREFIX_MODE": "eval"}
        assert values == {**stopping, "forward_cache_mb": 0, NORMS: HELD, **rate}
    assert kinds == {"nothing", "prefix", "deepening"}
