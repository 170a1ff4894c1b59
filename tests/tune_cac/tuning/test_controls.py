"""What a search trains beside its settings: shorter runs, and random stops of the best setting's compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import finish
from searchers import learning, row, searcher, told
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
from analysis.io.studies import read_journal
from analysis.metrics.ranking import RANDOM_STOPS, SHORTER
from trainables.config import TrialConfig
from trainables.training.run import TrainingRun
from tune_cac.tuning.controls import EQUAL_COMPUTE, shorter_trainings
from tune_cac.tuning.study_searcher import FINISHED


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(100, [90, 80, 70, 60, 50]), (30, [27, 24, 21, 18, 15]), (15, [13, 12, 10, 9, 7]), (4, [3, 2]), (2, [1]), (1, [])],
)
def test_shorter_runs_are_dense_and_of_other_lengths_than_the_full_one(epochs: int, expected: list[int]) -> None:
    controls = shorter_trainings(TrialConfig(method="none", epochs=epochs))
    assert [control.values for control in controls] == [{"method": "none", "epochs": n} for n in expected]
    assert {control.attrs["control"] for control in controls} <= {SHORTER}


def asked(search: Any, *names: str) -> list[dict[str, Any]]:
    return [search.suggest(name) for name in names]


def complete(search: Any, name: str, **columns: Any) -> None:
    search.on_trial_complete(name, {**row(0.9, 0.0), "dense_flops": 1000, "executed_flops": 1000, **columns})


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_random_stops_save_what_the_best_setting_saves(tmp_path: Path) -> None:
    search = learning(tmp_path)
    search.ask_for(1, controls=True)
    baseline = told(tmp_path)[0].user_attrs["row"]
    setting = search.suggest("setting")
    assert [a["config"]["epochs"] for a in asked(search, "a", "b")] == [3, 2]
    assert search.suggest("c") is None  # the best setting is not known yet
    search.on_trial_complete("setting", {**baseline, "compute_saved": 0.3})
    stops = asked(search, "c", "d", "e")
    assert search.suggest("f") is None  # some are at work, and one that dies is begun again
    for name in "abcde":
        complete(search, name)
    assert search.suggest("f") == FINISHED
    assert setting["role"] != "control"
    assert {a["role"] for a in stops} == {"control"}
    # Trained alone, each saves what it was drawn for.
    for suggested in stops:
        with TrainingRun(TrialConfig.from_mapping(suggested["config"])) as run:
            saved = finish(run)[-1]["compute_saved"]
        assert saved == pytest.approx(0.3, abs=1.5 * EQUAL_COMPUTE)
    assert len({str(a["config"]) for a in stops}) == 3
    trials = analysis.load(tmp_path)
    assert trials["control"].dropna().tolist() == [SHORTER] * 2 + [RANDOM_STOPS] * 3


@pytest.mark.usefixtures("tiny")
def test_without_savings_there_are_no_random_stops(tmp_path: Path) -> None:
    search = learning(tmp_path)
    search.ask_for(1, controls=True)
    baseline = told(tmp_path)[0].user_attrs["row"]
    search.suggest("setting")
    search.on_trial_complete("setting", {**baseline, "compute_saved": 0.5, "quality": baseline["quality"] - 0.1})
    assert [a["config"]["epochs"] for a in asked(search, "a", "b")] == [3, 2]
    for name in "ab":
        complete(search, name)
    assert search.suggest("c") == FINISHED


def test_a_control_is_told_against_the_baselines_budget_and_not_counted(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.ask_for(1, controls=True)
    search.suggest("a")
    complete(search, "a")
    control = search.suggest("b")
    assert control["config"]["epochs"] == 27  # type: ignore[index]
    complete(search, "b", dense_flops=900, executed_flops=900)
    assert told(tmp_path)[control["trial"]].values == pytest.approx([0.9, 0.1])  # type: ignore[index]
    assert search.trials.finished_count() == 1


def test_an_interrupted_control_is_begun_again_where_it_was(tmp_path: Path) -> None:
    first = searcher(tmp_path, baseline=False)
    first.ask_for(1, controls=True)
    first.suggest("a")
    complete(first, "a")
    number = first.suggest("b")["trial"]  # type: ignore[index]
    checkpoint = tmp_path / f"ray/run-000/trial-{number:05d}/checkpoint_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.pt").touch()
    assert first.trials.runs_on()
    # The process dies here; another one opens the journal, and adds two trials before it comes to the controls.
    second = searcher(tmp_path, begin=False)
    second.adopt_unfinished()
    assert not second.trials.runs_on()
    second.ask_for(2, controls=True)
    for name in "cd":
        assert second.suggest(name)["role"] != "control"  # type: ignore[index]
        complete(second, name)
    again = [second.suggest(str(n)) for n in range(6)]
    assert [a["config"]["epochs"] for a in again[:5]] == [27, 24, 21, 18, 15]  # type: ignore[index]
    assert [a["resume_from"] for a in again[:5]] == [str(checkpoint), *[None] * 4]  # type: ignore[index]
    assert again[5] is None
    for place in range(5):
        complete(second, str(place))
    assert second.suggest("5") == FINISHED
    assert told(tmp_path)[number].state.name == "FAIL"
    assert read_journal(tmp_path / "optuna.journal")[number]["status"] == "interrupted"


def test_shorter_runs_fill_the_time_in_which_others_wait_for_the_baseline(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.ask_for(2, controls=True)
    roles = [search.suggest(name)["role"] for name in "abc"]  # type: ignore[index]
    assert roles == ["baseline", "control", "control"]
    complete(search, "a")
    assert search.suggest("d")["role"] == "published"  # type: ignore[index]
    complete(search, "d")
    assert [search.suggest(name)["config"]["epochs"] for name in "efg"] == [21, 18, 15]  # type: ignore[index]


@pytest.mark.slow
def test_a_sampler_learns_from_settings_as_if_there_were_no_controls(tmp_path: Path) -> None:
    """Settings with START_THR near 1 are the better ones; good controls must not stand in their place."""
    found = {}
    for controls in (False, True):
        folder = tmp_path / str(controls)
        folder.mkdir()
        search = searcher(folder, baseline=False)
        search.ask_for(1, controls=controls)
        search.suggest("baseline")
        complete(search, "baseline")
        for number in range(5 if controls else 0):
            assert search.suggest(f"c{number}")["role"] == "control"  # type: ignore[index]
            # Better than every setting in both.
            complete(search, f"c{number}", accuracy=0.99, dense_flops=500, executed_flops=100)
        search.ask_for(60)
        for number in range(60):
            suggested = search.suggest(str(number))["config"]["CAC_VAR_START_THR"]  # type: ignore[index]
            complete(search, str(number), compute_saved=1 - 9 * (1 - suggested))
            found.setdefault(controls, []).append(suggested)
    late = {controls: sum(values[20:]) / 40 for controls, values in found.items()}
    assert late[True] > 0.975  # half of the range is above 0.95
    assert abs(late[True] - late[False]) < 0.01


def test_controls_are_trained_once_a_study(tmp_path: Path) -> None:
    first = searcher(tmp_path, baseline=False)
    first.ask_for(1, controls=True)
    for name in "abcdef":
        first.suggest(name)
        complete(first, name)
    assert first.suggest("g") == FINISHED
    second = searcher(tmp_path, begin=False)
    second.adopt_unfinished()
    second.ask_for(1, controls=True)
    second.suggest("h")
    complete(second, "h")
    assert second.suggest("i") == FINISHED
