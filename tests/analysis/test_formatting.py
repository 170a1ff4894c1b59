"""Numbers as readers see them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.formatting import (
    allowed_text,
    axis_words,
    drop_number,
    drop_text,
    drop_unit,
    drop_words,
    value_with_unit,
)
from trainables.quality import ACCURACY, FRACTION, Quality

COUNTS = st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(-n, n), st.just(n)))


@given(COUNTS, st.sampled_from([0.0, 0.0033, 0.005, 0.01, 0.1]))
def test_what_is_above_the_allowed_drop_reads_so_and_nothing_else_does(counts: tuple[int, int], allowed: float) -> None:
    drop = counts[0] / counts[1]
    shown = Decimal(drop_number(drop, ACCURACY, allowed=allowed)) / 100
    assert (shown > Decimal(str(allowed))) == (drop > allowed + 1e-9)
    assert len(drop_number(drop, ACCURACY, allowed=allowed)) >= len(drop_number(drop, ACCURACY))


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


def test_a_relative_limit_says_what_it_comes_to() -> None:
    assert allowed_text("2%", NLL) == "2 % of the baseline's"
    assert allowed_text("2%", NLL, baseline=1.5) == "2 % of the baseline's, 0.03 nats"
