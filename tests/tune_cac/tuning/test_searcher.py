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
from searchers import CONTEXT, learning, row, searcher, told
from thorough import rest_thorough
from tiny_workload import tiny  # noqa: F401 - a fixture

import analysis
import search_spaces
from trainables.config import TrialConfig
from tune_cac.study.folder import last_row
from tune_cac.tuning.searcher import FINISHED, StudySearch


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


def test_a_conditional_trial_that_was_cut_short_is_queued_again_with_its_branch(tmp_path: Path) -> None:
    first = searcher(tmp_path, space="stop_rules")
    configs = [first.suggest(name)["config"] for name in "abcdefghij"]
    assert len({config.get("CAC_RULE") for config in configs}) > 2
    second = searcher(tmp_path, seed=5, begin=False, space="stop_rules")
    second.adopt_unfinished()
    assert [second.suggest(name)["config"] for name in "klmnopqrst"] == configs


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


def test_a_baseline_whose_worker_died_is_tried_once_more_before_anything_else(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.ask_for(3)
    search.suggest("a")
    assert fail(search, "a", "its worker died (killed)", died=True)
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


def test_a_baseline_that_fails_ends_the_search_with_its_error_until_it_is_resumed(tmp_path: Path) -> None:
    search = searcher(tmp_path, baseline=False)
    search.ask_for(3)
    search.suggest("a")
    assert not fail(search, "a", "ValueError: no")
    assert search.suggest("c") == FINISHED
    assert search.gave_up == "the baseline failed"
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
    assert second.gave_up == "the baseline failed"
    third = searcher(tmp_path, begin=False)
    third.adopt_unfinished()
    third.restarts.retry_baseline()
    third.suggest("f")
    third.on_trial_complete("f", row(0.9, 0.0))
    assert third.suggest("g")["config"]["method"] == "gradskip"
    assert third.trials.finished_count() == 1
    statuses = analysis.load(tmp_path / "optuna.journal")["status"].tolist()
    assert statuses == ["interrupted", "running", "interrupted", "completed"]


def test_a_trial_whose_worker_died_goes_on_from_its_checkpoint_once(tmp_path: Path) -> None:
    search = searcher(tmp_path)
    search.ask_for(1)
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
    search.on_trial_result("b", {"search_flops": 7, "dense_flops": 10, "quality": 0.5})
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


# --- what a search learns from its baseline ---------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_ranges_are_those_of_the_run(tmp_path: Path) -> None:
    search = learning(tmp_path)
    context = search.learn().context
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
    rest_thorough(
        [
            (
                {"CAC_VAR_START_THR": 0.01},
                r"space braking_distance does nothing on this run: no layer stops with the values that it fixes, for "
                r"the first one's weight variance falls to 0\.\d+ of its peak; fix a higher threshold \(--set "
                r"CAC_VAR_START_THR=\.\.\.\), or search --space auto_thresholds, whose ranges are those of the run",
            ),
            ({"CAC_VAR_START_THR": 1.0}, ""),
        ],
        of_several=True,
    ),
)
@pytest.mark.slow
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


@pytest.mark.thorough
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
    assert ("--space frozen_prefix" in search.trials.why_little) == there


@pytest.mark.usefixtures("tiny")
def test_a_tree_that_cannot_be_read_or_written_teaches_nothing(tmp_path: Path) -> None:
    search = learning(tmp_path)
    for path in (tmp_path / "tree").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.warns(UserWarning, match="nothing was learned from the baseline: "):
        assert search.suggest("a") is not None
    assert search.learn().trace is None


@pytest.mark.slow
@pytest.mark.thorough
def test_a_walk_takes_what_loses_too_much_over_further_seeds_as_too_deep_and_goes_on(tmp_path: Path) -> None:
    """Every depth loses nothing on the study's seed; on others the deepest loses 4 points, 1 being allowed."""
    context = replace(CONTEXT, layer_names=("a", "b", "c", "d", "e"), unit_ends=(0, 1, 2, 3))
    search = searcher(tmp_path, space="frozen_prefix", context=context, seeds=3)
    search.ask_for(20, seeds=True)
    asked: list[tuple[int, int]] = []  # seed and layer; -1 of the baseline
    forks: set[int] = set()
    while isinstance(sent := search.suggest("a") or search.suggest("a"), dict):
        config = sent["config"]
        deepest, begins = max(config.get("CAC_STOP_LAYER_NUM", [-1])), max(config.get("CAC_STOP_LAYER_ITR", [0]))
        asked.append((config["seed"], deepest))
        forks.add(sent["sharing"]["trials"])
        loses = config["epochs"] < search.plan.base.epochs or (config["seed"] > 0 and deepest == 3)
        accuracy = (0.86 if loses else 0.9) + config["seed"] % 7 / 1000
        search.on_trial_complete("a", row(accuracy, max(0.0, 0.2 * deepest - 0.1 * begins / 300)))
    for further in (1001, 1002):  # from the first step on; half of the run later; and less deep
        assert [deepest for seed, deepest in asked if seed == further] == [-1, 3, 3, 2]
    assert search.walk is not None
    assert search.walk.ended
    best = search.best()
    assert best is not None
    assert best.config["CAC_STOP_LAYER_NUM"] == [2]
    roles = {t.user_attrs["role"] for t in told(tmp_path) if t.user_attrs["config"]["seed"] > 0}
    assert roles == {"control"}
    assert forks == {1}  # a frozen prefix begins by its freezing, so no run's middle is worth many checkpoints
