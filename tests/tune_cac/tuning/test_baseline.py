"""What a search learns from its baseline, against trying every threshold and start, and pruning by hand."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compression_schedules import EPOCHS
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import invented_blueprint, invented_trace
from runs import finish
from tiny_workload import STEPS_PER_EPOCH, tiny  # noqa: F401 - a fixture

import search_spaces
import tune_cac.tuning.baseline as module
from analysis.trace_replay.traces import RunTrace
from search_spaces import SpaceContext, load
from search_spaces.pruning_sensitivities import LEAST
from search_spaces.space import describe
from trainables.config import TrialConfig
from trainables.gradskip.replay import GradskipReplay
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.stage_tree.store import StageStore
from trainables.training.run import TrainingRun
from tune_cac.tuning.baseline import (
    LEAST_DROP,
    LEVELS,
    MOST_EVALUATIONS,
    DrawnTrial,
    WarmStart,
    asks_for_sensitivities,
    baseline_sensitivities,
    learn,
    never_acts,
    with_learned_ranges,
)
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.run_context import run_context
from tune_cac.tuning.searcher import StudySearch

BASE = TrialConfig(method="none", epochs=4)


STEPS = 40


def a_trace(seed: int, **more: Any) -> RunTrace:
    return invented_trace(random.Random(seed), layers=3, total_steps=STEPS, steps_per_epoch=10, **more)


def context_of(trace: RunTrace) -> SpaceContext:
    return SpaceContext(total_steps=trace.total_steps, layer_names=trace.layer_names, unit_ends=(0, 3, 6))


def acts(trace: RunTrace, until: int = 3 * STEPS // 4, **values: Any) -> bool:
    """Whether the machine, stepped over the dense run, does anything; in the first three quarters unless told."""
    replay = GradskipReplay(TrialConfig(**values), invented_blueprint(3))
    return replay.advance(trace.dense.recorded, until) is not None


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_ranges_end_where_thresholds_stop_mattering(seed: int) -> None:
    trace = a_trace(seed)
    before = context_of(trace)
    found = with_learned_ranges(before, trace, [TrialConfig()])
    if found.first_thresholds is None:
        assert not acts(trace, CAC_VAR_START_ITR=0, CAC_VAR_START_THR=1.0, CAC_VAR_SAMPLES=1)
        assert found.latest_start_itr is None
        return
    low, high = found.first_thresholds
    assert 0 < low < high == 1.0
    for start in range(0, STEPS, 7):
        for samples in (1, 2, 5):  # nothing looks deeper than every step from the first on
            timing = {"CAC_VAR_START_ITR": start, "CAC_VAR_SAMPLES": samples}
            assert not acts(trace, CAC_VAR_START_THR=low - 3e-6, **timing) or low == 0.01
    # Every value of the range does something.
    assert acts(trace, CAC_VAR_START_ITR=0, CAC_VAR_START_THR=low, CAC_VAR_SAMPLES=1)
    possible = [
        start
        for start in range(3 * STEPS // 4)
        if acts(trace, CAC_VAR_START_ITR=start, CAC_VAR_START_THR=1.0, CAC_VAR_SAMPLES=1)
    ]
    assert found.latest_start_itr == max(possible)
    assert replace(found, first_thresholds=None, later_thresholds=None, latest_start_itr=None) == before


def test_what_is_not_known_changes_nothing() -> None:
    trace = a_trace(0)
    before = context_of(trace)
    unknown = [TrialConfig(CAC_WATCH=("linear",)), BASE, TrialConfig(CAC_RULE="linear", CAC_RULE_END_ITR=9)]
    assert with_learned_ranges(before, trace, unknown) == before
    assert with_learned_ranges(before, replace(trace, facts={}), [TrialConfig()]) == before
    assert not never_acts(TrialConfig(CAC_WATCH=("linear",)), trace)
    assert not never_acts(TrialConfig(CAC_RULE="plasticity", CAC_RULE_INTERVAL=3), trace)
    assert not never_acts(TrialConfig(CAC_RULE="freezeout", CAC_RULE_END_ITR=90, CAC_RULE_START_ITR=80), trace)


@pytest.mark.parametrize("seed", range(5))
def test_never_acts_is_what_the_machine_says(seed: int) -> None:
    trace = a_trace(seed)
    rng = random.Random(seed)
    said = []
    for _ in range(60):
        values = {
            "CAC_VAR_START_ITR": rng.randint(0, STEPS),
            "CAC_VAR_START_THR": rng.choice([0.5, 0.9, 0.95, 0.99]),
            "CAC_VAR_SAMPLES": rng.choice([1, 3, 10]),
        }
        said.append(never_acts(TrialConfig(**values), trace))
        assert said[-1] == (not acts(trace, STEPS, **values))
    assert True in said


def test_spaces_take_the_learned_ranges() -> None:
    context = SpaceContext(total_steps=300)
    space = search_spaces.load("auto_thresholds")
    learned = replace(context, first_thresholds=(0.97, 1.0), later_thresholds=(0.8, 1.0), latest_start_itr=40)
    ranges = {found.name: found for found in describe(space, learned)}
    # Grids begin no lower.
    assert 0.97 <= ranges["CAC_VAR_START_THR"].low <= 0.98
    assert 0.8 <= ranges["CAC_VAR_MT_THR"].low <= 0.85
    assert 0.8 <= ranges["CAC_VAR_SLOPE_THR"].low <= 0.85
    assert {ranges[f"CAC_VAR_{name}_THR"].high for name in ("START", "MT", "SLOPE")} == {1.0}
    assert 20 <= ranges["CAC_VAR_START_ITR"].high <= 40
    early = {found.name: found for found in describe(space, replace(learned, latest_start_itr=0))}
    assert 1 <= early["CAC_VAR_START_ITR"].high <= 20  # a range, all the same
    late = {found.name: found for found in describe(space, replace(learned, latest_start_itr=290))}
    assert late["CAC_VAR_START_ITR"].high == 150  # never later than without
    rules = {found.name: found for found in describe(search_spaces.load("stop_rules"), learned)}
    assert rules["variance.CAC_VAR_MT_THR"].low == ranges["CAC_VAR_MT_THR"].low
    assert [str(r) for r in describe(space, context)] == [
        str(r) for r in describe(space, SpaceContext(total_steps=300))
    ]


@pytest.mark.slow
def test_what_was_trained_since_changes_nothing() -> None:
    """A resumed search learns what it would have learned before."""
    config = TrialConfig(CAC_VAR_START_ITR=0, CAC_VAR_SAMPLES=1)
    trace = a_trace(11, trained=[config, replace(config, CAC_VAR_START_THR=0.99)])
    assert len(trace.stages) > 1
    context = context_of(trace)
    for ask in (
        lambda t: with_learned_ranges(context, t, [TrialConfig()]),
        lambda t: never_acts(config, t),
    ):
        assert ask(trace) == ask(trace.dense_only())


def test_draws_cover_their_ranges() -> None:
    rng = random.Random(0)
    trials = [DrawnTrial(rng) for _ in range(4000)]
    for trial in trials:
        trial.suggest_int("i", 2, 11, step=3)
        trial.suggest_int("log", 1, 20, log=True)
        trial.suggest_float("f", 0.5, 2.0)
        trial.suggest_float("flog", 0.01, 1.0, log=True)
        trial.suggest_float("step", 0.0, 1.0, step=0.25)
        trial.suggest_categorical("c", (False, True))
    drawn = {name: [trial.params[name] for trial in trials] for name in trials[0].params}
    assert set(drawn["i"]) == {2, 5, 8, 11}
    assert set(drawn["log"]) == set(range(1, 21))
    assert drawn["log"].count(1) > 3 * drawn["log"].count(10)
    assert min(drawn["f"]) >= 0.5
    assert max(drawn["f"]) <= 2.0
    assert np.median(drawn["flog"]) == pytest.approx(0.1, rel=0.15)
    assert set(drawn["step"]) == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert set(drawn["c"]) == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "acts"), [(STEPS, False), (0, True)])
def test_held_values_count(first: int, acts: bool) -> None:
    trace = a_trace(11)
    hold = {"CAC_VAR_START_THR": 1.0, "CAC_VAR_START_ITR": first, "CAC_VAR_SAMPLES": 1}
    space = search_spaces.load("braking_distance")
    known = WarmStart(space=space, context=context_of(trace), base=BASE, hold=hold, trace=trace)
    assert (known.why_little(0) == "") == acts
    assert all(values.items() >= hold.items() for _, values in known.drawn(0, 5))


# --- pruning sensitivities, against pruning by hand -------------------------------------------------------------------

NAMES = ("0.weight", "3.weight", "6.weight", "9.weight", "15.weight")


@pytest.fixture
def base(tiny: str) -> TrialConfig:  # noqa: F811 - the imported fixture
    return TrialConfig(workload=tiny, epochs=EPOCHS, method="none")


def baseline(base: TrialConfig, tree: Path, **more: int) -> str:
    """Trained over a tree; the root."""
    with SharedRun(base, Sharing(tree=tree, **more)) as run:
        finish(run)
        return run.store.root


@pytest.mark.parametrize("allowed_drop", [0.005, 0.1])
def test_a_layer_bears_what_pruning_it_alone_by_hand_says(
    allowed_drop: float, base: TrialConfig, tmp_path: Path
) -> None:
    found = baseline_sensitivities(tmp_path, baseline(base, tmp_path), base, NAMES, allowed_drop)
    assert set(found) == set(NAMES)
    with TrainingRun(base) as run:
        for _ in range(EPOCHS - 1):
            run.train_epoch()
        assert run.step == (EPOCHS - 1) * STEPS_PER_EPOCH
        model, workload = run.model.eval(), run.workload
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            dense = workload.evaluate(model, "validation", "cpu")
            for name in NAMES:
                weight = parameters[name]
                saved = weight.clone()
                bears = 0
                for level in LEVELS[0]:
                    count = int(level * weight.numel() + 1e-9)
                    threshold = sorted(saved.abs().flatten().tolist())[count - 1] if count else -1.0
                    weight.copy_(torch.where(saved.abs() > threshold, saved, 0.0))
                    if dense - workload.evaluate(model, "validation", "cpu") > max(allowed_drop, LEAST_DROP) + 1e-9:
                        break
                    bears = count
                weight.copy_(saved)
                # s prunes exactly as many: |w| <= s std(w).
                pruned = int((saved.abs() <= found[name] * saved.std()).sum())
                assert abs(pruned - bears) <= 1, name  # s has four decimals


def test_it_is_kept_and_the_same_for_a_search_that_goes_on(base: TrialConfig, tmp_path: Path) -> None:
    root = baseline(base, tmp_path)
    found = baseline_sensitivities(tmp_path, root, base, NAMES, 0.02)
    shutil.rmtree(tmp_path / "checkpoints")
    assert baseline_sensitivities(tmp_path, root, base, NAMES, 0.02) == found
    assert StageStore(tmp_path, root).read("sensitivities-0.02.json") == found
    assert json.loads(json.dumps(found)) == found


def test_nothing_known_stays_nothing_known(base: TrialConfig, tmp_path: Path) -> None:
    """A state that another trial leaves later does not change the ranges of a search that goes on."""
    root = baseline(base, tmp_path, budget_bytes=0)
    assert baseline_sensitivities(tmp_path, root, base, NAMES, 0.02) == {}
    late = TrialConfig(
        workload="tiny", epochs=EPOCHS, method="compression", pruning_sensitivities=("0.weight=0.5",),
        pruning_start_epoch=EPOCHS - 1, pruning_end_epoch=EPOCHS,
    )  # fmt: skip
    with SharedRun(late, Sharing(tree=tmp_path, trials=10**9)) as trial:
        finish(trial)
        kept = [entry.step for entry in trial.checkpoints.entries(root)]
    assert (EPOCHS - 1) * STEPS_PER_EPOCH in kept
    assert baseline_sensitivities(tmp_path, root, base, NAMES, 0.02) == {}
    assert baseline_sensitivities(tmp_path, root, base, NAMES, 0.03) != {}


def test_deep_models_are_tried_at_fewer_levels_and_the_deepest_not_at_all(
    base: TrialConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[float, ...]] = []
    monkeypatch.setattr(module, "_analysed", lambda *given: tried.append(given[3]) or {})
    for count in (1, 31, 32, 62, 63):
        names = tuple(f"{n}.weight" for n in range(count))
        assert baseline_sensitivities(tmp_path, f"{count:024d}", base, names, 0.01) == {}
    assert tried == [LEVELS[0], LEVELS[0], LEVELS[1], LEVELS[1]]
    assert all(len(LEVELS[place]) * count <= MOST_EVALUATIONS for place, count in ((0, 31), (1, 62)))


def plan_of(folder: Path, base: TrialConfig) -> SearchPlan:
    return SearchPlan(
        space=load("pruning_sensitivities"), context=run_context(base), base=base, journal=folder / "optuna.journal",
        allowed_drop=0.02, seed=0, run_folder="ray/run-000", checkpoint_every_s=60, tree=folder / "tree",
        budget_bytes=10**9, trials=4,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:nothing was learned from the baseline")
def test_only_spaces_whose_ranges_depend_on_it_ask(base: TrialConfig, tmp_path: Path) -> None:
    context = SpaceContext(total_steps=EPOCHS * STEPS_PER_EPOCH, epochs=EPOCHS, weight_names=NAMES)
    asks = {name: asks_for_sensitivities(load(name), context) for name in ("agp", "distillation", "auto_thresholds")}
    assert asks == {"agp": False, "distillation": False, "auto_thresholds": False}
    root = baseline(base, tmp_path / "tree")
    for name in ("pruning_sensitivities", "auto_thresholds+pruning_sensitivities_by_block"):
        assert asks_for_sensitivities(load(name), context)
        plan = replace(plan_of(tmp_path, base), space=load(name), context=context)
        learned = learn(plan, root)
        found = baseline_sensitivities(tmp_path / "tree", root, base, NAMES, 0.02)
        assert dict(learned.context.sensitivities) == found
    assert learn(plan, None).context == context


@pytest.mark.filterwarnings("ignore:nothing was learned from the baseline")
def test_a_search_begins_with_half_of_what_was_found(base: TrialConfig, tmp_path: Path) -> None:
    """The starting point waits for the baseline, also in a search that goes on, and is queued once."""

    def searcher() -> StudySearch:
        return StudySearch(plan_of(tmp_path, base))

    search = searcher()
    search.begin()
    assert [search.suggest("baseline")["config"]["method"], search.suggest("early")] == ["none", None]
    with SharedRun(base, Sharing(tree=tmp_path / "tree")) as run:
        last = finish(run)[-1]
    search.on_trial_complete("baseline", last)
    search = searcher()
    search.adopt_unfinished()
    found = baseline_sensitivities(tmp_path / "tree", last["stage"], base, NAMES, 0.02)
    for number in range(2):
        suggested = search.suggest(str(number))
        values = dict(text.split("=") for text in suggested["config"]["pruning_sensitivities"])
        halves = {name: pytest.approx(0.5 * max(LEAST, bears), abs=0.02) for name, bears in found.items()}
        assert ({name: float(value) for name, value in values.items()} == halves) == (number == 0)
