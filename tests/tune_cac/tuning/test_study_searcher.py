"""What Optuna is told, on a real journal and without Ray."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import tiny_workload
import torch
from optuna.trial import TrialState
from searchers import CONTEXT, learning, row, searcher, told
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
import search_spaces
from search_spaces import SpaceContext
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from tune_cac.study.trial_folder import last_checkpoint, last_row
from tune_cac.tuning.candidates import make_sampler
from tune_cac.tuning.study_searcher import FINISHED, StudySearch


def test_trial_0_is_the_baseline_and_trial_1_the_scaled_defaults(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    baseline = search.suggest("a")
    assert search.suggest("b") is None  # the others wait: they learn from it
    search.on_trial_complete("a", row(0.9, 0.0))
    published, third = (search.suggest(name) for name in "bc")
    assert baseline["config"]["method"] == "none"
    assert (baseline["trial"], published["trial"], third["trial"]) == (0, 1, 2)
    start = search_spaces.load("auto_thresholds").start(CONTEXT)
    assert {k: v for k, v in published["config"].items() if k.startswith("CAC_")} == start
    assert third["config"]["method"] == "gradskip"
    assert [t.user_attrs.get("role", "search") for t in told(tmp_path)] == ["baseline", "published", "search"]


def test_held_values_win_over_what_the_space_fixes_and_spare_the_baseline(tmp_path: Path) -> None:
    search = searcher(tmp_path, space="braking_distance", hold={"CAC_VAR_START_THR": 0.97, "CAC_WATCH": ["linear"]})
    first, *others = (search.suggest(name)["config"] for name in "bcdef")
    assert told(tmp_path)[0].user_attrs["config"] == TrialConfig(method="none").to_dict()
    fixed = search_spaces.load("auto_thresholds").start(CONTEXT)
    for config in (first, *others):
        given = {k: v for k, v in config.items() if k.startswith("CAC_") and k != "CAC_BRAKING_DISTANCE"}
        wanted = {**fixed, "CAC_VAR_START_THR": 0.97, "CAC_WATCH": ["linear"]}
        del wanted["CAC_BRAKING_DISTANCE"]
        assert given == wanted
        TrialConfig.from_mapping(config)
    assert first["CAC_BRAKING_DISTANCE"] == 0
    assert len({config["CAC_BRAKING_DISTANCE"] for config in others}) > 1


@pytest.mark.parametrize(
    ("space", "hold", "role"),
    [
        ("auto_thresholds", {}, "published"),
        ("braking_distance", {}, "published"),
        ("braking_distance", {"CAC_VAR_START_THR": 0.97}, "search"),
        ("stop_rules", {}, "search"),
        ("manual_layers", {}, "search"),
    ],
)
def test_the_first_trial_is_called_published_only_where_it_is(
    space: str, hold: dict[str, Any], role: str, tmp_path: Path
) -> None:
    search = searcher(tmp_path, space=space, hold=hold)
    search.suggest("b")
    assert told(tmp_path)[1].user_attrs["role"] == role


def test_configs_are_the_same_to_ray_and_to_the_journal(tmp_path: Path) -> None:
    context = SpaceContext(total_steps=300, layer_names=tuple("abcdefgh"), unit_ends=(1, 3, 5))
    search = searcher(tmp_path, space="manual_layers", context=context)
    for name in "abcdef":
        suggested = search.suggest(name)
        assert told(tmp_path)[suggested["trial"]].user_attrs["config"] == suggested["config"]
        TrialConfig.from_mapping(suggested["config"])


def test_a_conditional_trial_that_was_cut_short_is_queued_again_with_its_branch(tmp_path: Path) -> None:
    first = searcher(tmp_path, space="stop_rules")
    configs = [first.suggest(name)["config"] for name in "abcdefghij"]
    assert len({config.get("CAC_RULE") for config in configs}) > 2
    second = searcher(tmp_path, seed=5, begin=False, space="stop_rules")
    second.adopt_unfinished()
    assert [second.suggest(name)["config"] for name in "klmnopqrst"] == configs


def test_asking_again_for_a_trial_gives_the_same(tmp_path: Path) -> None:
    search = searcher(tmp_path)
    assert search.suggest("a") == search.suggest("a")


def test_objectives_and_constraint(tmp_path: Path) -> None:
    search = searcher(tmp_path)
    for name in "bc":
        search.suggest(name)
    search.on_trial_complete("b", row(0.89, 0.2))
    search.on_trial_complete("c", row(0.88, 0.4))
    trials = told(tmp_path)
    assert [t.values for t in trials] == [[0.9, 0.0], [0.89, 0.2], [0.88, 0.4]]
    drops = [t.constraints["accuracy_drop"] for t in trials]
    assert drops == pytest.approx([-0.01, 0.0, 0.01])
    assert [drop <= 0 for drop in drops] == [True, True, False]  # exactly the allowed drop is feasible
    assert search.study.metric_names == ["accuracy", "compute_saved"]


def fail(search: StudySearch, trial_id: str, message: str, *, died: bool = False) -> bool:
    """As Ray and the progress tell it."""
    search.on_trial_complete(trial_id, error=True)
    return search.tell_failure(trial_id, message, died=died)


@pytest.mark.parametrize("died", [True, False])
def test_a_baseline_that_fails_is_tried_once_more_before_anything_else(died: bool, tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.plan(3)
    search.suggest("a")
    assert fail(search, "a", "OutOfMemoryError: no memory", died=died)
    again = search.suggest("b")
    assert again["config"] == TrialConfig(method="none").to_dict()
    assert search.suggest("c") is None  # the others wait: they learn from it
    search.on_trial_complete("b", row(0.9, 0.0))
    assert search.trials.finished_count() == 1
    others = [search.suggest(name) for name in "cd"]
    assert [other["config"]["method"] for other in others] == ["gradskip"] * 2
    for name in "cd":
        search.on_trial_complete(name, row(0.89, 0.1))
    assert search.suggest("e") == FINISHED
    assert [trial.state.name for trial in told(tmp_path)] == ["FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert told(tmp_path)[1].constraints["accuracy_drop"] == pytest.approx(0.0)
    frame = analysis.load(tmp_path / "optuna.journal")
    assert frame["status"].tolist() == ["interrupted", "completed", "completed", "completed"]


def test_a_baseline_that_fails_twice_ends_the_search_with_its_error_until_it_is_resumed(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.plan(3)
    for name, began_again in (("a", True), ("b", False)):
        search.suggest(name)
        assert fail(search, name, "ValueError: no") == began_again
    assert search.suggest("c") == FINISHED
    assert search.gave_up == "the baseline failed twice (ValueError: no)"
    assert search.trials.finished_count() == 1
    # A search that goes on tries it once more, and only then anything else.
    second = searcher(tmp_path, begin=False)
    second.adopt_unfinished()
    second.restarts.retry_baseline()
    assert second.gave_up == ""
    assert second.trials.finished_count() == 0
    assert second.suggest("d")["config"]["method"] == "none"
    assert second.suggest("e") is None
    assert not fail(second, "d", "ValueError: no")
    assert second.gave_up == "the baseline failed 3 times (ValueError: no)"
    third = searcher(tmp_path, begin=False)
    third.adopt_unfinished()
    third.restarts.retry_baseline()
    third.suggest("f")
    third.on_trial_complete("f", row(0.9, 0.0))
    assert third.suggest("g")["config"]["method"] == "gradskip"
    assert third.trials.finished_count() == 1
    statuses = analysis.load(tmp_path / "optuna.journal")["status"].tolist()
    assert statuses == ["interrupted", "running", "interrupted", "interrupted", "completed"]


@pytest.mark.parametrize("message", ["TrainingDiverged: the accuracy is nan in epoch 1", "UserError: no such layer"])
def test_a_baseline_that_would_fail_again_is_not_tried_again(message: str, tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.plan(3)
    search.suggest("a")
    assert not fail(search, "a", message)
    assert search.suggest("b") == FINISHED
    assert search.gave_up == f"the baseline failed ({message})"


def test_a_trial_whose_worker_died_goes_on_from_its_checkpoint_once(tmp_path: Path) -> None:
    search = searcher(tmp_path)
    search.plan(1)
    first = search.suggest("b")
    checkpoint = Path(first["folder"]) / "checkpoint_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.pt").touch()
    assert search.suggest("c") is None  # nothing more is planned, but this one may die
    assert fail(search, "b", "its worker died (killed)", died=True)
    again = search.suggest("c")
    assert again["config"] == first["config"]
    assert again["resume_from"] == str(checkpoint)
    assert not fail(search, "c", "its worker died (killed)", died=True)
    assert search.suggest("d") == FINISHED
    assert search.trials.finished_count() == 2


def test_a_trial_that_raised_is_not_begun_again(tmp_path: Path) -> None:
    search = searcher(tmp_path)
    search.plan(1)
    search.suggest("b")
    assert not fail(search, "b", "ValueError: no")
    assert search.suggest("c") == FINISHED


def test_an_interrupted_baseline_comes_before_what_was_queued(tmp_path: Path) -> None:
    """Killed in its baseline, a search begins with it again: everything else learns from it."""
    searcher(tmp_path, baseline=False).suggest("a")
    again = searcher(tmp_path, begin=False)
    again.adopt_unfinished()
    assert again.suggest("b")["config"]["method"] == "none"
    assert again.suggest("c") is None
    # Killed again while the published trial was held back: it still has its parameters.
    again = searcher(tmp_path, begin=False)
    again.adopt_unfinished()
    assert again.suggest("b")["config"]["method"] == "none"
    again.on_trial_complete("b", row(0.9, 0.0))
    published = again.suggest("c")
    start = search_spaces.load("auto_thresholds").start(CONTEXT)
    assert {k: v for k, v in published["config"].items() if k.startswith("CAC_")} == start
    again.on_trial_complete("c", row(0.89, 0.2))
    assert again.trials.finished_count() == 2
    # Killed once more after the published trial was held back: nothing is lost.
    assert again.suggest("d") is not None
    third = searcher(tmp_path, begin=False)
    third.adopt_unfinished()
    assert third.trials.finished_count() == 2
    assert third.suggest("e") is not None


def test_a_failed_trial_keeps_what_it_had_executed(tmp_path: Path) -> None:
    search = searcher(tmp_path)
    search.suggest("b")
    search.on_trial_result("b", {"search_flops": 7, "dense_flops": 10, "accuracy": 0.5})
    search.on_trial_complete("b", error=True)
    search.tell_failure("b", "ValueError: no")
    assert told(tmp_path)[1].user_attrs["row_so_far"] == {"search_flops": 7, "dense_flops": 10}


def test_an_interrupted_trial_keeps_what_ray_wrote_of_it(tmp_path: Path) -> None:
    first = searcher(tmp_path)
    folder = tmp_path / "ray/run-000/trial-00001"
    first.suggest("b")
    folder.mkdir(parents=True)
    rows = [json.dumps({"search_flops": n, "dense_flops": 10, "epoch": n}) for n in (3, 6)]
    (folder / "result.json").write_text("\n".join([*rows, rows[0][:9]]))  # the last line is torn
    second = searcher(tmp_path, begin=False)
    second.adopt_unfinished()
    assert told(tmp_path)[1].user_attrs["row_so_far"] == {"search_flops": 6, "dense_flops": 10}
    assert last_row(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_values_that_are_no_finite_numbers_fail(tmp_path: Path, value: float | None) -> None:
    search = searcher(tmp_path, baseline=False)
    search.suggest("a")
    search.on_trial_complete("a", row(0.9, 0.0) | {"accuracy": value})
    (trial,) = (t for t in told(tmp_path) if t.state.is_finished())
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs["error"] == "the trial reported no finite accuracy"
    assert search.trials.finished_count() == 1


def test_unfinished_trials_are_queued_again_and_finished_ones_told(tmp_path: Path) -> None:
    first = searcher(tmp_path)
    configs = [first.suggest(name)["config"] for name in "bcd"]
    # Trial 1 ended and the search was killed before it was told.
    optuna.Trial(first.study, told(tmp_path)[1]._trial_id).set_user_attr("row", row(0.89, 0.1))
    newest = tmp_path / "ray/run-000/trial-00002/checkpoint_000003"
    for number in (1, 3):
        folder = newest.with_name(f"checkpoint_{number:06d}")
        folder.mkdir(parents=True)
        (folder / "run.pt").touch()
    newest.with_name("checkpoint_000004").mkdir()  # a crash left it empty
    # The process dies here; another one opens the journal.
    second = searcher(tmp_path, seed=5, begin=False)
    second.adopt_unfinished()
    assert second.trials.finished_count() == 2
    again = [second.suggest(name) for name in "ef"]
    assert [a["config"] for a in again] == configs[1:]
    assert [a["resume_from"] for a in again] == [str(newest), None]
    assert again[0]["trial"] == 4
    states = [t.state.name for t in told(tmp_path)]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "FAIL", "RUNNING", "RUNNING"]
    assert told(tmp_path)[1].constraints["accuracy_drop"] == pytest.approx(0.0)


def test_a_later_search_draws_other_values(tmp_path: Path) -> None:
    def third(seed: int) -> dict[str, Any]:
        folder = tmp_path / str(seed)
        folder.mkdir()
        search = searcher(folder, seed)
        return [search.suggest(name) for name in "bc"][1]["config"]  # type: ignore[no-any-return]

    assert third(0) != third(1)


def test_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None


# --- what a search learns from its baseline ---------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_a_search_starts_with_settings_whose_outcomes_differ(tmp_path: Path) -> None:
    search = learning(tmp_path)
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
    other = learning(again)
    other.suggest("published")
    assert [other.suggest(str(n))["config"] for n in range(10)] == starts


@pytest.mark.usefixtures("tiny")
def test_the_start_is_queued_once(tmp_path: Path) -> None:
    first = learning(tmp_path)
    first.suggest("published")
    count = sum("start" in t.user_attrs for t in told(tmp_path))
    first.study.set_user_attr("spread", False)  # as if killed while it queued
    second = learning(tmp_path, seed=0, begin=False)
    second.adopt_unfinished()
    for n in range(3):
        second.suggest(str(n))
    assert sum("start" in t.user_attrs for t in told(tmp_path)) == count


@pytest.mark.usefixtures("tiny")
def test_ranges_are_those_of_the_run(tmp_path: Path) -> None:
    search = learning(tmp_path)
    context = search.learn().context
    assert context.start_thr_range is not None
    lowest = context.start_thr_range[0]
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
    assert re.fullmatch(said, search.why_little)
    assert re.fullmatch(said, capsys.readouterr().err.strip())
    assert learning(tmp_path, begin=False, space="braking_distance", hold=hold).why_little == search.why_little


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
    assert search.why_little.startswith("weight decay is 0, so hardly anything drives weight variance below") == there
    assert ("--space stop_rules" in search.why_little) == there


@pytest.mark.usefixtures("tiny")
def test_what_stops_nothing_is_passed_over_and_leaves_no_trace_in_the_study(tmp_path: Path) -> None:
    # With a first decision that comes after the run's end nothing the sampler proposes does anything.
    search = learning(tmp_path, hold={"CAC_VAR_START_ITR": 1000})
    assert search.suggest("start") is not None  # the space's starting point is asked for all the same
    suggested = search.suggest("a")
    assert suggested is not None  # after fifty in a row one is tried all the same
    assert len(search.candidates.skipped) == 50
    assert {tuple(t.values) for t in search.candidates.skipped} == {tuple(told(tmp_path)[0].values)}
    assert all(t.constraints["accuracy_drop"] <= 0 for t in search.candidates.skipped)
    # Numbers are those that were asked for, and what Optuna shows as best was trained.
    assert [trial.number for trial in told(tmp_path)] == [0, 1, suggested["trial"]] == [0, 1, 2]
    assert analysis.load(tmp_path)["trial"].tolist() == [0, 1, 2]
    search.on_trial_complete("start", row(0.9, 0.1))
    search.on_trial_complete("a", row(1.0, 0.2))
    assert [trial.number for trial in search.study.best_trials] == [2]


@pytest.mark.usefixtures("tiny")
def test_a_sampler_learns_from_what_is_passed_over_as_if_it_were_trained(tmp_path: Path) -> None:
    """It proposes what it would in a study that held them."""
    search = learning(tmp_path, hold={"CAC_VAR_START_ITR": 1000})
    search.suggest("start")
    search.suggest("a")
    plain = optuna.create_study(directions=["maximize"] * 2, sampler=make_sampler(0))
    plain.add_trial(told(tmp_path)[0])  # the start lies outside the ranges
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


def test_combinations_that_only_the_model_refuses_are_pruned_too(tmp_path: Path) -> None:
    """Rows want a matrix, filters a convolution: such a trial failed, and with it the search's exit code."""
    search = compressing(tmp_path, ROWS)
    search.plan(8)
    pruned = [schedule_of(TrialConfig.from_mapping(search.suggest(str(n))["config"])) for n in range(8)]  # type: ignore[index]
    kinds = {(one["pruners"]["g"]["group_type"], one["pruners"]["g"]["weights"][0]) for one in pruned}
    assert kinds == {("Filters", "conv1.weight"), ("Rows", "classifier.weight")}
    assert any("need a matrix" in trial.user_attrs.get("error", "") for trial in told(tmp_path))


def test_combinations_of_marks_that_cannot_be_are_pruned_and_others_asked_for(tmp_path: Path) -> None:
    search = compressing(tmp_path, MARKED % 2)
    search.plan(12)
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


def test_marks_of_which_no_combination_can_be_end_the_search(tmp_path: Path) -> None:
    search = compressing(tmp_path, MARKED.replace("high: 8", "high: 9").replace("low: 0", "low: 8") % 2)
    search.plan(3)
    assert search.suggest("x") == FINISHED
    assert re.match("of 200 combinations of the marked values none can be, such as: ", search.gave_up)
