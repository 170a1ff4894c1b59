"""A study with a minimised metric is the mirror image of one with its negative: every function of the analysis."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import analysis
from analysis.metrics.saving import quality_of
from trainables.errors import UserError

VALUES = st.integers(-8, 8).map(lambda value: value / 4)
ROWS = st.lists(st.tuples(VALUES, st.integers(0, 8).map(lambda value: value / 10)), min_size=1, max_size=12)


def frame(rows: list[tuple[float, float]], *, gain: bool, roles: list[str] | None = None) -> pd.DataFrame:
    """Trials with a metric to maximise, ``gain``, or its negative to minimise, ``cost``; the first is the baseline."""
    sign, name = (1, "gain") if gain else (-1, "cost")
    roles = roles or ["baseline", *["search"] * (len(rows) - 1)]
    return pd.DataFrame(
        {
            "trial": range(len(rows)), "role": roles, "status": "completed", "seed": 0, "epochs": 10,
            "control": ["shorter" if role == "control" else None for role in roles],
            name: [sign * value for value, _ in rows], "compute_saved": [saved for _, saved in rows],
            "metric": name, "direction": "max" if gain else "min", "metric_unit": "",
        }
    )  # fmt: skip


@settings(max_examples=25)
@given(ROWS, st.sampled_from([0.0, 0.5, "20%"]))
def test_rankings_and_fronts_are_mirror_images(rows: list[tuple[float, float]], allowed: float | str) -> None:
    rows = [(rows[0][0], 0.0), *rows[1:]]
    gain, cost = (analysis.rank(frame(rows, gain=up), allowed_drop=allowed) for up in (True, False))
    assert gain["trial"].tolist() == cost["trial"].tolist()
    assert gain["gain"].tolist() == [-value for value in cost["cost"]]
    for first, second in (("gain_drop", "cost_drop"), ("within_drop", "within_drop"), ("on_front", "on_front")):
        assert gain[first].tolist() == cost[second].tolist(), first
    limit = allowed if isinstance(allowed, float) else 0.2 * abs(rows[0][0])
    inside = {place for place, (value, _) in enumerate(rows) if rows[0][0] - value <= limit + 1e-9}
    assert set(cost.loc[cost["within_drop"], "trial"]) == inside
    up, down = (frame(rows, gain=side) for side in (True, False))
    assert analysis.pareto_front(up)["trial"].tolist() == analysis.pareto_front(down)["trial"].tolist()
    assert analysis.front_hypervolume(up) == pytest.approx(analysis.front_hypervolume(down), abs=1e-12)
    assert analysis.front_hypervolume(up, reference=(-3.0, 0.0)) == pytest.approx(
        analysis.front_hypervolume(down, reference=(3.0, 0.0)), abs=1e-12
    )
    knees = [analysis.knee_trial(side) for side in (up, down)]
    assert (knees[0] is None) == (knees[1] is None)
    assert knees[0] is None or knees[1] is None or knees[0]["trial"] == knees[1]["trial"]


@settings(max_examples=25)
@given(ROWS, ROWS)
def test_lines_of_controls_are_mirror_images(
    controls: list[tuple[float, float]], rows: list[tuple[float, float]]
) -> None:
    roles = ["baseline", *["control"] * len(controls), *["search"] * len(rows)]
    both = [(1.0, 0.0), *controls, *rows]
    up, down = (frame(both, gain=gain, roles=roles) for gain in (True, False))
    lines = [analysis.control_line(side) for side in (up, down)]
    assert lines[0]["trial"].tolist() == lines[1]["trial"].tolist()
    reached = [analysis.accuracy_when_shorter(line, up["compute_saved"]) for line in lines]
    np.testing.assert_allclose(reached[0], -reached[1])
    beats = [analysis.beats_shorter(side, line) for side, line in zip((up, down), lines, strict=True)]
    assert beats[0].fillna("-").tolist() == beats[1].fillna("-").tolist()


def test_confirmations_are_mirror_images() -> None:
    generator = np.random.default_rng(0)
    tables = []
    values = generator.normal(5.0, 0.1, 15)
    for up in (True, False):
        sign, name = (1, "gain") if up else (-1, "cost")
        trials = pd.DataFrame(
            {
                "role": ["baseline"] * 5 + ["candidate"] * 10, "candidate": [None] * 5 + [3] * 5 + [4] * 5,
                "seed": [1, 2, 3, 4, 5] * 3, "status": "completed", name: sign * values,
                "compute_saved": [0.0] * 5 + [0.3] * 10, "metric": name, "direction": "max" if up else "min",
                "metric_unit": "",
            }
        )  # fmt: skip
        tables.append(analysis.confirm_table(trials, allowed_drop="10%"))
    up_table, down_table = tables
    assert up_table["confirmed"].tolist() == down_table["confirmed"].tolist() == [True, True]
    for column in ("drop_low", "drop_high"):
        np.testing.assert_allclose(up_table[column], down_table[column])
    np.testing.assert_allclose(up_table["gain_drop"], down_table["cost_drop"])
    assert down_table["compared"].unique().tolist() == ["cost"]


def test_the_metric_is_read_from_the_rows() -> None:
    assert quality_of(frame([(1.0, 0.0)], gain=False)).sign == -1
    assert quality_of(None).is_accuracy
    mixed = pd.concat([frame([(1.0, 0.0)], gain=up) for up in (True, False)])
    with pytest.raises(UserError, match="trials must be of one metric to be compared, got cost, gain: pick"):
        analysis.rank(mixed)
