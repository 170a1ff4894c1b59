"""Trials as Optuna knows them: objectives, what is feasible, and baselines of combinations of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState
from searchers import CONTEXT, row, searcher, told

import search_spaces
from analysis.metrics.saving import saved_of
from trainables.config import TrialConfig
from tune_cac.tuning.searcher import FINISHED, StudySearch
from tune_cac.tuning.trials import saved_of_baseline, tell_complete

BASELINE = {"quality": 0.9, "compute_saved": 0.0, "executed_flops": 1000, "dense_flops": 1000, "inference_saved": 0.0}


def ended(accuracy: float, executed: int = 800, inference: float | None = 0.5, dense: int = 1000) -> dict[str, Any]:
    return {
        "quality": accuracy, "compute_saved": 1 - executed / dense, "executed_flops": executed, "dense_flops": dense,
        "inference_saved": inference,
        "sparse_inference_saved": inference,
    }  # fmt: skip


def reported(found: dict[str, Any], **attrs: Any) -> optuna.trial.FrozenTrial:
    study = optuna.create_study(directions=["maximize", "maximize"])
    study.enqueue_trial({}, user_attrs=attrs)
    tell_complete(study, study.ask(), found, BASELINE, 0.01)
    (frozen,) = study.trials
    return frozen


@pytest.mark.parametrize(("saving", "expected"), [(None, 0.2), ("training", 0.2), ("inference", 0.5), ("both", 0.35)])
def test_a_study_is_told_what_it_ranks_by(saving: str | None, expected: float) -> None:
    assert reported(ended(0.9), config={"saving": saving}).values == pytest.approx([0.9, expected])
    frame = pd.DataFrame([{**ended(0.9), "saving": saving}])
    assert saved_of(frame)[0] == pytest.approx(expected)  # as the ranking says it


@pytest.mark.parametrize(
    ("accuracy", "excess"), [(0.9, -0.01), (0.95, -0.06), (0.89, 0.0), (0.89 + 1e-12, 0.0), (0.88, 0.01)]
)
def test_the_drop_beyond_the_allowed_one_is_a_constraint(accuracy: float, excess: float) -> None:
    found = reported(ended(accuracy)).constraints
    assert found == {"accuracy_drop": pytest.approx(excess, abs=1e-9)}
    assert (found["accuracy_drop"] <= 0) == (excess <= 0)


def test_a_shorter_run_saves_of_the_baselines_budget() -> None:
    half = ended(0.9, executed=500, dense=500)
    assert reported(half).values == pytest.approx([0.9, 0.5])
    assert reported(half, config={"saving": "both"}).values == pytest.approx([0.9, 0.5])
    # Of a script nothing is known.
    unknown = {**half, "executed_flops": None, "dense_flops": None, "compute_saved": 0.3}
    assert saved_of_baseline(unknown, BASELINE) == 0.3
    # A teacher costs more than the budget.
    assert saved_of_baseline(ended(0.9, executed=1500), BASELINE) == -0.5


def test_settings_are_ranked_by_what_they_save_and_the_answer_is_within_the_drop(tmp_path: Path) -> None:
    search = searcher(tmp_path)
    assert search.best() is None
    rows = [row(0.9, 0.25), row(0.89, 0.5), row(0.88, 0.9), row(0.9, 0.5)]  # the third loses too much
    for number, one in enumerate(rows):
        search.suggest(str(number))
        search.on_trial_complete(str(number), {**one, "inference_saved": 0.9 if number == 0 else 0.0})
    found = search.trials.settings()
    ranked = [(one.trial, one.saved, one.is_within) for one in found]  # of equal savings the one that loses least first
    assert ranked == [(3, 0.9, False), (4, 0.5, True), (2, 0.5, True), (1, 0.25, True)]
    assert search.best() == found[1]
    assert found[1].config == told(tmp_path)[4].user_attrs["config"]
    assert [(one.trial, one.saved) for one in search.trials.settings(saving="inference")] == [(1, 0.9)]


# --- baselines of combinations of options: who trains when, what a trial is told against, and what cannot be judged ---

FILE = "CAC_VAR_START_THR: {low: 0.9, high: 0.99}\nlr: {choices: [0.1, 0.5]}"
FIRST = ["lr=0.1", "width=8"]


def searching(folder: Path, begin: bool = True) -> StudySearch:
    """A searcher over a threshold and a learning rate; a width is the same in all trials."""
    return searcher(
        folder, begin=begin, baseline=False, own=search_spaces.load("my.yaml", {"my.yaml": FILE}), sharing=False,
        context=search_spaces.SpaceContext(total_steps=CONTEXT.total_steps, workload_options=("width=8",)),
        base=TrialConfig(workload="a.b:c", workload_options=tuple(FIRST), method="none"),
    )  # fmt: skip


def asked(search: StudySearch, name: str) -> dict[str, Any]:
    found = search.suggest(name)
    assert isinstance(found, dict)
    return found


def of_another(folder: Path) -> tuple[StudySearch, str, dict[str, Any], dict[str, Any]]:
    """A searcher whose first baseline has ended; the name of a trial of lr=0.5, its config, and its baseline's."""
    search = searching(folder)
    first = asked(search, "0")
    assert (first["config"]["workload_options"], first["config"]["method"]) == (FIRST, "none")
    search.on_trial_complete("0", row(0.9, 0.0))
    start = asked(search, "1")  # the starting point, in the combination of the first baseline
    assert (start["options"], start["config"]["workload_options"]) == ("lr=0.1", FIRST)
    search.on_trial_complete("1", row(0.88, 0.3))
    for number in range(2, 60):
        trial = asked(search, str(number))
        if trial["options"] == "lr=0.5":
            baseline = asked(search, "b")
            assert baseline["config"] == {**first["config"], "workload_options": ["lr=0.5", "width=8"]}
            return search, str(number), trial, baseline
        search.on_trial_complete(str(number), row(0.9, 0.1))
    raise AssertionError("no trial of lr=0.5")


def test_each_combination_is_judged_against_its_own_baseline(tmp_path: Path) -> None:
    search, name, trial, baseline = of_another(tmp_path)
    assert (baseline["role"], baseline["options"], baseline["trial"]) == ("baseline", "lr=0.5", trial["trial"] + 1)
    assert baseline["sharing"] is not None  # it is recorded
    again = asked(search, "another")  # no second one while it trains
    assert again["role"] == "search"
    search.on_trial_complete(name, row(0.7, 0.2))
    assert told(tmp_path)[trial["trial"]].state == TrialState.RUNNING  # waits for its baseline
    search.on_trial_complete("b", row(0.75, 0.0))
    best = search.best()
    assert best.trial != trial["trial"]  # it loses too much against its own baseline
    trials = told(tmp_path)
    assert trials[trial["trial"]].constraints["accuracy_drop"] == pytest.approx(0.75 - 0.7 - 0.01)
    assert trials[1].constraints["accuracy_drop"] == pytest.approx(0.9 - 0.88 - 0.01)
    assert trials[baseline["trial"]].values == [0.75, 0.0]
    assert {t.user_attrs["options"] for t in trials if "config" in t.user_attrs} == {"lr=0.1", "lr=0.5"}
    counted = [t for t in trials if t.state == TrialState.COMPLETE and t.number != baseline["trial"]]
    assert search.trials.finished_count() == len(counted)


def test_an_interrupted_baseline_is_trained_when_the_search_goes_on(tmp_path: Path) -> None:
    search, name, trial, baseline = of_another(tmp_path)
    search.on_trial_complete(name, row(0.7, 0.2))
    again = searching(tmp_path, begin=False)  # the process was killed; the trial had ended, its baseline had not
    again.adopt_unfinished()
    again.ask_for(0)
    [missing] = again.trials.missing_baselines()
    assert missing.values == {"method": "none", "workload_options": ["lr=0.5", "width=8"]}
    assert asked(again, "b")["config"] == baseline["config"]
    assert again.suggest("x") in (FINISHED, None)
    again.on_trial_complete("b", row(0.75, 0.0))
    assert again.trials.missing_baselines() == []
    assert told(tmp_path)[trial["trial"]].constraints["accuracy_drop"] == pytest.approx(0.04)


def test_a_combination_whose_baseline_failed_is_not_trained_again(tmp_path: Path) -> None:
    search, name, trial, baseline = of_another(tmp_path)
    search.tell_failure("b", "TrainingDiverged: the loss is nan")
    search.on_trial_complete(name, row(0.7, 0.2))
    assert told(tmp_path)[trial["trial"]].constraints == {"no_baseline": 1.0}
    assert not search.gave_up
    for later in range(20):
        assert asked(search, f"later-{later}")["options"] == "lr=0.1"
        search.on_trial_complete(f"later-{later}", row(0.89, 0.2))
    errors = {t.user_attrs["error"] for t in told(tmp_path) if t.state == TrialState.PRUNED}
    assert errors == {"the baseline of lr=0.5 failed (TrainingDiverged: the loss is nan)"}
    assert told(tmp_path)[baseline["trial"]].state == TrialState.FAIL
