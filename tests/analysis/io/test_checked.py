"""Frames that are not as `analysis.load` gives them of one study: several studies, picked rows, missing columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from studies import result_row, write_study

import analysis
from trainables.config import TrialConfig
from trainables.errors import UserError


def study(folder: Path, baseline: float, rows: list[tuple[float, float]], seed: int = 0) -> Path:
    """A study on disk: a baseline's accuracy, then accuracy and compute saved of each trial."""
    config = TrialConfig(method="gradskip", seed=seed, CAC_VAR_START_THR=0.9)
    trials: list[dict[str, Any]] = [
        {"row": result_row(baseline), "config": TrialConfig(method="none", seed=seed).to_dict()}
    ]
    for place, (accuracy, saved) in enumerate(rows):
        own = {**config.to_dict(), "CAC_VAR_START_THR": 0.5 + place / 100}
        trials.append({"row": result_row(accuracy, saved), "config": own})
    return write_study(folder, trials).root


@pytest.fixture
def both(tmp_path: Path) -> pd.DataFrame:
    """An easy seed and a hard one: what is good on the hard one is worse than anything on the easy one."""
    easy = study(tmp_path / "easy", 0.98, [(0.96, 0.3), (0.95, 0.5), (0.90, 0.4)])
    hard = study(tmp_path / "hard", 0.90, [(0.90, 0.4), (0.89, 0.6), (0.80, 0.7)], seed=1)
    frames = [analysis.load(folder).assign(study=folder.name) for folder in (easy, hard)]
    return pd.concat(frames, ignore_index=True)


def test_each_trial_counts_by_its_own_baseline_in_ranks_and_fronts(both: pd.DataFrame) -> None:
    drops = {("easy", 1): (0.02, 0.3), ("easy", 2): (0.03, 0.5), ("easy", 3): (0.08, 0.4), ("easy", 0): (0, 0),
             ("hard", 0): (0, 0), ("hard", 1): (0, 0.4), ("hard", 2): (0.01, 0.6), ("hard", 3): (0.1, 0.7)}  # fmt: skip
    expected = {
        name
        for name, (drop, saved) in drops.items()
        if not any(d <= drop and s >= saved and (d < drop or s > saved) for d, s in drops.values())
    }
    assert expected == {("hard", 1), ("hard", 2), ("hard", 3)}
    ranking = analysis.rank(both, allowed_drop=0.015)
    assert set(ranking[ranking["on_front"]][["study", "trial"]].itertuples(index=False, name=None)) == expected
    assert ranking["trial"].tolist()[:2] == [2, 1]
    assert ranking["study"].tolist()[:2] == ["hard", "hard"]


def test_a_study_without_a_baseline_among_others_is_named(both: pd.DataFrame) -> None:
    both.loc[(both["study"] == "hard") & (both["role"] == "baseline"), "status"] = "failed"
    both = both.drop(columns=["accuracy_drop"])
    said = r"^no completed baseline of study hard seed 1: the accuracy loss of 3 of the 7 trials is not known, so they"
    with pytest.warns(UserWarning, match=said) as caught:
        ranking = analysis.rank(both)
    assert len(caught) == 1
    assert ranking["study"].tolist()[-3:] == ["hard"] * 3
    assert len(ranking) == 7
    assert set(ranking.loc[ranking["on_front"], "study"]) == {"easy"}


@pytest.mark.parametrize("name", ["trial", "role", "status", "accuracy", "compute_saved"])
def test_a_column_that_is_needed_is_named(both: pd.DataFrame, name: str) -> None:
    with pytest.raises(
        UserError, match=rf"^the trials have no column '{name}', this needs trial, role, status, accuracy, comp"
    ):
        analysis.rank(both.drop(columns=name))


def test_rows_of_several_studies_that_nothing_tells_apart_are_refused(both: pd.DataFrame) -> None:
    together = both.drop(columns=["study", "seed"])
    with pytest.raises(UserError, match=r"^trial 0 is there twice: rows of several studies need a column 'study' that"):
        analysis.rank(together)
    # Their seeds tell these two apart.
    assert len(analysis.rank(both.drop(columns="study"))) == 8


def test_a_line_of_controls_is_of_one_study(both: pd.DataFrame) -> None:
    both.loc[both["trial"] == 1, ["role", "control"]] = ["control", "shorter"]
    with pytest.raises(
        UserError, match=r"^a line of controls is of one study and seed, got several: pick the rows of one"
    ):
        analysis.control_line(both)


def test_the_line_of_controls_begins_at_their_own_baseline() -> None:
    rows = [("baseline", None, 1, 0.5, 0.0), ("baseline", None, 0, 0.97, 0.0), ("control", "shorter", 0, 0.95, 0.4)]
    frame = pd.DataFrame(
        [{"role": r, "control": c, "seed": s, "accuracy": a, "compute_saved": saved} for r, c, s, a, saved in rows]
    ).assign(status="completed", epochs=10, trial=[0, 0, 1])
    line = analysis.control_line(frame)
    assert line["accuracy"].tolist() == [0.97, 0.95]
