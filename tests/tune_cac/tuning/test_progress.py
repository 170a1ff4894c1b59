"""What the progress line says was executed."""

from __future__ import annotations

import json
import os
import pty
import re
from types import SimpleNamespace
from typing import Any

import pytest
from studies import DENSE_FLOPS, result_row

from analysis.metrics.over_seeds import OTHER_SEED, SHORTER_ON_SEED
from analysis.metrics.ranking import SHORTER
from trainables.config import TrialConfig
from tune_cac.ray_backend import workers
from tune_cac.ray_backend.session import DEATHS
from tune_cac.tuning.progress import Budget, SearchProgress, in_trainings
from tune_cac.tuning.trials import BestSetting


def a_trial(number: int) -> Any:
    return SimpleNamespace(trial_id=str(number), config={"trial": number, "role": "search" if number else "baseline"})


def quiet_searcher(*, sharing: bool = True, **more: Any) -> Any:
    plan = SimpleNamespace(base=TrialConfig(method="none"), allowed_drop=0.005, sharing=sharing, trial_timeout_s=None)
    known = {"best": lambda saving: None, "trials": SimpleNamespace(baselines=list)}
    return SimpleNamespace(**{"plan": plan, "judges": True, **known, **more})


def test_a_row_in_trainings() -> None:
    assert in_trainings({}) == 0
    assert in_trainings({"search_flops": 0, "executed_flops": 10, "dense_flops": 20}) == 0
    assert in_trainings({"search_flops": 5, "executed_flops": 10, "dense_flops": 20}) == 0.25
    assert in_trainings({"executed_flops": 10, "dense_flops": 20}) == 0.5


@pytest.mark.parametrize("variable", ["TERM", "NO_COLOR"])
def test_a_terminal_has_colours_unless_the_user_wants_none(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(variable, "xterm-256color")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with SearchProgress(quiet_searcher(), to_run=4) as progress:
            progress.on_trial_result(0, [], a_trial(0), result_row())
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "0/4 trials" in shown
    assert (re.search(r"\x1b\[[\d;]*3[0-8]", shown) is None) == (variable == "NO_COLOR")


def test_live_trials_count_with_what_they_have_executed(capsys: pytest.CaptureFixture[str]) -> None:
    searcher = quiet_searcher()
    progress = SearchProgress(searcher, to_run=4)
    assert "training" not in progress.summary()
    for number, row in enumerate(
        [result_row(), result_row(saved=0.5, search_flops=100), result_row(search_flops=DENSE_FLOPS // 5)]
    ):
        progress.on_trial_result(0, [], a_trial(number), row)
        if number < 2:
            progress.on_trial_complete(0, [], a_trial(number))
    assert progress.summary().endswith(", compute so far: 1.3 full trainings")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("compute so far: 1.0 full training")
    assert lines[1].endswith("compute so far: 1.1 full trainings")


def test_what_a_scripts_optimizer_warns_of_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own standard error is in a file that nobody reads."""
    progress = SearchProgress(quiet_searcher(), to_run=3)
    for number, warned in enumerate(({}, {"rates": "no effect"}, {"rates": "no effect", "lost": "conv1"})):
        progress.on_trial_result(0, [], a_trial(number), result_row(run_facts=json.dumps({"warned": warned})))
        progress.on_trial_complete(0, [], a_trial(number))
    said = [line for line in capsys.readouterr().err.splitlines() if "warns" in line]
    assert said == ["trial 1 warns: no effect", "trial 2 warns: conv1"]


def test_controls_are_told_apart_and_cost_what_they_cost_of_the_full_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first baseline's worker died, and trial 1 is the one that ended."""
    again = {"control": OTHER_SEED}
    attrs = [{}, {}, {"candidate": 1} | again, {"candidate": 7} | again, {"candidate": 7, "control": SHORTER_ON_SEED}]
    attrs += [{"control": SHORTER}]
    trials = [SimpleNamespace(number=number, user_attrs=one) for number, one in enumerate(attrs)]
    known = SimpleNamespace(all=lambda: trials, baselines=lambda: trials[:2])
    progress = SearchProgress(quiet_searcher(trials=known), to_run=1)
    progress.on_trial_result(0, [], a_trial(0), result_row())
    progress.on_trial_complete(0, [], a_trial(0))
    half = DENSE_FLOPS // 2
    row = result_row(0.99, dense_flops=half, executed_flops=half, search_flops=half)
    for number in (2, 3, 4, 5):
        config = {"trial": number, "role": "control", "config": {"seed": int(number < 5)}}
        control = SimpleNamespace(trial_id="c", config=config)
        progress.on_trial_result(0, [], control, row)
        progress.on_trial_complete(0, [], control)
    assert progress.ended == 1
    assert progress.summary() == "nothing saved yet, compute so far: 3.0 full trainings, 4 controls"
    told = [line.partition("0.9900, ")[2] for line in capsys.readouterr().err.splitlines()]
    assert told[1:] == ["the baseline on seed 1", "trial 7 on seed 1", "1 dense epoch on seed 1", "1 dense epoch"]


def test_a_cost_budget_is_not_used_up_before_the_baseline_says_what_a_training_costs() -> None:
    """A script's rows tell the dense FLOPs of the steps so far, and cut runs those of their own length."""
    planned: list[int] = []
    searcher = quiet_searcher(ask_for=planned.append)
    progress = SearchProgress(searcher, to_run=4)
    budget = Budget(searcher, progress, time_s=None, trainings=2.0, begun=0.0)
    tenth = DENSE_FLOPS // 10
    for number in range(2):
        row = result_row(dense_flops=tenth, executed_flops=tenth, search_flops=tenth)
        progress.on_trial_result(0, [], a_trial(number), row)
    assert not budget.stop_all()
    assert planned == []
    progress.on_trial_result(0, [], a_trial(0), result_row())
    progress.on_trial_complete(0, [], a_trial(0))
    budget.stop_all()
    assert planned == []  # 1.1
    progress.on_trial_result(0, [], a_trial(1), result_row())
    budget.stop_all()
    assert planned == [0]


def test_scripts_that_tell_no_flops_count_with_what_they_did_not_save(capsys: pytest.CaptureFixture[str]) -> None:
    searcher = quiet_searcher()
    progress = SearchProgress(searcher, to_run=2)
    for number, saved in enumerate((0.0, 0.25)):
        progress.on_trial_result(0, [], a_trial(number), result_row(saved=saved, dense_flops=None, search_flops=None))
        progress.on_trial_complete(0, [], a_trial(number))
    assert progress.trainings() == 1.75


def test_the_best_so_far_is_the_searchers_and_asked_for_when_a_trial_has_ended() -> None:
    asked: list[str | None] = []

    def best(saving: str | None) -> BestSetting:
        asked.append(saving)
        return BestSetting(trial=1, saved=0.25, lost=0.001, is_within=True, config={})

    progress = SearchProgress(quiet_searcher(best=best), to_run=4)
    for number, row in enumerate([result_row(0.97), result_row(0.969, saved=0.25)]):
        progress.on_trial_result(0, [], a_trial(number), row)
        progress.on_trial_complete(0, [], a_trial(number))
    assert progress.summary().startswith("best 25.0 % saved at 0.10 points of accuracy loss (trial 1), ")
    assert asked == [None] * 2


@pytest.mark.parametrize("error", [*DEATHS, None])
def test_whatever_ray_calls_it_a_worker_that_ended_without_a_word_has_died(error: type[Exception] | None) -> None:
    """Killed by the memory monitor is an error of its own in Ray, and was a failed trial for good."""
    given = ValueError("of the user's") if error is None else error.__new__(error)
    assert workers.worker_died(given) == (error is not None)
