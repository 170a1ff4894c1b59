"""Frames that are not as `analysis.load` gives them: several studies, picked rows, CSV, categories, missing columns."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from studies import result_row, write_study

import analysis
from analysis.metrics.ranking import front_hypervolume, knee_trial, pareto_front
from trainables.config import TrialConfig
from trainables.errors import UserError

ORDER = ["rank", "trial", "role", "within_drop", "on_front", "accuracy", "accuracy_drop", "saved"]


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
    return analysis.load([easy, hard])


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
    front = pareto_front(both)
    assert set(front[["study", "trial"]].itertuples(index=False, name=None)) == expected
    assert front["saved"].tolist() == [0.7, 0.6, 0.4]
    assert list(front.columns) == list(both.columns)
    assert ranking["trial"].tolist()[:2] == [2, 1]
    assert ranking["study"].tolist()[:2] == ["hard", "hard"]
    assert front_hypervolume(both) == pytest.approx(front_hypervolume(both, reference=(0.05, 0.0)))
    assert front_hypervolume(both) == pytest.approx(0.05 * 0.4 + 0.04 * 0.2)
    knee = knee_trial(both)
    assert knee is not None
    assert (knee["study"], knee["trial"]) == ("hard", 2)


def test_accuracy_itself_is_compared_among_several_with_a_warning(both: pd.DataFrame) -> None:
    with pytest.warns(
        UserWarning, match=r"^accuracy of several studies, .* accuracy_drop compares each trial with its"
    ):
        front = pareto_front(both, ("accuracy", "compute_saved"))
    assert ("easy", 0) in set(front[["study", "trial"]].itertuples(index=False, name=None))


def test_a_study_without_a_baseline_among_others_is_named(both: pd.DataFrame) -> None:
    both.loc[(both["study"] == "hard") & (both["role"] == "baseline"), "status"] = "failed"
    both = both.drop(columns=["accuracy_drop"])
    said = r"^no completed baseline of study hard seed 1: the accuracy loss of 3 of the 7 trials is not known, so they"
    with pytest.warns(UserWarning, match=said) as caught:
        ranking = analysis.rank(both)
    assert len(caught) == 1
    assert ranking["study"].tolist()[-3:] == ["hard"] * 3
    assert len(ranking) == 7
    with pytest.warns(UserWarning, match=said):
        assert set(pareto_front(both)["study"]) == {"easy"}


def from_csv(trials: pd.DataFrame) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(trials.to_csv(index=False)))


def all_text(trials: pd.DataFrame) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(trials.to_csv(index=False)), dtype=str)


def categories(trials: pd.DataFrame) -> pd.DataFrame:
    return trials.astype("category")


def plain_objects(trials: pd.DataFrame) -> pd.DataFrame:
    return trials.astype("object")


def twice_the_same_index(trials: pd.DataFrame) -> pd.DataFrame:
    return trials.set_axis([7] * len(trials))


@pytest.mark.slow
@pytest.mark.parametrize("through", [from_csv, all_text, categories, plain_objects, twice_the_same_index])
def test_whatever_a_frame_went_through(both: pd.DataFrame, through: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    expected = analysis.rank(both, allowed_drop=0.015)
    found = analysis.rank(through(both), allowed_drop=0.015)
    numbers = ["accuracy", "accuracy_drop", "saved"]
    np.testing.assert_allclose(found[numbers].to_numpy(float), expected[numbers].to_numpy(float))
    for name in [*ORDER, "duplicate_of"]:
        if name not in numbers:
            assert found[name].fillna(-1).tolist() == expected[name].fillna(-1).tolist(), name
    assert through(pareto_front(through(both)))["trial"].astype(int).tolist() == pareto_front(both)["trial"].tolist()


def test_without_roles_drops_that_are_there_count(both: pd.DataFrame) -> None:
    one = both[both["study"] == "easy"].drop(columns="role")
    ranking = analysis.rank(one, allowed_drop=0.02)
    assert ranking["trial"].tolist() == [1, 0, 2, 3]
    assert ranking["role"].isna().all()
    assert pareto_front(one)["trial"].tolist() == [2, 1, 0]
    bare = one.drop(columns="accuracy_drop")
    assert pareto_front(bare)["trial"].tolist() == [2, 1, 0]  # one yardstick: accuracies compare
    with pytest.raises(
        UserError, match=r"^the trials have no column 'role', which says .* and no column 'accuracy_drop'"
    ):
        analysis.rank(bare)
    with pytest.raises(UserError, match=r"^the trials have no column 'role'"):
        pareto_front(both.drop(columns=["role", "accuracy_drop"]))


def test_a_trial_without_a_role_does_not_vanish(both: pd.DataFrame) -> None:
    both.loc[both["trial"] == 2, "role"] = pd.NA
    assert len(analysis.rank(both)) == 8
    assert len(pareto_front(both)) == 3


@pytest.mark.parametrize("name", ["trial", "status", "accuracy", "compute_saved"])
def test_a_column_that_is_needed_is_named(both: pd.DataFrame, name: str) -> None:
    with pytest.raises(
        UserError, match=rf"^the trials have no column '{name}', this needs trial, status, accuracy, comp"
    ):
        analysis.rank(both.drop(columns=name))


def test_what_cannot_be_a_number_is_named(both: pd.DataFrame) -> None:
    text = both.astype({"accuracy": "object"})
    text.loc[3, "accuracy"] = "high"
    for function in (analysis.rank, pareto_front, analysis.relative_to_baseline, analysis.control_line):
        with pytest.raises(UserError, match=r"^the column 'accuracy' must hold numbers, got 'high' in row 3$"):
            function(text)
    with pytest.raises(UserError, match=r"^each column of the trials must be there once, 'accuracy' is there twice"):
        analysis.rank(pd.concat([both, both[["accuracy"]]], axis="columns"))
    with pytest.raises(
        UserError, match=r"^no completed trial has a value in the column 'accuracy': give it a metric of"
    ):
        analysis.rank(both.assign(accuracy=np.nan))


@pytest.mark.slow
def test_rows_of_several_studies_that_nothing_tells_apart_are_refused(both: pd.DataFrame) -> None:
    together = both.drop(columns=["study", "seed"])
    with pytest.raises(UserError, match=r"^trial 0 is there twice: rows of several studies need a column 'study' that"):
        analysis.rank(together)
    # Their seeds tell these two apart.
    assert len(analysis.rank(both.drop(columns="study"))) == 8


def test_controls_and_confirmations_read_the_same_frames(both: pd.DataFrame) -> None:
    both.loc[both["trial"] == 1, ["role", "control"]] = ["control", "shorter"]
    one = both[both["study"] == "easy"]
    expected = analysis.control_line(one)
    pd.testing.assert_frame_equal(analysis.control_line(all_text(one)), expected, check_dtype=False)
    with pytest.raises(
        UserError, match=r"^a line of controls is of one study and seed, got several: pick the rows of one"
    ):
        analysis.control_line(both)
    with pytest.raises(UserError, match=r"^the trials have no column 'role', this needs trial, role, status"):
        analysis.control_line(one.drop(columns="role"))
    runs = pd.DataFrame(
        {"role": ["baseline"] * 3 + ["candidate"] * 3, "candidate": [None] * 3 + [17] * 3, "seed": [1, 2, 3] * 2,
         "status": "completed", "test_accuracy": [0.97, 0.96, 0.98, 0.968, 0.957, 0.979],
         "compute_saved": [0.0] * 3 + [0.3] * 3}
    )  # fmt: skip
    table = analysis.confirm_table(runs, allowed_drop=0.005)
    for through in (from_csv, all_text, categories):
        pd.testing.assert_frame_equal(analysis.confirm_table(through(runs), allowed_drop=0.005), table)
    with pytest.raises(UserError, match=r"^the trials have no column 'seed', this needs role, candidate, seed"):
        analysis.confirm_table(runs.drop(columns="seed"), allowed_drop=0.005)


def test_a_status_that_nobody_knows_is_named_and_nothing_vanishes(both: pd.DataFrame) -> None:
    theirs = both.assign(status=both["status"].replace("completed", "COMPLETE"))
    for call in (analysis.rank, pareto_front):
        with pytest.raises(UserError, match=r"^the column 'status' must hold completed, .*, got 'COMPLETE' in row 0: "):
            call(theirs)


@pytest.mark.parametrize("values", [[1, None], [True, None], ["1", None], [0.5, None]])
def test_categories_with_a_missing_value_are_read(both: pd.DataFrame, values: list[Any]) -> None:
    more = [values[place % 2] for place in range(len(both))]
    ranking = analysis.rank(both.assign(mine=pd.Categorical(more)))
    kept = ranking.sort_values(["study", "trial"])["mine"]
    assert [None if pd.isna(v) else v for v in kept] == more


def test_the_line_of_controls_begins_at_their_own_baseline() -> None:
    rows = [("baseline", None, 1, 0.5, 0.0), ("baseline", None, 0, 0.97, 0.0), ("control", "shorter", 0, 0.95, 0.4)]
    frame = pd.DataFrame(
        [{"role": r, "control": c, "seed": s, "accuracy": a, "compute_saved": saved} for r, c, s, a, saved in rows]
    ).assign(status="completed", epochs=10, trial=[0, 0, 1])
    line = analysis.control_line(frame)
    assert line["accuracy"].tolist() == [0.97, 0.95]
    for theirs in (
        frame.assign(control=pd.Categorical(frame["control"])),
        frame.assign(compute_saved=["0", "0", "0.4"]),
    ):
        assert analysis.beats_shorter(theirs, line).isna().all()
    with pytest.raises(UserError, match="the trials have no column 'status'"):
        analysis.beats_shorter(frame.drop(columns="status"), line)
