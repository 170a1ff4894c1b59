"""The default search by command: cut dense runs, stops searched on them, an answer of fewer epochs, confirmed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pandas as pd
import pytest
from commands_run import run_here
from runs import assert_equals_alone

import analysis
from analysis.io.study_files import Layout
from analysis.metrics.ranking import CUT, SHORTER, control_line
from analysis.presentation.settings_text import EPOCHS_VARIABLE
from analysis.presentation.summary_text import config_of
from trainables.stage_tree.store import roots
from tune_cac.study.study_result import answer

pytestmark = pytest.mark.slow

EPOCHS = 6


@pytest.fixture(scope="module")
def study(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that may lose much, so that its answer is a cut run."""
    folder = tmp_path_factory.mktemp("lengths")
    done = run_here(
        folder, "search", "--trials", "4", "--epochs", str(EPOCHS), "--allowed-drop", "0.05", "--name", "s",
        "--concurrency", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "out.txt").write_text(done.stdout)
    (folder / "err.txt").write_text(done.stderr)
    return folder / "results" / "s"


def chosen(study: Path) -> pd.Series:
    """What the search hands out."""
    best = answer(Layout(study), allowed_drop=0.05).best
    assert best is not None
    return best


def test_cut_runs_are_results_and_stops_are_searched_on_them(study: Path) -> None:
    trials = analysis.load(study)
    assert set(trials["status"]) == {"completed"}
    cut = trials[trials["role"] == CUT]
    assert cut["epochs"].iloc[0] == 3  # half of six
    assert set(cut["control"]) == {SHORTER}
    assert trials["role"].isin(["baseline", "published", "search"]).sum() <= 4
    settings = trials[(trials["role"] == "search") & trials["of_epochs"].notna()]
    assert len(settings) > 0
    assert set(settings["of_epochs"]) == {EPOCHS}
    dense = trials[trials["control"] == SHORTER]  # a still shorter one is a control alone
    assert len(roots(Layout(study).tree)) == 1 + dense["epochs"].nunique()
    for _, row in pd.concat([cut, settings]).iterrows():
        assert_equals_alone(row)
    line = control_line(trials)
    assert sorted(line["epochs"], reverse=True) == [EPOCHS, *sorted(dense["epochs"], reverse=True)]
    assert (trials.loc[trials["epochs"] < 3, "role"] == "control").all()  # less than half
    assert set(cut["trial"]) <= set(analysis.rank(trials, allowed_drop=0.05)["trial"])
    best = chosen(study)
    assert line["compute_saved"].max() >= best["compute_saved"] - 0.1  # a dense run was cut to its compute


def test_the_answer_says_how_many_epochs_to_train(study: Path) -> None:
    best = chosen(study)
    assert best["epochs"] < EPOCHS
    assert f"\nTrain {best['epochs']} of {EPOCHS} epochs" in (study.parents[1] / "out.txt").read_text()
    assert f"{best['epochs']} ep, " in (study.parents[1] / "out.txt").read_text()
    sourced = subprocess.run(
        ["sh", "-c", f". {study}/best.env; echo ${EPOCHS_VARIABLE}"], capture_output=True, text=True, check=True
    )
    assert sourced.stdout.strip() == str(config_of(best).epochs)
    page = run_here(study.parents[1], "report", "s")
    assert page.returncode == 0, page.stderr
    assert f"Train {best['epochs']} of {EPOCHS} epochs" in Layout(study).page.read_text()


@pytest.mark.thorough
def test_a_confirmation_trains_as_many_epochs(study: Path) -> None:
    done = run_here(study.parents[1], "confirm", "s", "--top", "1", "--seeds", "3")
    assert done.returncode == 0, done.stderr
    best = chosen(study)
    again = analysis.load(Layout(study).confirmation.root)
    candidates = again[again["role"] == "candidate"]
    assert candidates["epochs"].tolist() == [best["epochs"]] * 3
    assert candidates["compute_saved"].to_numpy(float) == pytest.approx(best["compute_saved"], abs=0.1)
    assert_equals_alone(candidates.iloc[0])


@pytest.mark.thorough
def test_seeds_are_added_for_good(study: Path) -> None:
    done = run_here(study.parents[1], "search", "--resume", "s", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    info = Layout(study).read_info()
    assert (info.seeds, info.answer is not None and info.answer["seeds"]) == (2, 1)
    fewer = run_here(study.parents[1], "search", "--resume", "s", "--seeds", "1")
    assert "are compared over 2 seeds: so are these" in fewer.stderr
    assert Layout(study).read_info().seeds == 2
