"""Settings that samplers draw and points of grids, on real journals: none is trained twice, none that cannot be."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from searchers import CONTEXT, row, searcher, told

import analysis
import search_spaces
from search_spaces import Space
from search_spaces.grid import grid_points
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from tune_cac.study.fixed_params import grid_of
from tune_cac.tuning.candidates import draft_of, make_sampler
from tune_cac.tuning.searcher import FINISHED, StudySearch

# --- samplers by name -------------------------------------------------------------------------------------------------


def drawn(folder: Path, sampler: str, count: int) -> list[float]:
    """How much the settings brake and count, in [0, 1]: the more, the worse are both objectives."""
    folder.mkdir()
    made = searcher(folder, sampler=sampler)
    found = []
    for number in range(count):
        suggested: Any = made.suggest(str(number))
        config = suggested["config"]
        found.append((config["CAC_BRAKING_DISTANCE"] / 60 + config["CAC_VAR_MT_COUNT_THR"] / 20) / 2)
        made.on_trial_complete(str(number), row(0.9 - 0.1 * found[-1], 0.5 - 0.5 * found[-1]))
    return found


@pytest.mark.parametrize("name", ["tpe", "random", "nsga2"])
def test_a_plain_sampler_begins_with_the_start_and_repeats(tmp_path: Path, name: str) -> None:
    first = drawn(tmp_path / "first", name, 8)
    baseline, start, *others = told(tmp_path / "first")
    assert [trial.user_attrs.get("role") for trial in (baseline, start)] == ["baseline", "published"]
    assert len({str(trial.params) for trial in others}) == 7
    assert first == drawn(tmp_path / "again", name, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("tpe", 30), *(pytest.param(*c, marks=pytest.mark.thorough) for c in (("gp", 16), ("nsga2", 120)))],
)
def test_what_learns_learns_in_spite_of_a_baseline_without_parameters(tmp_path: Path, name: str, count: int) -> None:
    # With a trial without parameters in sight, Optuna's GP and NSGA-II draw what its random sampler draws.
    late = fmean(drawn(tmp_path / "it", name, count)[-count // 3 :])
    assert late < 0.6 * fmean(drawn(tmp_path / "random", "random", count)[1:])


def test_nsga2_has_its_generations_in_the_study(tmp_path: Path) -> None:
    drawn(tmp_path / "it", "nsga2", 4)
    attrs = [set(trial.system_attrs) for trial in told(tmp_path / "it")[2:]]
    assert all(any("generation" in name for name in found) for found in attrs)


@pytest.mark.parametrize("name", ["auto", "tpe", "random", "gp", "nsga2"])
def test_a_sampler_can_do_two_objectives_and_a_constraint(name: str) -> None:
    study = optuna.create_study(directions=["maximize"] * 2, sampler=make_sampler(0, name))
    for _ in range(12):
        trial = study.ask()
        x = trial.suggest_float("x", 0, 1)
        trial.set_constraint("accuracy_drop", x - 0.5)
        study.tell(trial, [1 - x, x])
    assert len(study.best_trials) > 0


def test_a_draft_has_what_samplers_read_of_begun_trials(tmp_path: Path) -> None:
    ranges = {name: optuna.distributions.FloatDistribution(0, 1) for name in "xy"}

    def shown(trial: FrozenTrial) -> tuple[Any, ...]:
        return trial.state, trial.params, trial.values, trial.constraints

    trials = searcher(tmp_path, begin=False).trials
    study = trials.study
    study.enqueue_trial({"x": 0.5})  # what waits has no parameters yet
    running = [trials.start({"row": 1}, params={"x": n / 4, "y": 0.5}, distributions=ranges) for n in range(4)]
    running[0].set_constraint("drop", -0.1)
    study.tell(running[0], [0.9, 0.3])
    study.tell(running[1], state=TrialState.FAIL)
    study.tell(running[2], state=TrialState.PRUNED)
    trials.start({})
    draft = draft_of(trials, make_sampler(0))
    assert [*map(shown, draft.trials)] == [*map(shown, study.trials[1:5])]
    assert not any(trial.user_attrs for trial in draft.trials)


# --- settings that a study has are not trained again ------------------------------------------------------------------

#: Six settings, of which replay knows nothing.
VALUES: dict[str, list[Any]] = {"zero_threshold": [0.01, 0.1, 0.2], "zero_unbiased": [False, True]}
START = {"zero_threshold": 0.01, "zero_unbiased": False}


def few(trial: Any, context: Any) -> dict[str, Any]:
    return {"method": "zero_gradients", **{name: trial.suggest_categorical(name, of) for name, of in VALUES.items()}}


SPACE = Space(name="few", method="zero_gradients", suggest=few, start=lambda context: START)


def trained(made: StudySearch, failing: Collection[int] = ()) -> list[str]:
    """Train until the search ends by itself; return the configurations in their order."""
    found: list[str] = []
    while (suggested := made.suggest(number := str(len(found)))) != FINISHED:
        if suggested is None:  # Ray asks again
            continue
        found.append(json.dumps(suggested["config"], sort_keys=True))
        if int(number) in failing:
            made.tell_failure(number, "no memory")
        else:
            made.on_trial_complete(number, row(0.9, 0.1))
        assert len(found) < 120
    return found


def test_each_of_a_few_settings_is_trained_once_and_the_search_ends(tmp_path: Path) -> None:
    made = searcher(tmp_path, own=SPACE)
    made.ask_for(30)
    found = trained(made, failing=[2])
    assert (len(found), made.gave_up) == (6, "")
    assert len(set(found)) == 6
    assert made.nothing_left
    assert made.candidates.why_ended == "of 525 settings drawn in a row none was left to train"
    assert len(told(tmp_path)) == 7  # with the baseline: nothing is padded into the study
    again = searcher(tmp_path, own=SPACE, begin=False)
    again.adopt_unfinished()
    again.ask_for(30)
    assert trained(again) == [found[2]]  # what was wrong may have been mended


def test_the_search_goes_on_while_one_runs_that_may_begin_again(tmp_path: Path) -> None:
    made = searcher(tmp_path, own=SPACE)
    made.ask_for(30)
    running = [made.suggest(str(number)) for number in range(6)]
    assert len({json.dumps(one["config"], sort_keys=True) for one in running if isinstance(one, dict)}) == 6
    assert made.suggest("6") is None
    assert not made.nothing_left
    for number in "01234":
        made.on_trial_complete(number, row(0.9, 0.1))
    assert made.suggest("6") is None
    assert made.tell_failure("5", "its worker died", died=True)
    again = made.suggest("6")
    assert again["config"] == running[5]["config"]
    made.on_trial_complete("6", row(0.9, 0.1))
    assert trained(made) == []
    assert made.nothing_left


def test_what_cannot_be_is_drawn_once(tmp_path: Path) -> None:
    made = searcher(tmp_path, own=SPACE)
    made.ask_for(30)
    made.trials.why_useless = lambda config: "no" if config["zero_unbiased"] else ""
    assert len(trained(made)) == 3
    assert made.gave_up == ""  # what could be was trained
    assert made.nothing_left
    assert [trial.state.name for trial in told(tmp_path)].count("PRUNED") == 3


# --- combinations of a schedule's marked values that cannot be --------------------------------------------------------

MARKED = """
version: 1
pruners:
  g: {class: AutomatedGradualPruner, initial_sparsity: 0.05, final_sparsity: 0.5, weights: [conv1.weight]}
policies:
- {pruner: {instance_name: g}, starting_epoch: !search {low: 0, high: 8}, ending_epoch: !search {low: %s, high: 9}}
"""
ROWS = """
version: 1
pruners:
  g:
    class: L1RankedStructureParameterPruner_AGP
    group_type: !search {choices: [Filters, Rows]}
    initial_sparsity: 0.05
    final_sparsity: 0.5
    weights: [!search {choices: [conv1.weight, classifier.weight]}]
policies:
- {pruner: {instance_name: g}, starting_epoch: 0, ending_epoch: 3}
"""


def compressing(folder: Path, schedule: str) -> StudySearch:
    search = searcher(folder, space="schedule", hold={"schedule": schedule})
    search._context = replace(search._context, schedule=schedule)
    return search


@pytest.mark.slow
def test_combinations_that_only_the_model_refuses_are_pruned_too(tmp_path: Path) -> None:
    """Rows want a matrix, filters a convolution: such a trial failed, and with it the search's exit code."""
    search = compressing(tmp_path, ROWS)
    search.ask_for(8)
    suggested = [one["config"] for n in range(8) if isinstance(one := search.suggest(str(n)), dict)]
    assert len(suggested) == 2  # all that can be
    pruned = [schedule_of(TrialConfig.from_mapping(config)) for config in suggested]
    kinds = {(one["pruners"]["g"]["group_type"], one["pruners"]["g"]["weights"][0]) for one in pruned}
    assert kinds == {("Filters", "conv1.weight"), ("Rows", "classifier.weight")}
    assert any("need a matrix" in trial.user_attrs.get("error", "") for trial in told(tmp_path))


def test_combinations_of_marks_that_cannot_be_are_pruned_and_others_asked_for(tmp_path: Path) -> None:
    search = compressing(tmp_path, MARKED % 2)
    search.ask_for(12)
    configs = [search.suggest(str(n))["config"] for n in range(12)]
    for config in configs:
        assert schedule_of(TrialConfig.from_mapping(config))["policies"]
    states = [trial.state.name for trial in told(tmp_path)]
    assert states.count("RUNNING") == 12
    assert states.count("PRUNED") > 0
    pruned = next(trial for trial in told(tmp_path) if trial.state == TrialState.PRUNED)
    assert "ending_epoch" in pruned.user_attrs["error"] or "at least two" in pruned.user_attrs["error"]
    assert search.trials.finished_count() == 1  # the baseline
    for number in range(12):
        search.on_trial_complete(str(number), row(0.9, 0.1))
    assert search.suggest("x") == FINISHED
    assert set(analysis.load(tmp_path / "optuna.journal")["status"]) == {"completed", "pruned"}


@pytest.mark.thorough
@pytest.mark.slow
def test_marks_of_which_no_combination_can_be_end_the_search(tmp_path: Path) -> None:
    search = compressing(tmp_path, MARKED.replace("high: 8", "high: 9").replace("low: 0", "low: 8") % 2)
    search.ask_for(3)
    assert search.suggest("x") == FINISHED
    assert re.match("of [0-9]+ combinations of the marked values none can be, such as: ", search.gave_up)


# --- grids: each point once, in order, through failures and killed searches -------------------------------------------

GRID = grid_of(
    {"all": {"CAC_VAR_START_THR": [0.9, 0.97], "CAC_BRAKING_DISTANCE": [0, {"value": 20, "then": {"all": {
        "CAC_VAR_MT_COUNT_THR": [0, 2]}}}]}, "exclude": "CAC_BRAKING_DISTANCE"}
)  # fmt: skip
GRID_SPACE: Space = search_spaces.load("grid", grid=GRID)
POINTS = [dict(point) for point in GRID["settings"]]


def walk(folder: Path, *, begin: bool = True) -> StudySearch:
    return searcher(folder, own=GRID_SPACE, grid=grid_points(GRID_SPACE, CONTEXT), sampler="grid", begin=begin)


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name.startswith("CAC_")}


def completed_points(folder: Path) -> list[dict[str, Any]]:
    ended = [trial for trial in told(folder) if trial.state == TrialState.COMPLETE]
    return [settings_of(t.user_attrs["config"]) for t in ended if t.user_attrs["role"] != "baseline"]


def test_the_points_are_trained_in_the_order_of_the_file_and_then_the_search_ends(tmp_path: Path) -> None:
    made = walk(tmp_path)
    for number, point in enumerate(POINTS):
        suggested = made.suggest(str(number))
        assert settings_of(suggested["config"]) == point
        assert suggested["config"]["unnamed"] == ["CAC_BRAKING_DISTANCE"]
        if number != 1:
            made.on_trial_complete(str(number), row(0.9, 0.1 * number))
        else:
            made.tell_failure(str(number), "ValueError: of the user's")
    assert made.nothing_left
    assert made.suggest("more") == FINISHED
    assert completed_points(tmp_path) == [POINTS[0], *POINTS[2:]]
    again = walk(tmp_path, begin=False)
    again.adopt_unfinished()
    assert again.nothing_left  # what failed by itself would fail again


def test_a_search_that_is_killed_at_any_time_goes_on_and_trains_no_point_twice(tmp_path: Path) -> None:
    made = walk(tmp_path)
    for kill in range(20):
        for number in range(2):  # two begin, one ends, and the process is gone
            name = f"{kill}.{number}"
            if made.suggest(name) == FINISHED:
                break
            if number == 0:
                made.on_trial_complete(name, row(0.9, 0.1))
        else:
            if kill == 1:  # killed again between queueing the point and reporting the interrupted trial
                made.study.enqueue_trial(told(tmp_path)[-1].params, user_attrs={"role": "search"})
            made = walk(tmp_path, begin=False)
            made.adopt_unfinished()
            continue
        break
    assert made.nothing_left
    assert sorted(map(str, completed_points(tmp_path))) == sorted(map(str, POINTS))


def test_a_grid_over_a_built_in_space_begins_with_its_published_start(tmp_path: Path) -> None:
    space = search_spaces.load("braking_distance")
    made = searcher(tmp_path, own=space, sampler="grid", grid=grid_points(space, CONTEXT))
    roles = []
    for number in range(3):
        config: Any = made.suggest(str(number))
        roles.append((config["role"], config["config"]["CAC_BRAKING_DISTANCE"]))
    assert roles == [("published", 0), ("search", 1), ("search", 2)]
