"""Structures of weights against loops over their elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainables.compression.pruners import build_pruner
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.compression.structures import Structures

NOW = Moment(epoch=0, timing=Timing())
CONV, LINEAR = (6, 4, 2, 3), (5, 3)

#: Which structure an element is in, from its indices (filter, channel, kernel row, kernel column).
CASES: list[tuple[Structures, tuple[int, ...], Callable[..., int]]] = [
    (Structures("Filters"), CONV, lambda f, c, y, x: f),
    (Structures("Channels"), CONV, lambda f, c, y, x: c),
    (Structures("2D"), CONV, lambda f, c, y, x: f * 4 + c),
    (Structures("4D"), CONV, lambda f, c, y, x: 0),
    (Structures("Channels"), LINEAR, lambda f, c: c),
    (Structures("Rows"), LINEAR, lambda f, c: f),
    (Structures("Cols"), LINEAR, lambda f, c: c),
    (Structures("Filters"), (6, 4, 2), lambda f, c, x: f),
    # One block: r consecutive filters by d consecutive channels at one kernel position.
    (Structures("Blocks", block=(1, 4)), CONV, lambda f, c, y, x: f * 6 + y * 3 + x),
    (Structures("Blocks", block=(3, 1)), CONV, lambda f, c, y, x: ((f // 3) * 4 + c) * 6 + y * 3 + x),
    (Structures("Blocks", block=(2, 2)), CONV, lambda f, c, y, x: ((f // 2) * 2 + c // 2) * 6 + y * 3 + x),
]
IDS = [f"{structures.group}{structures.block} of {shape}" for structures, shape, _ in CASES]


@pytest.mark.parametrize(("structures", "shape", "place"), CASES, ids=IDS)
def test_split_spread_and_count(structures: Structures, shape: tuple[int, ...], place: Callable[..., int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    members: dict[int, list[float]] = {}
    for index in itertools.product(*map(range, shape)):
        members.setdefault(place(*index), []).append(float(weight[index]))
    parts = structures.split(weight)
    assert structures.count(weight.shape) == len(members) == len(parts)
    assert [sorted(part) for part in parts.tolist()] == [sorted(members[g]) for g in sorted(members)]
    mask = structures.spread(torch.arange(len(members)), weight)
    assert mask.dtype == weight.dtype
    assert mask.is_contiguous()
    for index in itertools.product(*map(range, shape)):
        assert mask[index] == place(*index)


@pytest.mark.parametrize("criterion", ["Max", "Mean_Abs"])
@pytest.mark.parametrize(
    ("group_type", "shape", "place"),
    [
        ("2D", CONV, lambda f, c, y, x: (f, c)),
        ("3D", CONV, lambda f, c, y, x: f),
        ("Filters", CONV, lambda f, c, y, x: f),
        ("4D", CONV, lambda f, c, y, x: 0),
        ("Channels", CONV, lambda f, c, y, x: c),
        # Rows and columns are those of torch's weight, as the regularizers count them.
        ("Rows", LINEAR, lambda f, c: f),
        ("Cols", LINEAR, lambda f, c: c),
    ],
)
def test_structures_below_a_threshold(
    group_type: str, shape: tuple[int, ...], place: Callable[..., object], criterion: str
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sizes: dict[object, list[float]] = {}
    for index in itertools.product(*map(range, shape)):
        sizes.setdefault(place(*index), []).append(abs(float(weight[index])))
    scores = {key: max(v) if criterion == "Max" else sum(v) / len(v) for key, v in sizes.items()}
    # Between two groups, so that some go and some stay; the whole weight goes.
    ordered = sorted(scores.values())
    threshold = (
        ordered[0] + 0.1 if len(ordered) == 1 else (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2
    )
    model = nn.ParameterDict({"w": nn.Parameter(weight)})
    settings = PRUNERS["StructureParameterPruner"](
        reg_regims={"w": [threshold, group_type]},  # type: ignore[call-arg]
        threshold_criteria=criterion,  # type: ignore[call-arg]
    )
    mask = build_pruner("p", settings, model, seed=0).masks({"w": weight}, {}, NOW)["w"]
    for index in itertools.product(*map(range, shape)):
        assert mask[index] == (scores[place(*index)] > threshold)
    assert bool((mask == 0).any())
