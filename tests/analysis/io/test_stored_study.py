"""A study that an earlier version searched (2026-11-27, digits): it is read, ranked and exported as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import analysis
from analysis.io.layout import Layout, StudyInfo
from analysis.io.studies import read_journal
from trainables.config import TrialConfig
from tune_cac.cli.main import main

STORED = Path(__file__).parents[2] / "support" / "study_of_2026_11"


@pytest.fixture
def study(tmp_path: Path) -> Layout:
    shutil.copytree(STORED, tmp_path / "results" / "mine")
    return Layout(tmp_path / "results" / "mine")


def test_its_settings_are_read_though_some_are_gone(study: Layout) -> None:
    stored = json.loads(study.info.read_text())
    assert {"prior", "early_ending", "prior_runs", "study_storage"} <= stored.keys()
    assert study.read_info() == StudyInfo(**{name: stored[name] for name in stored if name in vars(study.read_info())})


def test_its_trials_are_ranked_as_they_were(study: Layout) -> None:
    """The answer and its saving are those that the search of then printed."""
    trials = analysis.load(study.root)
    assert trials["status"].value_counts().to_dict() == {"completed": 13}
    ranking = analysis.rank(trials, allowed_drop=0.005)
    best = analysis.best(ranking)
    assert (best["trial"], round(best["compute_saved"], 3), round(best["accuracy"], 4)) == (7, 0.485, 0.9766)


def test_every_configuration_of_it_is_one_of_today(study: Layout) -> None:
    for record in read_journal(study.journal):
        TrialConfig.from_mapping({**record["config"], "CAC_RULE_NOISE": 1.0})  # of a rule that is gone


def test_its_answer_is_exported(
    study: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(study.root.parents[1])
    assert main(["export", "mine", "--trial", "7"]) == 0
    text = capsys.readouterr().out
    assert "CAC_VAR_START_THR=0.98" in text
    assert "TUNE_CAC_EPOCHS=24" in text
