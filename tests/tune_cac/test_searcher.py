"""What Optuna is told, on a real journal and without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from searchers import CONTEXT, learning, row, searcher, told
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
import search_spaces
from search_spaces import SpaceContext
from trainables.config import TrialConfig
from tune_cac.trial_folder import last_checkpoint, last_row


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
    second.adopt_unfinished(tmp_path)
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


def test_after_a_failed_baseline_the_others_go_on_without_a_drop(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.suggest("a")
    assert search.suggest("b") is None
    search.on_trial_complete("a", error=True)
    search.tell_failure("a", "ValueError: no")
    assert search.suggest("b") is not None
    search.on_trial_complete("b", row(0.9, 0.1))
    baseline, other = told(tmp_path)
    assert (baseline.state, baseline.user_attrs["error"]) == (TrialState.FAIL, "ValueError: no")
    assert other.state == TrialState.COMPLETE
    assert not other.constraints


def test_an_interrupted_baseline_comes_before_what_was_queued(tmp_path: Path) -> None:
    """Killed in its baseline, a search begins with it again: everything else learns from it."""
    searcher(tmp_path, baseline=False).suggest("a")
    again = searcher(tmp_path, begin=False)
    again.adopt_unfinished(tmp_path)
    assert again.suggest("b")["config"]["method"] == "none"
    assert again.suggest("c") is None
    # Killed again while the published trial was held back: it still has its parameters.
    again = searcher(tmp_path, begin=False)
    again.adopt_unfinished(tmp_path)
    assert again.suggest("b")["config"]["method"] == "none"
    again.on_trial_complete("b", row(0.9, 0.0))
    published = again.suggest("c")
    start = search_spaces.load("auto_thresholds").start(CONTEXT)
    assert {k: v for k, v in published["config"].items() if k.startswith("CAC_")} == start
    again.on_trial_complete("c", row(0.89, 0.2))
    assert again.finished_count() == 2
    # Killed once more after the published trial was held back: nothing is lost.
    assert again.suggest("d") is not None
    third = searcher(tmp_path, begin=False)
    third.adopt_unfinished(tmp_path)
    assert third.finished_count() == 2
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
    second.adopt_unfinished(tmp_path)
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
    assert search.finished_count() == 1


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
    second.adopt_unfinished(tmp_path)
    assert second.finished_count() == 2
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
    assert predicted["stop_events"].nunique() == len(queued)
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
    second.adopt_unfinished(tmp_path)
    for n in range(3):
        second.suggest(str(n))
    assert sum("start" in t.user_attrs for t in told(tmp_path)) == count


@pytest.mark.usefixtures("tiny")
def test_ranges_are_those_of_the_run(tmp_path: Path) -> None:
    search = learning(tmp_path)
    context = search._learn().context
    assert context.start_thr_range is not None
    lowest = context.start_thr_range[0]
    assert 0 < lowest < 1
    for n in range(14):
        suggested = search.suggest(str(n))
        search.on_trial_complete(str(n), row(0.9, 0.1 + n / 100))
    assert told(tmp_path)[-1].distributions["CAC_VAR_START_THR"].low >= lowest - 0.1
    # A resumed search learns the same from the same run.
    assert learning(tmp_path, begin=False)._learn().context == context
    assert suggested is not None


@pytest.mark.usefixtures("tiny")
def test_what_stops_nothing_is_told_as_the_baseline_and_not_counted(tmp_path: Path) -> None:
    # With a first decision that comes after the run's end nothing the sampler proposes does anything.
    search = learning(tmp_path, hold={"CAC_VAR_START_ITR": 1000})
    assert search.suggest("start") is not None  # the space's starting point is asked for all the same
    before = search.finished_count()
    suggested = search.suggest("a")
    assert suggested is not None  # after fifty in a row one is tried all the same
    skipped = [t for t in told(tmp_path) if "skipped" in t.user_attrs]
    assert len(skipped) == 50
    assert {tuple(t.values) for t in skipped} == {tuple(told(tmp_path)[0].values)}
    assert all(t.constraints["accuracy_drop"] <= 0 for t in skipped)
    assert search.finished_count() == before
    trials = analysis.load(tmp_path)
    assert trials["trial"].tolist() == [0, 1, suggested["trial"]]


@pytest.mark.usefixtures("tiny")
def test_a_tree_that_cannot_be_read_or_written_teaches_nothing(tmp_path: Path) -> None:
    search = learning(tmp_path)
    for path in (tmp_path / "tree").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.warns(UserWarning, match="nothing was learned from the baseline: "):
        assert search.suggest("a") is not None
    assert search._learn().trace is None
