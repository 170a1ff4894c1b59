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
from studies import result_row, write_study

import analysis
from analysis.io.dtypes import trial_dtypes
from analysis.io.studies import read_journal
from analysis.io.study_files import STUDY_NAME, Layout, StudyInfo
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
    after = analysis.load(str(study.root))
    pd.testing.assert_frame_equal(after, before)
    assert after.attrs == before.attrs


def test_of_a_table_of_an_earlier_version_the_journal_is_read(study: Layout) -> None:
    before = write_parquet(study)
    before.drop(columns=["structured_sparsity", "CAC_WATCH"]).to_parquet(study.trials)
    pd.testing.assert_frame_equal(analysis.load(study.root), before)


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
    with pytest.warns(UserWarning, match=r"trials\.parquet cannot be read, so the journal is: ") as caught:
        pd.testing.assert_frame_equal(analysis.load(study.root), before)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", r"^no study in .*nowhere: give the folder that a search wrote \(it holds "),
        (lambda folder: folder, "^no study in .*: give the folder that a search wrote"),
        (
            lambda folder: text(folder / "notes.txt", "hello\n"),
            "^the journal .*notes.txt is damaged: nothing",
        ),
        (lambda folder: text(folder / "x.journal", ""), "^the journal .*x.journal holds no study"),
        (lambda folder: text(folder / "study.json", "{").parent, "study.json cannot be read"),
        (lambda folder: text(folder / "study.json", "{}").parent, "study.json has format None, this version reads 1"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        analysis.load(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_descriptions_are_not_copied_with_every_column(study: Layout) -> None:
    described = analysis.load(study.root).attrs["columns"]
    assert copy.deepcopy(described) is described
    assert analysis.load(study.root)["accuracy"].attrs["columns"] == described


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


# --- a study that an earlier version searched (2026-11-27, digits) ----------------------------------------------------


STORED = Path(__file__).parents[2] / "support" / "study_of_2026_11"


@pytest.fixture
def stored(tmp_path: Path) -> Layout:
    shutil.copytree(STORED, tmp_path / "results" / "mine")
    return Layout(tmp_path / "results" / "mine")


def test_its_settings_are_read_though_some_are_gone(stored: Layout) -> None:
    found = json.loads(stored.info.read_text())
    assert {"prior", "early_ending", "prior_runs", "study_storage", "sure", "holds"} <= found.keys()
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
