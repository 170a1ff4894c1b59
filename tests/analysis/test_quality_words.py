"""Words and numbers of a metric: nothing speaks of accuracy or percent where the metric is none."""

from __future__ import annotations

import pytest

from analysis.formatting import (
    allowed_text,
    axis_words,
    drop_number,
    drop_text,
    drop_unit,
    drop_words,
    metric_words,
    value_text,
    value_with_unit,
)
from trainables.quality import ACCURACY, FRACTION, Quality

NLL = Quality(name="nll", direction="min", unit="nats")
F1 = Quality(name="f1", direction="max", unit=FRACTION)
BARE = Quality(name="reward", direction="max", unit="")


@pytest.mark.parametrize(
    ("quality", "value", "drop", "allowed", "axis", "worse"),
    [
        (ACCURACY, "97.00 %", "1.00 points", "0.50 points", "validation accuracy (%)", "accuracy loss"),
        (F1, "97.00 %", "1.00 points", "0.50 points", "f1 (%)", "drop in f1"),
        (NLL, "0.97 nats", "0.01 nats", "0.005 nats", "nll (nats)", "rise in nll"),
        (BARE, "0.97", "0.01", "0.005", "reward", "drop in reward"),
    ],
)
def test_units(quality: Quality, value: str, drop: str, allowed: str, axis: str, worse: str) -> None:
    assert (value_with_unit(0.97, quality), drop_text(0.01, quality)) == (value, drop)
    assert (allowed_text(0.005, quality), axis_words(quality), drop_words(quality)) == (allowed, axis, worse)
    assert drop_unit(quality) == {"fraction": " (points)", "nats": " (nats)", "": ""}[quality.unit]


def test_values_in_tables() -> None:
    assert [value_text(0.97, quality) for quality in (ACCURACY, NLL)] == ["0.9700", "0.97"]
    assert value_text(1234.5678, NLL) == "1234.6"
    assert metric_words(ACCURACY) == "validation accuracy"


def test_a_drop_above_the_limit_is_not_printed_as_the_limit() -> None:
    assert drop_number(0.0500004, NLL, allowed=0.05) == "0.0500004"
    assert drop_number(0.0499996, NLL, allowed=0.05) == "0.05"
    assert drop_number(-0.0, NLL, sign="+") == "+0"


def test_a_relative_limit_says_what_it_comes_to() -> None:
    assert allowed_text("2%", NLL) == "2 % of the baseline's"
    assert allowed_text("2%", NLL, baseline=1.5) == "2 % of the baseline's, 0.03 nats"
