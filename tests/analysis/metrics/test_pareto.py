"""Front, hypervolume and knee of plain numbers against brute force and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from analysis.metrics.pareto import hypervolume, knee, non_dominated
from trainables.errors import UserError


def tables(most_columns: int, numbers: st.SearchStrategy[float], most_rows: int) -> st.SearchStrategy[NDArray]:
    """(N, M) tables."""
    return st.integers(1, most_columns).flatmap(
        lambda columns: st.lists(st.lists(numbers, min_size=columns, max_size=columns), max_size=most_rows).map(
            lambda rows: np.array(rows, dtype=float).reshape(len(rows), columns)
        )
    )


#: Few distinct numbers, so that ties of every kind occur.
few = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, 2.0, math.inf])
whole = st.integers(0, 4).map(float)


def front_by_pairs(values: NDArray) -> list[bool]:
    """The definition, pair by pair."""
    return [not any((other >= row).all() and (other > row).any() for other in values) for row in values]


@given(tables(5, few, 25))
def test_the_front_is_what_no_other_row_dominates(values: NDArray) -> None:
    assert non_dominated(values).tolist() == front_by_pairs(values)


@pytest.mark.parametrize("columns", [3, 5])
@pytest.mark.parametrize("kind", ["random", "grid", "all on the front"])
def test_tables_that_must_be_split_agree_with_all_pairs(columns: int, kind: str) -> None:
    values = np.random.default_rng(columns).normal(size=(2500, columns))
    if kind == "grid":
        values = values.round(0 if columns < 5 else 1)
    if kind == "all on the front":
        values = np.abs(values) / np.linalg.norm(values, axis=1)[:, None]
    as_good = np.ones((len(values), len(values)), dtype=bool)
    better = ~as_good
    for column in values.T:
        as_good &= column >= column[:, None]
        better |= column > column[:, None]
    expected = ~(as_good & better).any(axis=1)
    assert (non_dominated(values) == expected).all()
    assert kind != "all on the front" or expected.all()


@given(tables(4, whole, 8), st.data())
def test_the_hypervolume_is_the_number_of_dominated_unit_cells(values: NDArray, data: st.DataObject) -> None:
    columns = values.shape[1]
    reference = data.draw(st.lists(st.integers(-1, 3), min_size=columns, max_size=columns))
    cells = 0
    for corner in itertools.product(*(range(low, 4) for low in reference)):
        upper = np.array(corner) + 1  # the cell reaches from the corner one unit up in every column
        # Rows that do not beat the reference everywhere dominate no cell above it.
        cells += bool((values >= upper).all(axis=1).any())
    assert hypervolume(values, reference) == pytest.approx(cells)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_the_knee_of_two_columns_is_farthest_above_the_line_between_the_ends(rows: list[tuple[int, int]]) -> None:
    values = np.array(rows, dtype=float).reshape(-1, 2)
    front = sorted({row for row, on in zip(rows, front_by_pairs(values), strict=True) if on})
    found = knee(values)
    if len(front) < 3:
        assert found is None
        return
    (x0, y0), (x1, y1) = front[0], front[-1]
    # Twice the area of the triangle over the line, in scaled units; positive above it.
    height = {
        (x, y): (x - x0) / (x1 - x0) + (y - y1) / (y0 - y1) - 1 for x, y in front
    }  # fmt: skip
    highest = max(height.values())
    if highest <= 1e-9:
        assert found is None
    else:
        assert found is not None
        assert height[rows[found]] == pytest.approx(highest)
        assert found == rows.index(rows[found])  # the first of equals


@pytest.mark.parametrize(
    "rows",
    [[], [[1, 0], [0, 1]], [[1, 0], [0, 1], [1, 0], [0, 0]], [[2, 0], [1, 1], [0, 2]], [[9, 0], [1, 1], [0, 9]]],
    ids=["empty", "two", "two distinct", "straight", "bulging inwards"],
)
def test_no_knee(rows: list[list[float]]) -> None:
    assert knee(np.array(rows, dtype=float).reshape(-1, 2)) is None


@pytest.mark.parametrize("function", [non_dominated, knee, lambda values: hypervolume(values, [0, 0])])
def test_nan_is_refused(function: object) -> None:
    with pytest.raises(UserError, match=r"^1 of 2 rows hold NaN, which cannot be compared: drop them first$"):
        function([[1, 2], [1, math.nan]])  # type: ignore[operator]


def test_shapes_and_infinities_are_refused_where_they_make_no_sense() -> None:
    for wrong in ([1, 2], np.empty((3, 0))):
        with pytest.raises(UserError, match="a table of rows and at least one column, got shape"):
            non_dominated(wrong)
    with pytest.raises(UserError, match=r"one number for each of the 2 columns, got shape \(3,\)"):
        hypervolume([[1, 2]], [0, 0, 0])
    for values, reference in (([[1, math.inf]], [0, 0]), ([[1, 2]], [0, -math.inf])):
        with pytest.raises(UserError, match="the hypervolume needs finite numbers"):
            hypervolume(values, reference)
    with pytest.raises(UserError, match="the knee needs finite numbers"):
        knee([[1, math.inf]])
