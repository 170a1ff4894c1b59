"""Front and area of plain numbers against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.metrics.pareto import hypervolume, non_dominated

#: Few distinct numbers, so that ties of every kind occur.
few = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, 2.0, math.inf])
whole = st.integers(0, 4).map(float)


@given(st.lists(st.tuples(few, few), max_size=25))
def test_the_front_is_what_no_other_row_dominates(rows: list[tuple[float, float]]) -> None:
    expected = [not any(x >= a and y >= b and (x > a or y > b) for x, y in rows) for a, b in rows]
    assert non_dominated(rows).tolist() == expected


@given(st.lists(st.tuples(whole, whole), max_size=8), st.tuples(st.integers(-1, 3), st.integers(-1, 3)))
def test_the_hypervolume_is_the_number_of_dominated_unit_cells(
    rows: list[tuple[float, float]], reference: tuple[int, int]
) -> None:
    cells = 0
    for corner in itertools.product(*(range(low, 4) for low in reference)):
        # The cell reaches from the corner one unit up in both columns.
        cells += any(x >= corner[0] + 1 and y >= corner[1] + 1 for x, y in rows)
    assert hypervolume(np.array(rows), reference) == pytest.approx(cells)
