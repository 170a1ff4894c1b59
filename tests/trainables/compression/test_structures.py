"""Structures of weights against loops over their elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from trainables.compression.structures import Structures

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
    (Structures("Blocks", block=(5, 3)), (5, 12), lambda f, c: c // 3),  # heads of an attention's output projection
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
