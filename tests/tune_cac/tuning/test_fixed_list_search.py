"""A search whose runs are given: order, what is passed over, what is tried again. On a real journal, without Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from searchers import CONTEXT, row, told
from studies import result_row, write_study

import search_spaces
from analysis.io.layout import Layout, StudyInfo
from trainables.config import TrialConfig
from tune_cac.cli.main import main
from tune_cac.study.folder import is_locked, locked
from tune_cac.tuning.confirmation import FixedListSearch
from tune_cac.tuning.outcomes.outcome_queue import unsure_trials, write_holds
from tune_cac.tuning.search_plan import SearchPlan
from tune_cac.tuning.study_searcher import FINISHED
from tune_cac.tuning.study_trials import PredefinedTrial

RUNS = [PredefinedTrial(attrs={"role": "baseline"}, values={"method": "none", "seed": seed}) for seed in (1, 2, 3)]


def given(folder: Path) -> FixedListSearch:
    plan = SearchPlan(
        space=search_spaces.load("auto_thresholds"), context=CONTEXT, base=TrialConfig(method="none"),
        journal=folder / "optuna.journal", allowed_drop=0.01, seed=0, run_folder="ray/run-000", checkpoint_every_s=60,
        tree=folder / "tree", budget_bytes=0, trials=3,
    )  # fmt: skip
    return FixedListSearch(plan, RUNS)


def seeds(*suggested: Any) -> list[int]:
    return [each["config"]["seed"] for each in suggested]


def test_runs_are_trained_in_their_order_and_once(tmp_path: Path) -> None:
    search = given(tmp_path)
    assert seeds(*(search.suggest(name) for name in "abc")) == [1, 2, 3]
    assert search.suggest("d") is None  # one of them may have to be begun again
    for name in "abc":
        search.on_trial_complete(name, row(0.9, 0.0))
    assert search.suggest("d") == FINISHED
    assert [trial.values for trial in told(tmp_path)] == [[0.9, 0.0]] * 3
    assert given(tmp_path).suggest("e") == FINISHED
    assert unsure_trials(search) == []  # runs of several seeds say nothing of other seeds
    layout = Layout(tmp_path)
    layout.write_info(StudyInfo(space="auto_thresholds", workload="digits", epochs=1, seed=0, versions={}))
    write_holds(layout, search)
    assert layout.read_info().holds == {}


def test_what_was_interrupted_or_failed_is_trained_again_and_what_diverged_is_not(tmp_path: Path) -> None:
    first = given(tmp_path)
    for name in "abc":
        first.suggest(name)
    first.tell_failure("a", "OutOfMemoryError: no memory")
    first.tell_failure("b", "TrainingDiverged: the accuracy is nan in epoch 1")
    assert first.suggest("d") is None  # not in the same call
    second = given(tmp_path)
    second.adopt_unfinished()
    assert len(second.missing()) == 2
    assert seeds(second.suggest("e"), second.suggest("f")) == [1, 3]
    second.tell_failure("e", "OutOfMemoryError: no memory")
    assert second.suggest("g") is None
    assert len(given(tmp_path).missing()) == 1  # the third is under way in the second


def test_a_run_whose_worker_died_is_begun_again_once(tmp_path: Path) -> None:
    search = given(tmp_path)
    for name in "abc":
        search.suggest(name)
    assert search.tell_failure("b", "its worker died (killed)", died=True)
    assert seeds(search.suggest("d")) == [2]
    assert not search.tell_failure("d", "its worker died (killed)", died=True)
    for name in "ac":
        search.on_trial_complete(name, row(0.9, 0.0))
    assert search.suggest("e") == FINISHED


def test_a_study_at_work_is_known_by_its_lock(tmp_path: Path) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row()}])
    assert not is_locked(layout)
    with locked(layout):
        assert is_locked(layout)
    assert not is_locked(layout)


def test_a_confirmation_is_not_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = write_study(tmp_path / "s", [{"row": result_row()}])
    child = Layout(layout.root / "confirmation")
    child.root.mkdir()
    child.write_info(replace(layout.read_info(), candidates=[3]))
    assert main(["search", "--resume", str(child.root)]) == 2
    assert f"is a confirmation: go on with python -m tune_cac confirm {layout.root}" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"no JSON\n", b'{"op_code": 8, "x": "\xff\xfe"}\n'])
def test_a_damaged_journal_is_one_line(damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"row": result_row()}, {"row": result_row(0.97, 0.3), "config": TrialConfig().to_dict()}]
    layout = write_study(tmp_path / "s", rows)
    lines = layout.journal.read_bytes().splitlines(keepends=True)
    layout.journal.write_bytes(b"".join([*lines[:2], damage, *lines[2:]]))
    with pytest.warns(UserWarning, match="optuna.journal"):
        assert main(["search", "--resume", str(layout.root)]) == 2
    assert f"the journal {layout.journal} is damaged (" in capsys.readouterr().err
    assert main(["dashboard", str(layout.root), "--no-browser", "--port", "1"]) == 2
