"""Exact counts against sorting in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.compression.pruners.ranked import element_count, kept_after, structure_count

VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf, math.nan]) | st.floats(0, 3, width=16), min_size=1)


@settings(max_examples=60)
@given(values=VALUES, share=st.floats(0, 1))
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16])
def test_the_smallest_go_and_of_equal_ones_the_first(kind: torch.dtype, values: list[float], share: float) -> None:
    count = element_count(share, len(values))
    # A NaN is as large as can be.
    order = sorted(range(len(values)), key=lambda i: (math.inf if math.isnan(values[i]) else values[i], i))
    expected = [i not in order[:count] for i in range(len(values))]
    assert kept_after(torch.tensor(values, dtype=kind), count).tolist() == expected


@pytest.mark.parametrize(
    ("share", "n", "group_size", "count"),
    [
        (0.0, 16, 1, 0),
        (0.5, 16, 1, 8),
        (0.49, 10, 1, 4),
        (1.0, 16, 1, 16),
        (0.7, 16, 8, 8),
        (0.4, 16, 8, 0),
        (1.0, 20, 8, 16),
        (math.nextafter(1.0, 0.0), 1, 1, 0),
    ],
)
def test_structures_are_counted_down_to_a_group_and_never_all_unless_asked(
    share: float, n: int, group_size: int, count: int
) -> None:
    assert structure_count(share, n, group_size) == count
