"""What is loaded from real journals, Parquet files and Ray's result files, whole and damaged."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pytest
from optuna.storages.journal import JournalFileBackend
from ray_files import write_trial
from studies import result_row, write_study

import analysis
from analysis.io.dtypes import trial_dtypes
from analysis.io.layout import STUDY_NAME, Layout, StudyInfo
from analysis.io.studies import read_journal
from trainables.config import TrialConfig, field_names
from trainables.errors import UserError
from trainables.metrics import METRICS
from tune_cac.cli.main import main

ALL = {"trial", "role", "status", "error", "control", "candidate", "options", "of_epochs", *METRICS, *field_names()}
CONFIG = TrialConfig(method="gradskip", CAC_VAR_START_THR=0.97, CAC_WATCH=("conv",)).to_dict()


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    """A baseline, a trial that saves, a failed one, an interrupted one, two controls and a candidate."""
    shorter = {"role": "control", "control": "shorter"}
    return write_study(
        tmp_path / "mine",
        [
            {"row": result_row(0.9)},
            {"row": result_row(0.8, 0.25, gradient_bytes=60), "config": CONFIG},
            {"error": "ValueError: no"},
            {"error": "interrupted", "continued_by": "a later trial"},
            {"row": result_row(0.7), **shorter, "config": TrialConfig(method="none", epochs=24).to_dict()},
            {"row": result_row(0.7), "role": "candidate", "candidate": 1, "config": CONFIG},
        ],
    )


def write_parquet(layout: Layout) -> pd.DataFrame:
    """As a search does when it has ended."""
    trials = analysis.load(layout.root)
    trials.to_parquet(layout.trials)
    return trials


def open_study(layout: Layout) -> optuna.Study:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(layout.journal)))
    return optuna.load_study(study_name=STUDY_NAME, storage=storage)


def test_a_study_has_every_column_with_its_type_and_description(study: Layout) -> None:
    trials = analysis.load(study.root)
    assert set(trials.columns) == ALL
    assert trials["status"].tolist() == ["completed", "completed", "failed", "interrupted", "completed", "completed"]
    assert trials["control"].dropna().to_dict() == {4: "shorter"}
    assert trials["candidate"].dropna().to_dict() == {5: 1}
    saving = trials.loc[1]
    assert (saving["accuracy"], saving["gradient_bytes"]) == (0.8, 60)
    assert (saving["CAC_VAR_START_THR"], saving["CAC_WATCH"]) == (0.97, '["conv"]')
    for name, dtype in trial_dtypes().items():
        assert str(trials[name].dtype) in (dtype, "Int64" if dtype == "int64" else dtype, "int64"), name
    assert set(trials.attrs["columns"]) == set(METRICS)
    for metric in METRICS.values():
        described = {"unit": metric.unit, "direction": metric.direction, "meaning": metric.meaning}
        assert trials.attrs["columns"][metric.name] == described


def test_what_optuna_says_of_running_and_pruned_trials(study: Layout) -> None:
    optuna_study = open_study(study)
    optuna_study.enqueue_trial({})  # nobody runs it yet
    pruned = optuna_study.ask({})
    pruned.set_user_attr("row", result_row(0.5))
    optuna_study.tell(pruned, state=optuna.trial.TrialState.PRUNED)
    optuna_study.ask()
    trials = analysis.load(study.root).set_index("trial")
    assert trials["status"].iloc[-2:].to_dict() == {6: "pruned", 7: "running"}
    assert trials.loc[6, "accuracy"] == 0.5
    assert analysis.load(study.root).query("status == 'running'")["accuracy"].isna().all()


def test_frames_survive_parquet_with_types_and_descriptions(study: Layout) -> None:
    before = write_parquet(study)
    study.journal.rename(study.root / "moved")  # so that it is not read
    for path in (study.root, study.trials, str(study.trials)):
        after = analysis.load(path)
        pd.testing.assert_frame_equal(after, before)
        assert after.attrs == before.attrs


def test_parquet_is_read_only_while_it_is_newer(study: Layout) -> None:
    write_parquet(study)
    optuna_study = open_study(study)
    trial = optuna_study.ask({})
    trial.set_user_attr("row", result_row(0.6))
    optuna_study.tell(trial, [0.6, 0.0])
    old = study.journal.stat().st_mtime_ns - 10**9
    os.utime(study.trials, ns=(old, old))
    assert len(analysis.load(study.root)) == 7
    os.utime(study.trials, ns=(old + 2 * 10**9, old + 2 * 10**9))
    assert len(analysis.load(study.root)) == 6


def test_a_truncated_parquet_file_is_made_up_for_by_the_journal(study: Layout) -> None:
    before = write_parquet(study)
    study.trials.write_bytes(study.trials.read_bytes()[:-100])
    for path in (study.root, study.trials):
        with pytest.warns(UserWarning, match=r"trials\.parquet cannot be read, so the journal is: ") as caught:
            pd.testing.assert_frame_equal(analysis.load(path), before)
        assert len(caught) == 1
    study.journal.unlink()
    with pytest.raises(UserError, match=r"trials\.parquet cannot be read, and no journal is beside it: .+"):
        analysis.load(study.root)


def test_several_studies_are_told_apart_and_never_compared(study: Layout, tmp_path: Path) -> None:
    one = analysis.load(study.root)
    assert "study" not in one.columns
    rows = [{"row": result_row(0.5, workload="cifar")}, {"row": result_row(0.4, 0.1)}]
    for row in rows:
        row["config"] = {**TrialConfig().to_dict(), "workload": "theirs"}
    other = write_study(tmp_path / "deep" / "mine", rows)
    both = analysis.load([study.root, other.journal])
    assert both.columns[0] == "study"
    assert both["study"].unique().tolist() == [f"{tmp_path.name}/mine", "deep/mine"]
    assert both["workload"].unique().tolist()[-1] == "theirs"
    assert both["accuracy_drop"].tolist()[-2:] == pytest.approx([0, 0.1])
    pd.testing.assert_frame_equal(analysis.relative_to_baseline(both), both)
    pd.testing.assert_frame_equal(both.iloc[: len(one)][list(one.columns)], one, check_dtype=False)
    assert set(both.attrs["columns"]) == set(METRICS)
    kept = tmp_path / "both.parquet"
    both.to_parquet(kept)
    pd.testing.assert_frame_equal(analysis.load(kept), both)
    again = analysis.load([kept, other.root])["study"].unique().tolist()
    assert again == [f"both/{tmp_path.name}/mine", "both/deep/mine", "mine"]


def test_a_ray_experiment(tmp_path: Path) -> None:
    dense = {"method": "none", "epochs": 3}
    stops = {"method": "gradskip", "epochs": 3, "CAC_STOP_LAYER_NUM": [2], "CAC_STOP_LAYER_ITR": [5]}
    rows = [result_row(0.5, epoch=epoch) for epoch in (1, 2, 3)]
    write_trial(tmp_path / "Trial_0", {"config": dense}, rows, done=True)
    write_trial(tmp_path / "Trial_1", {"config": stops}, rows[:2], done=True)  # a scheduler ended it
    write_trial(tmp_path / "Trial_2", {"config": stops}, rows[:1])
    write_trial(tmp_path / "Trial_3", {"config": {**stops, "epochs": 0}}, [], error="Traceback\n  1\nUserError: no\n\n")
    write_trial(tmp_path / "Trial_4", {"config": {**dense, "epochs": 2}}, rows[:2], done=True)
    # Tried again after an error.
    write_trial(tmp_path / "Trial_5", {"config": stops}, rows, done=True, error="RuntimeError: once")
    write_trial(tmp_path / "Trial_6", {"config": {**stops, "epochs": 9}}, rows)  # of another length
    trials = analysis.load(tmp_path)
    assert set(trials.columns) == ALL
    assert trials["trial"].tolist() == list(range(7))
    assert trials["role"].tolist() == ["baseline", "search", "search", "search", "control", "search", "search"]
    assert trials["status"].tolist() == [
        "completed", "pruned", "running", "failed", "completed", "completed", "running",
    ]  # fmt: skip
    assert trials["control"].dropna().to_dict() == {4: "shorter"}
    assert trials["error"].dropna().to_dict() == {3: "UserError: no"}
    assert trials.loc[[0, 1, 4, 5], "accuracy"].tolist() == [0.5] * 4
    assert trials.loc[[2, 3], "accuracy"].isna().all()
    assert trials["search_flops"].isna().tolist() == [False] * 3 + [True] + [False] * 3
    assert trials.loc[1, ["workload", "seed", "CAC_STOP_LAYER_NUM"]].tolist() == ["digits", 0, "[2]"]
    assert trials.loc[3, "epochs"] == 0  # as it was given
    assert trials.loc[5, "accuracy_drop"] == 0


def test_a_ray_experiment_numbers_its_trials_as_the_study_does(tmp_path: Path) -> None:
    for number in (4, 12):
        write_trial(tmp_path / f"trial-{number:05d}", {"config": CONFIG, "trial": number}, [])
    failed = tmp_path / "trial-00007"  # when it was built: this is all that Ray leaves of it
    failed.mkdir()
    (failed / "error.txt").write_text("Traceback\ntrainables.errors.UserError: no\n")
    trials = analysis.load(tmp_path)
    assert trials["trial"].tolist() == [4, 7, 12]
    assert trials.loc[1, ["status", "error"]].tolist() == ["failed", "UserError: no"]
    assert trials.loc[1, list(field_names())].isna().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", r"^no study in .*nowhere: give the folder that a search wrote \(it holds "),
        (lambda folder: folder, "^no study in .*: give the folder that a search wrote"),
        (lambda folder: write_study(folder / "s", []).root.parent, r"^no study in .*, but in folders of it: .*\(s\)$"),
        (lambda folder: [], "^at least one path must be given"),
        (lambda folder: [write_study(folder / "s", []).root] * 2, "^each study must be given once, got .*s twice"),
        (lambda folder: text(folder / "notes.txt", "hello"), "^a file of trials must be an Optuna journal or a Parq"),
        (lambda folder: text(folder / "x.journal", ""), "^the journal .*x.journal holds no study"),
        (lambda folder: text(folder / "study.json", "{").parent, "study.json cannot be read"),
        (lambda folder: text(folder / "study.json", "{}").parent, "study.json has format None, this version reads 1"),
        (lambda folder: written(folder / "x.parquet", pd.DataFrame({"trial": [1]})), r"lacks \['status'\]$"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        analysis.load(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_trials_of_other_programs_are_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.journal"
    study = optuna.create_study(storage=optuna.storages.JournalStorage(JournalFileBackend(str(theirs))))
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(UserError, match=r"^a journal must be of a search of tune_cac, .* read it with optuna.load_st"):
        analysis.load(theirs)
    write_trial(tmp_path / "ray" / "fn_0", {"lr": 0.1, "config": {"lr": 0.1}}, [{"epoch": 1, "accuracy": 0.5}])
    for read in (analysis.load, analysis.history):
        with pytest.raises(UserError, match=r"^a Ray experiment must be of trainables.trial.Trial, .*ExperimentAnalys"):
            read(tmp_path / "ray")


def test_descriptions_are_not_copied_with_every_column(study: Layout) -> None:
    described = analysis.load(study.root).attrs["columns"]
    assert copy.deepcopy(described) is described
    assert analysis.load(study.root)["accuracy"].attrs["columns"] == described


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def written(path: Path, frame: pd.DataFrame) -> Path:
    frame.to_parquet(path)
    return path


# --- a study that an earlier version searched (2026-11-27, digits) ----------------------------------------------------


STORED = Path(__file__).parents[2] / "support" / "study_of_2026_11"


@pytest.fixture
def stored(tmp_path: Path) -> Layout:
    shutil.copytree(STORED, tmp_path / "results" / "mine")
    return Layout(tmp_path / "results" / "mine")


def test_its_settings_are_read_though_some_are_gone(stored: Layout) -> None:
    found = json.loads(stored.info.read_text())
    assert {"prior", "early_ending", "prior_runs", "study_storage"} <= found.keys()
    assert stored.read_info() == StudyInfo(**{name: found[name] for name in found if name in vars(stored.read_info())})


def test_its_trials_are_ranked_as_they_were(stored: Layout) -> None:
    """The answer and its saving are those that the search of then printed."""
    trials = analysis.load(stored.root)
    assert trials["status"].value_counts().to_dict() == {"completed": 13}
    ranking = analysis.rank(trials, allowed_drop=0.005)
    best = analysis.best(ranking)
    assert (best["trial"], round(best["compute_saved"], 3), round(best["accuracy"], 4)) == (7, 0.485, 0.9766)


def test_every_configuration_of_it_is_one_of_today(stored: Layout) -> None:
    for record in read_journal(stored.journal):
        TrialConfig.from_mapping({**record["config"], "CAC_RULE_NOISE": 1.0})  # of a rule that is gone


def test_its_answer_is_exported(
    stored: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(stored.root.parents[1])
    assert main(["export", "mine", "--trial", "7"]) == 0
    text = capsys.readouterr().out
    assert "CAC_VAR_START_THR=0.98" in text
    assert "TUNE_CAC_EPOCHS=24" in text
