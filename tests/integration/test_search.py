"""The main job on real Ray clusters and a real Optuna journal, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from commands_run import run_here, wait_for_trials
from one_seed import one_seed
from runs import assert_equals_alone, comparable
from studies import study_of

import analysis
import search_spaces
import tune_cac
from analysis.io.study_files import Layout
from analysis.presentation.summary_text import config_of
from search_spaces import Space, SpaceContext
from trainables.config import field_names
from trainables.gradskip import Settings
from trainables.metrics import METRICS, ROW, ROW_KEYS
from trainables.stage_tree.store import StageStore, roots
from tune_cac.cli.main import main
from tune_cac.study.folder import locked
from tune_cac.study.study_result import answer

pytestmark = pytest.mark.slow


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tune_cac", *one_seed(arguments)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


#: So short that few settings differ in what they stop: by a sampler of Optuna, which trains all that it is asked for.
EPOCHS = 6
SEARCH = (
    "search", "--trials", "6", "--epochs", str(EPOCHS), "--concurrency", "1", "--no-controls", "--sampler", "tpe",
    "--allowed-drop", "0.01",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished search of six trials, all in one process of Ray's."""
    folder = tmp_path_factory.mktemp("search")
    done = run_here(folder, *SEARCH, "--name", "study", "--checkpoint-budget", "60MB")
    assert done.returncode == 0, done.stderr
    return folder / "results" / "study", done


def test_writes_the_answer(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    study, _ = finished
    trials = pd.read_parquet(study / "trials.parquet")
    assert trials["trial"].tolist() == list(range(6))
    assert trials["role"].tolist() == ["baseline", "published"] + ["search"] * 4
    assert set(trials["status"]) == {"completed"}
    assert set(METRICS) <= set(trials.columns)
    ranking = pd.read_csv(study / "ranking.csv")
    assert len(ranking) == 6
    assert not [name for name in ranking.columns if name.startswith("test_")]  # a choice must not see the test split
    best = answer(Layout(study), allowed_drop=Layout(study).read_info().allowed_drop).best
    assert best is not None
    sourced = subprocess.run(
        ["sh", "-c", f". {study}/best.env; env"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    variables = dict(line.split("=", 1) for line in sourced.stdout.splitlines() if line.startswith("CAC_"))
    settings = Settings.from_environment(variables)
    if best["compute_saved"] > 0:
        chosen = trials[trials["trial"] == best["trial"]].iloc[0]
        assert settings == config_of(chosen).gradskip_settings()
    else:
        assert settings.mode == "off"


def test_some_trial_saves_compute_and_the_screen_says_so(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    study, process = finished
    trials = analysis.load(study)
    assert trials["compute_saved"].max() > 0
    assert process.stdout.split()[:4] == ["trial", "setting", "saved", "points"]
    assert re.search(r"^   0  +baseline +0.0 %", process.stdout, re.MULTILINE)
    assert ": saves " in process.stdout or "No setting tried saves compute" in process.stdout


def test_progress_is_plain_off_a_terminal(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, process = finished
    # Beside other tests, a cluster of theirs may be named.
    said = [line for line in process.stderr.splitlines() if not line.startswith("a Ray cluster runs on this machine")]
    first, *lines = said
    assert first.startswith(
        f"results/study: auto_thresholds on digits, 6 trials of {EPOCHS} epochs, 1 at a time, on the CPU"
    )
    assert [line.split("]")[0] for line in lines] == [f"[{n}/6" for n in range(1, 7)], process.stderr
    assert "\x1b" not in process.stderr + process.stdout
    assert re.search(r"compute so far: \d+\.\d full trainings?", lines[2])


@pytest.mark.thorough
def test_every_trial_equals_the_same_configuration_alone(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """All six ran in one process, so nothing leaked from trial to trial; and savings are real, not estimates."""
    trials = analysis.load(finished[0])
    for _, row in trials.iterrows():
        assert_equals_alone(row)


def test_it_is_an_ordinary_optuna_study(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    study, _ = finished
    loaded = study_of(study)
    assert [d.name for d in loaded.directions] == ["MAXIMIZE", "MAXIMIZE"]
    assert all(t.state.name == "COMPLETE" for t in loaded.trials)
    assert loaded.trials[0].params == {}
    baseline = loaded.trials[0].values[0]
    for trial in loaded.trials:
        assert trial.constraints["accuracy_drop"] == pytest.approx(baseline - trial.values[0] - 0.01, abs=1e-9)
    assert loaded.best_trials


def test_it_is_an_ordinary_ray_experiment(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    study, _ = finished
    folders = sorted((study / "ray" / "run-000").glob("trial-*"))
    assert [folder.name for folder in folders] == [f"trial-{n:05d}" for n in range(6)]
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
        assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
        assert {metric.name for metric in ROW} <= {*rows[-1], "further_metrics"}
        assert list(folder.glob("events.out.tfevents.*"))


def test_report_reads_it(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    study, _ = finished
    assert main(["report", str(study), "--all"]) == 0
    assert "## Ranking" in capsys.readouterr().out
    assert main(["report", study.name, "--results", str(study.parent), "--allowed-drop", "0.5"]) == 0
    most = analysis.load(study)["compute_saved"].max()
    assert f"{100 * most:.1f} %" in capsys.readouterr().out.splitlines()[1]


# --- sharing ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> tuple[Path, Path]:
    """The same search with and without sharing."""
    study, _ = finished
    done = run_here(study.parents[1], *SEARCH, "--name", "alone", "--no-sharing")
    assert done.returncode == 0, done.stderr
    return study, study.with_name("alone")


def test_both_modes_are_equal_row_by_row(both: tuple[Path, Path]) -> None:
    shared, alone = map(analysis.load, both)
    pd.testing.assert_frame_equal(comparable(shared), comparable(alone))
    assert (shared["CAC_VAR_START_THR"].nunique()) > 3  # not one and the same trial


def test_the_search_costs_less_and_says_so(
    both: tuple[Path, Path], finished: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    shared, alone = map(analysis.load, both)
    assert (alone["search_flops"] == alone["executed_flops"]).all()
    assert (shared["search_flops"] <= shared["executed_flops"]).all()
    spent = shared["search_flops"].sum() / shared["dense_flops"].iloc[0]
    assert shared["search_flops"].sum() < 0.7 * alone["search_flops"].sum()
    assert f"{spent:.1f} full trainings for 6 trials" in finished[1].stdout + finished[1].stderr


def test_replay_predicts_what_was_trained(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Of trials in the tree replay knows everything, to the bit."""
    study = finished[0]
    trials = analysis.load(study)
    acting = trials[trials["method"] == "gradskip"]
    found = analysis.replay(analysis.load_trace(study), [config_of(row) for _, row in acting.iterrows()])
    assert found["exact"].all()
    assert found["compute_saved"].tolist() == acting["compute_saved"].tolist()
    assert found["accuracy"].tolist() == acting["accuracy"].tolist()
    assert found["stop_events"].tolist() == acting["stop_events"].tolist()


def test_an_ended_study_keeps_a_hundredth_of_its_checkpoints(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    kept = [file for file in (finished[0] / "tree" / "checkpoints").rglob("*") if file.is_file()]
    assert kept
    assert sum(file.stat().st_size for file in kept) <= 600_000


def test_the_tree_of_a_study_describes_its_run(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    tree = Layout(finished[0]).tree
    (root,) = roots(tree)
    store = StageStore(tree, root)
    described = store.read("root.json")
    assert (described["workload"], described["epochs"], described["total_steps"]) == ("digits", EPOCHS, 10 * EPOCHS)
    assert len(described["layer_names"]) == len(described["trains"]) == 20
    first = store.first()
    first.refresh()
    assert first.known_until == 10 * EPOCHS
    assert first.rows[10 * EPOCHS]["quality"] == analysis.load(finished[0]).loc[0, "accuracy"]
    assert set(ROW_KEYS) > set(first.rows[10 * EPOCHS])
    assert {"search_flops", *field_names()} & set(first.rows[10 * EPOCHS]) == set()


# --- more trials, failures, interruptions -----------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_the_same_name_adds_trials(
    finished: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = finished
    before = analysis.load(study)
    found = tune_cac.search(
        trials=2, epochs=EPOCHS, name="study", results=study.parent, allowed_drop=0.01, concurrency=2,
        controls=False, sampler="tpe",
    )  # fmt: skip
    assert len(before) < len(found.trials) <= 8  # it may find that a second one is not worth its training
    assert (found.trials["role"] == "baseline").sum() == 1
    pd.testing.assert_frame_equal(found.trials.iloc[:6][list(before.columns)], before, check_dtype=False)
    assert isinstance(found.ranking, pd.DataFrame)
    assert found.best is not None
    assert found.folder == study


def sometimes(trial: Any, context: SpaceContext) -> dict[str, Any]:
    """Every third trial asks for a layer that the model has not, which raises inside the trial."""
    # What looks at ranges alone, without a trial of a study, has no number.
    number = trial.suggest_int("CAC_VAR_START_ITR", 0, 50) * 0 + getattr(trial, "number", 1)
    return {"CAC_STOP_LAYER_NUM": [99 if number % 3 == 0 else 2], "CAC_STOP_LAYER_ITR": [5]}


def no_start(context: SpaceContext) -> dict[str, Any]:
    return {"CAC_VAR_START_ITR": 0}


@pytest.mark.thorough
@pytest.mark.usefixtures("one_ray")
def test_a_trial_that_raises_is_counted_and_shown_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("search_spaces.sometimes")
    module.SPACE = Space(name="sometimes", method="gradskip", suggest=sometimes, start=no_start)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "search_spaces.sometimes", module)
    monkeypatch.setitem(search_spaces.SPACES, "sometimes", "fails now and then")
    monkeypatch.chdir(tmp_path)
    arguments = "search --space sometimes --trials 5 --epochs 2 --name s --concurrency 2 --no-controls --sampler tpe"
    assert main(arguments.split()) == 1
    out, err = capsys.readouterr()
    trials = analysis.load("results/s")
    assert trials["status"].tolist() == [
        "completed", "completed", "completed", "failed", "completed",
    ]  # fmt: skip
    message = (
        "UserError: CAC_STOP_LAYER_NUM must be at most 19 (this optimizer has 20 parameters, numbered from 0), got 99"
    )
    assert trials["error"].dropna().tolist() == [message]
    assert f"trial 3 failed: {message}" in err
    assert "1 of 5 trials failed" in err
    assert "Traceback" not in out + err
    states = [t.state.name for t in study_of(Path("results/s")).trials]
    assert states.count("FAIL") == 1
    assert states.count("RUNNING") == 0


@pytest.mark.usefixtures("one_ray")
@pytest.mark.parametrize(
    ("ending", "flags"),
    [
        (signal.SIGKILL, ()),
        # It is turned into SIGINT, so it stands for both.
        pytest.param(signal.SIGTERM, ("--no-sharing",), marks=pytest.mark.thorough),
    ],
)
def test_an_interrupted_search_resumes(tmp_path: Path, ending: signal.Signals, flags: tuple[str, ...]) -> None:
    arguments = ["search", "--trials", "4", "--epochs", str(EPOCHS), "--name", "s", "--checkpoint-every", "0"]
    arguments += ["--no-controls", "--sampler", "tpe", *flags]
    process = start(tmp_path, *arguments, "--concurrency", "2")
    study = tmp_path / "results" / "s"
    before = wait_for_trials(study, 2, process)
    process.send_signal(ending)
    _, err = process.communicate(timeout=120)
    if ending == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, err
        assert "Interrupted. Finish the remaining trials with: python -m tune_cac search --resume results/s" in err
        assert (study / "best.env").is_file()
        assert "Traceback" not in err
    done = set(before.loc[before["status"] == "completed", "trial"])
    assert done <= set(analysis.load(study).query("status == 'completed'")["trial"])

    again = run_here(tmp_path, "search", "--resume", "s", "--concurrency", "2")
    assert again.returncode == 0, again.stderr
    after = analysis.load(study)
    assert (after["status"] == "completed").sum() == 4
    assert set(after["status"]) <= {"completed", "interrupted"}
    assert ((after["role"] == "baseline") & (after["status"] == "completed")).sum() == 1
    ran_before = before[before["status"] == "completed"].set_index("trial")
    for trial in done:  # nothing finished was lost, nor trained again
        assert after.set_index("trial").loc[trial, "wall_time_s"] == ran_before.loc[trial, "wall_time_s"]
    assert_resumed_from_checkpoints(study)
    acting = after[(after["status"] == "completed") & (after["method"] == "gradskip")]
    if flags:  # the study keeps its mode
        assert set(acting["stage"]) == {""}
    else:
        # The dense run of before was used; a rule that acts in the first steps finds nothing to share.
        assert (acting["search_flops"] <= acting["executed_flops"]).all()
        assert acting["search_flops"].sum() < acting["executed_flops"].sum()
    for _, row in after[(after["status"] == "completed") & ~after["trial"].isin(done)].iterrows():
        assert_equals_alone(row)
    nothing_left = run_here(tmp_path, "search", "--resume", "s")
    assert nothing_left.returncode == 0, nothing_left.stderr
    assert len(analysis.load(study)) == len(after)


def assert_resumed_from_checkpoints(study: Path) -> None:
    """A trial that went on from a checkpoint did not train its first epochs again."""
    for folder in (study / "ray" / "run-001").glob("trial-*"):
        rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
        source = rows[0]["config"]["resume_from"]
        if source is not None:
            assert rows[0]["epoch"] > 1
        else:
            assert rows[0]["epoch"] == 1


def test_a_study_that_is_being_searched_is_refused(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The lock is the one that a search holds; another process must not get it, nor add anything."""
    study, _ = finished
    before = len(analysis.load(study))
    with locked(Layout(study)):
        second = start(study.parents[1], *SEARCH, "--name", "study")
        _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert err == (
        f"tune_cac: error: results/study is being searched or confirmed by process {os.getpid()}: wait for it, or "
        "choose another study\n"
    )
    assert len(analysis.load(study)) == before


def test_more_gpus_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["search", "--trials", "2", "--epochs", "1", "--gpus-per-trial", "64", "--name", "s"]) == 2
    assert "--gpus-per-trial times --workers-per-trial must be at most" in capsys.readouterr().err
    assert not (tmp_path / "results" / "s").exists()
