"""The list of a study's trials that reads what has changed, against Optuna's own."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

from tune_cac.tuning import trial_list
from tune_cac.tuning.trial_list import TrialList


def opened(kind: str, folder: Path) -> optuna.Study:
    storages: dict[str, Any] = {
        "memory": optuna.storages.InMemoryStorage,
        "journal": lambda: optuna.storages.JournalStorage(JournalFileBackend(str(folder / "j"))),
        "database": lambda: optuna.storages.RDBStorage(f"sqlite:///{folder}/d"),
    }
    return optuna.create_study(storage=storages[kind](), study_name="s", load_if_exists=True)


def change(study: optuna.Study, draw: Random) -> None:
    """Do to a study one of the things that searches do to it."""
    running = study.get_trials(states=(TrialState.RUNNING,))
    match draw.choice(["queue", "ask", "add", "note", "tell", "fail"]):
        case "queue":
            study.enqueue_trial({"x": draw.random()})
        case "ask":
            study.ask()
        case "add":
            study.add_trial(create_trial(state=TrialState.RUNNING))
        case "note" if running:
            optuna.Trial(study, draw.choice(running)._trial_id).set_user_attr("noted", draw.random())
        case "tell" if running:
            study.tell(draw.choice(running).number, draw.random())
        case "fail" if running:
            study.tell(draw.choice(running).number, state=TrialState.FAIL)


@pytest.mark.parametrize("kind", ["memory", "journal", pytest.param("database", marks=pytest.mark.slow)])
def test_the_list_is_optunas_after_every_change(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_list, "_LISTED_PER_READ", 0)  # read one by one, however few there are
    study, draw = opened(kind, tmp_path), Random(0)
    other = study if kind == "memory" else opened(kind, tmp_path)  # as another process has it open
    trials, states = TrialList(study), set()
    for _ in range(40):
        for _ in range(draw.randint(0, 3)):
            change(draw.choice([study, other]), draw)
        if study.get_trials():
            assert trials.newest() == study.get_trials()[-1]
        first = draw.randint(0, len(study.get_trials()))
        assert trials.since(first) == study.get_trials()[first:]
        assert trials.read() == study.get_trials()
        states |= {trial.state for trial in trials.read()}
    assert states == {*TrialState} - {TrialState.PRUNED}


def test_a_long_study_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened("journal", tmp_path)
    study.add_trials([create_trial(value=1.0) for _ in range(500)])
    trials, listed = TrialList(study), []
    whole = study.get_trials
    monkeypatch.setattr(study, "get_trials", lambda **options: listed.append(1) or whole(**options))
    for _ in range(5):
        trial = study.ask()
        assert trials.read()[-1].state == TrialState.RUNNING
        study.tell(trial, 2.0)
        assert trials.read()[-1].value == 2.0
    assert len(listed) == 1
