"""Savings and drops against plain arithmetic, trial by trial."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import analysis
from analysis.metrics.ranking import baseline_of
from analysis.presentation.markdown_report import ranked_table
from analysis.presentation.summary_text import headline, settings_text

SAVED = {
    "time_saved": "train_time_s",
    "communication_saved": "gradient_bytes",
    "optimizer_bytes_saved": "optimizer_bytes",
    "peak_memory_saved": "peak_memory_bytes",
}

counts = st.one_of(st.none(), st.integers(0, 10**12))
trial = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["baseline", "search", "control"]),
        "status": st.sampled_from(["completed", "completed", "completed", "failed", "running", "pruned"]),
        "seed": st.integers(0, 1),
        "workload": st.sampled_from(["digits", "theirs"]),
        "study": st.sampled_from(["a", "b"]),
        "epochs": st.sampled_from([10, 20]),
        "accuracy": st.one_of(st.none(), st.floats(0, 1)),
        "compute_saved": st.floats(-1, 1),
        "backward_saved": st.floats(-1, 1),
        "executed_flops": counts, "backward_flops": counts, "dense_flops": counts,
        "train_time_s": counts, "gradient_bytes": counts, "optimizer_bytes": counts, "peak_memory_bytes": counts,
    }
)  # fmt: skip


def mean(values: list[Any]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else np.nan


def number(value: Any) -> float:
    return np.nan if value is None else value


def share(spent: Any, whole: float) -> float:
    return 1 - number(spent) / whole if whole > 0 else np.nan


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(trial, min_size=1, max_size=12))
def test_against_the_baseline_of_its_own_study_workload_and_seed(trials: list[dict[str, Any]]) -> None:
    relative = analysis.relative_to_baseline(pd.DataFrame(trials))
    for position, one in enumerate(trials):
        same = [
            t
            for t in trials
            if (t["role"], t["status"]) == ("baseline", "completed")
            and all(t[key] == one[key] for key in ("study", "workload", "seed"))
        ]
        same = [t for t in same if t["epochs"] == max(t["epochs"] for t in same)]
        got = relative.iloc[position]
        expected = {"accuracy_drop": mean([t["accuracy"] for t in same]) - number(one["accuracy"])}
        for name, spent in SAVED.items():
            expected[name] = share(one[spent], mean([t[spent] for t in same]))
        other_length = bool(same) and one["epochs"] != same[0]["epochs"]
        budget = mean([t["dense_flops"] for t in same])
        other_budget = budget > 0 and abs(number(one["dense_flops"]) - budget) > 1e-9 * budget
        for name, spent, whole in (
            ("compute_saved", "executed_flops", "dense_flops"),
            ("backward_saved", "backward_flops", "backward_flops"),
        ):
            restated = share(one[spent], mean([t[whole] for t in same]))
            here = other_length or (other_budget and not np.isnan(restated))
            expected[name] = restated if here else one[name]
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name
    pd.testing.assert_frame_equal(analysis.relative_to_baseline(relative), relative)


def searched_options() -> pd.DataFrame:
    """Two combinations of options: the second's baseline is worse, so its trials lose less than it seems."""
    return pd.DataFrame(
        {
            "trial": range(6),
            "role": ["baseline", "search", "baseline", "search", "search", "search"],
            "status": "completed",
            "seed": 0,
            "method": ["none", "gradskip", "none", "gradskip", "gradskip", "gradskip"],
            "options": ["lr=0.1", "lr=0.1", "lr=0.5", "lr=0.5", "lr=0.5", "lr=0.9"],
            "accuracy": [0.95, 0.94, 0.80, 0.795, 0.75, 0.99],
            "compute_saved": [0.0, 0.3, 0.0, 0.4, 0.5, 0.6],
        }
    )


def test_trials_of_searched_options_are_compared_with_the_baseline_of_their_own() -> None:
    trials = searched_options()
    relative = analysis.relative_to_baseline(trials)
    assert relative["accuracy_drop"].tolist()[:5] == pytest.approx([0, 0.01, 0, 0.005, 0.05])
    assert math.isnan(relative["accuracy_drop"][5])  # its baseline did not complete
    with pytest.warns(UserWarning, match=r"no completed baseline of options lr=0\.9: the accuracy loss of 1 of the 6"):
        ranking = analysis.rank(trials, allowed_drop=0.01)
    found = ranking.set_index("trial")
    assert found["baseline"].astype("object").where(found["baseline"].notna(), None).to_dict() == {
        3: 2, 1: 0, 0: 0, 2: 2, 4: 2, 5: None,
    }  # fmt: skip
    assert ranking["trial"].tolist() == [3, 1, 0, 2, 4, 5]
    assert list(ranking.columns[:4]) == ["rank", "trial", "role", "baseline"]
    one = trials[trials["options"] == "lr=0.1"]
    assert "baseline" not in analysis.rank(one, allowed_drop=0.01)
    assert "baseline" not in analysis.rank(one.drop(columns="options"), allowed_drop=0.01)


def test_a_confirmation_pairs_runs_of_one_seed_and_of_the_same_options() -> None:
    rows = []
    for seed in (1, 2, 3):
        for options, dense, number, lost in (("lr=0.1", 0.9, 7, 0.01), ("lr=0.5", 0.7, 8, 0.02)):
            accuracy = dense + seed / 1000
            rows.append({"role": "baseline", "options": options, "seed": seed, "accuracy": accuracy})
            found = {"candidate": number, "accuracy": accuracy - lost, "compute_saved": 0.3}
            rows.append({"role": "candidate", "options": options, "seed": seed, **found})
    table = analysis.confirm_table(pd.DataFrame(rows).assign(status="completed"), allowed_drop=0.03)
    assert table.set_index("candidate")["accuracy_drop"].to_dict() == pytest.approx({7: 0.01, 8: 0.02})
    assert table["seeds"].tolist() == [3, 3]


def test_searched_options_are_told_where_settings_are() -> None:
    trials = searched_options().head(5)
    ranking = analysis.rank(trials, allowed_drop=0.01).assign(
        test_accuracy=float("nan"), executed_flops=1, train_time_s=1.0, search_flops=1, dense_flops=1
    )
    header, first, *_ = ranked_table(ranking)
    assert dict(zip(header, first, strict=True))["baseline"] == "2"
    assert [settings_text(row) for _, row in ranking.iterrows()] == ["lr=0.5", "lr=0.1", "lr=0.1", "lr=0.5", "lr=0.5"]
    said = headline(ranking, analysis.best(ranking), 0.01)
    assert said.startswith("With lr=0.5, against the baseline of these options: take the settings of trial 3: saves")
    assert baseline_of(ranking, ranking.iloc[0])["trial"] == 2
