"""Budgets as users write them."""

from __future__ import annotations

import pytest

from trainables.errors import UserError
from tune_cac.study.options import SearchOptions, read_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("3600", 3600), ("1h30m", 5400), ("1 h 30 m", 5400), ("1.5H", 5400), ("2d", 172_800), (7, 7)],
)
def test_durations(text: str | int, seconds: float) -> None:
    assert read_duration(text) == seconds
    assert SearchOptions(time_budget=text).time_budget_s == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "soon", "30m1h", "1,5h", "m", "nan", "1h30", True, 0, float("inf")])
def test_what_is_no_duration(text: str | float) -> None:
    message = r"^--time-budget must be a positive number of seconds, or a duration such as 90m or 1h30m, got "
    with pytest.raises(UserError, match=message):
        read_duration(text)


@pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), True])
def test_what_is_no_cost_budget(value: float) -> None:
    assert SearchOptions(cost_budget=0.5).cost_budget == 0.5
    with pytest.raises(UserError, match=r"^--cost-budget must be a positive number of full trainings, such as 12\.5"):
        SearchOptions(cost_budget=value)
