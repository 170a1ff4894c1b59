"""Optuna studies that no search of ours wrote, against what Optuna itself says of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pytest
from optuna.storages.journal import JournalFileBackend
from ray_files import write_trial

import analysis
from analysis.io.foreign import IDENTITY, ForeignTrial, foreign_frame, trial_dtypes
from trainables.config import field_names
from trainables.errors import UserError
from trainables.metrics import METRICS, RELATIVE

STATE = optuna.trial.TrialState
OUR_COLUMNS = {*IDENTITY, *METRICS, *field_names()}
STATES = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}


def create(path: Path, **options: Any) -> optuna.Study:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    return optuna.create_study(study_name="theirs", storage=storage, **options)


def objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 0, 1)
    size = trial.suggest_int("size", 1, 100, log=True)
    kind = trial.suggest_categorical("kind", ["a", "b", "c"])
    trial.suggest_categorical("flag", [True, False])
    if trial.number > 2:
        trial.suggest_float("later", 0, 1)
    trial.set_user_attr("note", [1, 2])
    if trial.number == 3:
        raise optuna.TrialPruned
    if trial.number == 4:
        raise ValueError("no")
    return x + size + len(kind)


def test_a_journal_of_optunas_says_what_optuna_says(tmp_path: Path) -> None:
    path = tmp_path / "optuna.journal"  # also where a study of ours has it
    theirs = create(path, sampler=optuna.samplers.RandomSampler(seed=0))
    theirs.optimize(objective, n_trials=6, catch=(ValueError,))
    theirs.ask()  # runs
    theirs.enqueue_trial({"x": 0.5})  # has not begun
    expected = theirs.trials_dataframe()
    expected = expected[expected["state"] != "WAITING"]
    for source in (path, tmp_path):
        trials = analysis.load(source)
        assert trials["trial"].tolist() == expected["number"].tolist() == list(range(7))
        assert trials["status"].tolist() == [STATES[state] for state in expected["state"]]
        assert set(trials["status"]) == set(STATES.values())
        for name in ("x", "size", "kind", "flag", "later"):
            same = trials[name].astype("object").where(trials[name].notna(), None).tolist()
            theirs_too = expected[f"params_{name}"].astype("object")
            assert same == theirs_too.where(theirs_too.notna(), None).tolist(), name
        assert trials["value"].tolist()[:3] == expected["value"].tolist()[:3]
        assert trials["note"].tolist()[:6] == ["[1, 2]"] * 6
        assert {name: str(trials[name].dtype) for name in ("x", "size", "kind", "flag")} == {
            "x": "float64", "size": "Int64", "kind": "string", "flag": "boolean",
        }  # fmt: skip
        invented = trials[sorted(OUR_COLUMNS - {"trial", "role", "status"})]
        assert invented.isna().all(axis=None)
        trials.to_parquet(tmp_path / "kept.parquet")
        pd.testing.assert_frame_equal(analysis.load(tmp_path / "kept.parquet"), trials)


def test_the_objectives_of_anybodys_optuna_study(tmp_path: Path) -> None:
    path = tmp_path / "theirs.journal"
    theirs = create(path, directions=["maximize", "minimize"])
    floats = optuna.distributions.FloatDistribution(0, 100)
    theirs.add_trial(
        optuna.trial.create_trial(
            values=[0.5, 7.0], params={"seed": 7.5, "hours": 3.0}, distributions={"seed": floats, "hours": floats}
        )
    )
    assert analysis.load(path)[["values_0", "values_1"]].values.tolist() == [[0.5, 7.0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        theirs.set_metric_names(["accuracy", "hours"])
    trials = analysis.load(path)
    # An objective named as a metric of ours is that metric; a parameter named as their other objective stays beside it.
    assert set(trials.columns) == OUR_COLUMNS | {"hours", "parameters/hours"}
    assert trials[["status", "accuracy", "hours", "parameters/hours", "seed"]].values.tolist() == [
        ["completed", 0.5, 7.0, 3.0, 7.5]
    ]
    assert trials["accuracy_drop"].isna().all()


def test_names_that_mean_something_else_here_are_told_apart() -> None:
    trials = [
        ForeignTrial(
            number=0,
            status="completed",
            metrics={"accuracy": "high", "saved": 3, "status": "good"},
            parameters={"trial": 8, "epochs": 5, "seed": "from the clock", "accuracy": 1.0},
            attributes={"workload": "theirs", "lr": 0.1},
        ),
        ForeignTrial(number=1, status="running", parameters={"seed": 3, "epochs": 6}),
    ]
    frame = foreign_frame(trials)
    first = frame.loc[0].dropna().to_dict()
    assert first == {
        "trial": 0, "role": "search", "status": "completed",
        "accuracy": "high", "metrics/saved": 3, "metrics/status": "good",
        "parameters/trial": 8, "epochs": 5, "seed": "from the clock", "parameters/accuracy": 1.0,
        "attributes/workload": "theirs", "lr": 0.1,
    }  # fmt: skip
    assert frame.loc[1].dropna().to_dict() == {
        "trial": 1, "role": "search", "status": "running", "seed": "3", "epochs": 6,
    }  # fmt: skip
    assert str(frame["epochs"].dtype) == "int64"
    ours = trial_dtypes()
    for name in set(ours) - {"trial", "role", "status", "accuracy", "epochs", "seed"}:
        assert str(frame[name].dtype) in (ours[name], ours[name].capitalize()), name
    assert set(METRICS) - {metric.name for metric in RELATIVE} <= set(frame.columns)


@pytest.mark.parametrize("config", [{}, {"epochs": 10, "seed": 0}, {"lr": 1}])
def test_a_study_with_attributes_of_our_names_is_theirs(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "theirs.journal"
    theirs = create(path)
    for attributes in ({"config": config}, {"row": [1], "big": 2**70}, {"continued_by": 3}):
        trial = theirs.ask()
        trial.suggest_float("lr", 0, 1)
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        theirs.tell(trial, 0.5 if trial.number == 0 else None, state=None if trial.number == 0 else STATE.FAIL)
    trials = analysis.load(path)
    assert trials["status"].tolist() == ["completed", "failed", "failed"]
    assert trials["lr"].notna().all()
    assert trials.loc[0, "value"] == 0.5
    assert trials.loc[1, "big"] == 2.0**70
    assert trials[["workload", "epochs", "seed", "method"]].isna().all(axis=None)


def test_an_experiment_with_folders_of_our_names_is_theirs(tmp_path: Path) -> None:
    for number in range(2):
        write_trial(tmp_path / f"trial-{number}", {"lr": 0.1, "seed": 2**63 + 5}, [{"loss": 0.5}], done=True)
    trials = analysis.load(tmp_path)
    assert trials[["status", "loss", "lr"]].values.tolist() == [["completed", 0.5, 0.1]] * 2
    assert trials["seed"].tolist() == [float(2**63 + 5)] * 2
    assert trials[["workload", "epochs", "method"]].isna().all(axis=None)


@pytest.mark.parametrize("accuracy", ["n/a", [0.3, 0.4]])
def test_a_metric_of_our_name_that_is_no_number_is_kept(accuracy: Any, tmp_path: Path) -> None:
    write_trial(
        tmp_path / "fn_0", {"lr": 0.1, "epochs": "auto"}, [{"accuracy": accuracy, "parameters": "many"}], done=True
    )
    trials = analysis.load(tmp_path)
    assert trials.loc[0, ["epochs", "parameters", "lr"]].tolist() == ["auto", "many", 0.1]
    assert trials.loc[0, "accuracy"] == (accuracy if isinstance(accuracy, str) else "[0.3, 0.4]")
    assert trials["accuracy_drop"].isna().all()
    with pytest.raises(UserError, match="must hold numbers"):
        analysis.rank(trials)


def test_an_experiment_that_is_not_ours_has_no_epochs_to_read(tmp_path: Path) -> None:
    write_trial(tmp_path / "fn_0", {"lr": 0.1, "config": {"lr": 0.1}}, [{"epoch": 1, "accuracy": 0.5}], done=True)
    trials = analysis.load(tmp_path)
    assert trials.loc[0, ["status", "accuracy", "lr", "config/lr"]].tolist() == ["completed", 0.5, 0.1, 0.1]
    assert trials[["workload", "epochs", "seed", "method"]].isna().all(axis=None)
    with pytest.raises(
        UserError, match=r"^epochs are read of trials of trainables.trial.Trial, those of .* are others"
    ):
        analysis.history(tmp_path)
