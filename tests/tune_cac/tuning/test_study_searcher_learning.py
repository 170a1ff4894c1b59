"""What a search learns from its baseline, and what it passes over without training."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import tiny_workload
import torch
from optuna.trial import TrialState, create_trial
from searchers import learning, row, searcher, told
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from tune_cac.tuning.study_searcher import FINISHED, StudySearch, make_sampler


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_search_starts_with_settings_whose_outcomes_differ(tmp_path: Path) -> None:
    search = learning(tmp_path, repeats=False)  # else whole outcomes are searched
    search.suggest("published")
    starts = [search.suggest(str(n))["config"] for n in range(10)]
    queued = [t for t in told(tmp_path) if "start" in t.user_attrs]
    assert [t.user_attrs["start"] for t in queued] == list(range(len(queued)))
    assert len(queued) > 3
    predicted = analysis.replay(analysis.load_trace(tmp_path), [TrialConfig(**c) for c in starts[: len(queued)]])
    braking = [config["CAC_BRAKING_DISTANCE"] for config in starts[: len(queued)]]
    assert len(set(zip(predicted["stop_events"], braking, strict=True))) == len(queued)
    assert predicted["compute_saved"].is_monotonic_increasing
    # The same in another process, whatever its random generators: both modes of a search are compared row by row.
    again = tmp_path / "again"
    again.mkdir()
    other = learning(again, repeats=False)
    other.suggest("published")
    assert [other.suggest(str(n))["config"] for n in range(10)] == starts


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_start_is_queued_once(tmp_path: Path) -> None:
    first = learning(tmp_path, repeats=False)
    first.suggest("published")
    count = sum("start" in t.user_attrs for t in told(tmp_path))
    assert count > 3
    first.study.set_user_attr("spread", False)  # as if killed while it queued
    second = learning(tmp_path, seed=0, begin=False, repeats=False)
    second.adopt_unfinished()
    for n in range(3):
        second.suggest(str(n))
    assert sum("start" in t.user_attrs for t in told(tmp_path)) == count


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_ranges_are_those_of_the_run(tmp_path: Path) -> None:
    search = learning(tmp_path)
    context = search.learn().context
    assert context.first_thresholds is not None
    lowest = context.first_thresholds[0]
    assert 0 < lowest < 1
    for n in range(14):
        suggested = search.suggest(str(n))
        search.on_trial_complete(str(n), row(0.9, 0.1 + n / 100))
    assert told(tmp_path)[-1].distributions["CAC_VAR_START_THR"].low >= lowest - 0.1
    # A resumed search learns the same from the same run.
    assert learning(tmp_path, begin=False).learn().context == context
    assert suggested is not None


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("hold", "said"),
    [
        (
            {"CAC_VAR_START_THR": 0.01},
            r"space braking_distance does nothing on this run: no layer stops with the values that it fixes, for the "
            r"first one's weight variance falls to 0\.\d+ of its peak; fix a higher threshold \(--set "
            r"CAC_VAR_START_THR=\.\.\.\), or search --space auto_thresholds, whose ranges are those of the run",
        ),
        ({"CAC_VAR_START_THR": 1.0}, ""),
    ],
)
def test_a_space_that_does_nothing_is_said_to(
    hold: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = learning(tmp_path, space="braking_distance", hold=hold)
    search.suggest("a")
    assert re.fullmatch(said, search.trials.why_little)
    assert re.fullmatch(said, capsys.readouterr().err.strip())
    assert (
        learning(tmp_path, begin=False, space="braking_distance", hold=hold).trials.why_little
        == search.trials.why_little
    )


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("space", "there"), [("auto_thresholds", True), ("stop_rules", False)])
def test_a_run_without_weight_decay_is_said_to_be_none_for_the_variance_rule(
    space: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tiny_workload.Tiny,
        "make_optimizer",
        lambda self, named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
    )
    search = learning(tmp_path, space=space)
    search.suggest("a")
    assert (
        search.trials.why_little.startswith("weight decay is 0, so hardly anything drives weight variance below")
        == there
    )
    assert ("--space manual_layers" in search.trials.why_little) == there


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_what_stops_nothing_is_passed_over_and_leaves_no_trace_in_the_study(tmp_path: Path) -> None:
    # With a first decision that comes after the run's end nothing the sampler proposes does anything.
    search = learning(tmp_path, hold={"CAC_VAR_START_ITR": 1000})
    assert search.suggest("start") is not None  # the space's starting point is asked for all the same
    suggested = search.suggest("a")
    assert suggested is not None  # after fifty in a row one is tried all the same
    skipped = search.candidates.skipped
    assert len(skipped) == 50
    assert {tuple(t.values) for t in skipped} == {tuple(told(tmp_path)[0].values)}
    assert all(t.constraints["accuracy_drop"] <= 0 for t in skipped)
    # Numbers are those that were asked for, and what Optuna shows as best was trained.
    assert [trial.number for trial in told(tmp_path)] == [0, 1, suggested["trial"]] == [0, 1, 2]
    assert analysis.load(tmp_path)["trial"].tolist() == [0, 1, 2]
    search.on_trial_complete("start", row(0.9, 0.1))
    search.on_trial_complete("a", row(1.0, 0.2))
    assert [trial.number for trial in search.study.best_trials] == [2]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_sampler_learns_from_what_is_passed_over_as_if_it_were_trained(tmp_path: Path) -> None:
    """It proposes what it would in a study that held them."""
    search = learning(tmp_path, hold={"CAC_VAR_START_ITR": 1000})
    search.suggest("start")
    search.suggest("a")
    plain = optuna.create_study(directions=["maximize"] * 2, sampler=make_sampler(0))
    plain.add_trial(told(tmp_path)[0])
    start = told(tmp_path)[1]
    on_steps = {
        name: type(value)(asked.low + round((value - asked.low) / asked.step) * asked.step)
        for name, value in start.params.items()
        for asked in [start.distributions[name]]
    }
    plain.add_trial(create_trial(state=TrialState.RUNNING, params=on_steps, distributions=start.distributions))
    row_of_baseline = told(tmp_path)[0].values
    for passed in search.candidates.skipped:
        trial = plain.ask()
        search._search_space.suggest(trial, search.learn().context)
        assert trial.params == passed.params
        trial.set_constraint("accuracy_drop", passed.constraints["accuracy_drop"])
        plain.tell(trial, row_of_baseline)


@pytest.mark.usefixtures("tiny")
def test_a_tree_that_cannot_be_read_or_written_teaches_nothing(tmp_path: Path) -> None:
    search = learning(tmp_path)
    for path in (tmp_path / "tree").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.warns(UserWarning, match="nothing was learned from the baseline: "):
        assert search.suggest("a") is not None
    assert search.learn().trace is None


MARKED = """
version: 1
pruners:
  g: {class: AutomatedGradualPruner, initial_sparsity: 0.05, final_sparsity: 0.5, weights: [conv1.weight]}
policies:
- {pruner: {instance_name: g}, starting_epoch: !search {low: 0, high: 8}, ending_epoch: !search {low: %s, high: 9}}
"""


def compressing(folder: Path, schedule: str) -> StudySearch:
    search = searcher(folder, space="schedule", hold={"schedule": schedule})
    search._context = replace(search._context, schedule=schedule)
    return search


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
    configs = [search.suggest(str(n))["config"] for n in range(12)]  # type: ignore[index]
    for config in configs:
        assert schedule_of(TrialConfig.from_mapping(config))["policies"]
    states = [trial.state.name for trial in told(tmp_path)]
    assert states.count("RUNNING") == 12
    assert states.count("PRUNED") > 0
    pruned = next(trial for trial in told(tmp_path) if trial.state == TrialState.PRUNED)
    assert "ending_epoch" in pruned.user_attrs["error"] or "at least two" in pruned.user_attrs["error"]
    assert search.trials.finished_count() == 1  # the baseline
    assert search.suggest("x") is None
    for number in range(12):
        search.on_trial_complete(str(number), row(0.9, 0.1))
    assert search.suggest("x") == FINISHED
    frame = analysis.load(tmp_path / "optuna.journal")
    assert set(frame["status"]) == {"completed", "pruned"}


@pytest.mark.slow
def test_marks_of_which_no_combination_can_be_end_the_search(tmp_path: Path) -> None:
    search = compressing(tmp_path, MARKED.replace("high: 8", "high: 9").replace("low: 0", "low: 8") % 2)
    search.ask_for(3)
    assert search.suggest("x") == FINISHED
    assert re.match("of [0-9]+ combinations of the marked values none can be, such as: ", search.gave_up)
