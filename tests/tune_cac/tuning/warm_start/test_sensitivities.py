"""Ranges from the trained baseline, against pruning it by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from compression_schedules import EPOCHS
from runs import finish
from tiny_workload import STEPS_PER_EPOCH, tiny  # noqa: F401 - a fixture

import tune_cac.tuning.warm_start.baseline as module
from search_spaces import SpaceContext, load
from search_spaces.pruning_sensitivities import LEAST
from trainables.config import TrialConfig
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.stage_tree.store import StageStore
from trainables.training.run import TrainingRun
from tune_cac.tuning.run_context import run_context
from tune_cac.tuning.search_plan import SearchPlan
from tune_cac.tuning.study_searcher import StudySearch
from tune_cac.tuning.warm_start.baseline import (
    LEAST_DROP,
    LEVELS,
    MOST_EVALUATIONS,
    asks_for_sensitivities,
    baseline_sensitivities,
    learn,
)

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
    shutil.rmtree(tmp_path / "objects")  # all checkpoints
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
    monkeypatch.setattr(module, "_analysed", lambda *given: tried.append(given[4]) or {})
    for count in (1, 31, 32, 62, 63):
        names = tuple(f"{n}.weight" for n in range(count))
        assert baseline_sensitivities(tmp_path, f"{count:024d}", base, names, 0.01) == {}
    assert tried == [LEVELS[0], LEVELS[0], LEVELS[1], LEVELS[1]]
    assert all(len(LEVELS[place]) * count <= MOST_EVALUATIONS for place, count in ((0, 31), (1, 62)))


@pytest.mark.filterwarnings("ignore:nothing was learned from the baseline")
def test_only_spaces_whose_ranges_depend_on_it_ask(base: TrialConfig, tmp_path: Path) -> None:
    context = SpaceContext(total_steps=EPOCHS * STEPS_PER_EPOCH, epochs=EPOCHS, weight_names=NAMES)
    asks = {name: asks_for_sensitivities(load(name), context) for name in ("agp", "distillation", "auto_thresholds")}
    assert asks == {"agp": False, "distillation": False, "auto_thresholds": False}
    root = baseline(base, tmp_path / "tree")
    for name in ("pruning_sensitivities", "auto_thresholds+pruning_sensitivities_by_block"):
        assert asks_for_sensitivities(load(name), context)
        learned = learn(load(name), context, tmp_path / "tree", base=base, hold={}, root=root, allowed_drop=0.02)
        found = baseline_sensitivities(tmp_path / "tree", root, base, NAMES, 0.02)
        assert dict(learned.context.sensitivities) == found
        assert learned.spread(5, 0) == []
    assert learn(load(name), context, tmp_path / "tree", base=base, hold={}, root=None).context == context


@pytest.mark.filterwarnings("ignore:nothing was learned from the baseline")
def test_a_search_begins_with_half_of_what_was_found(base: TrialConfig, tmp_path: Path) -> None:
    """The starting point waits for the baseline, also in a search that goes on, and is queued once."""

    def searcher() -> StudySearch:
        return StudySearch(SearchPlan(
            space=load("pruning_sensitivities"), context=run_context(base), base=base,
            journal=tmp_path / "optuna.journal", allowed_drop=0.02, seed=0, run_folder="ray/run-000",
            checkpoint_every_s=60, tree=tmp_path / "tree", budget_bytes=10**9, trials=4,
        ))  # fmt: skip

    search = searcher()
    search.begin()
    assert [search.suggest("baseline")["config"]["method"], search.suggest("early")] == ["none", None]  # type: ignore[index, call-overload]
    with SharedRun(base, Sharing(tree=tmp_path / "tree")) as run:
        last = finish(run)[-1]
    search.on_trial_complete("baseline", last)
    search = searcher()
    search.adopt_unfinished()
    found = baseline_sensitivities(tmp_path / "tree", last["stage"], base, NAMES, 0.02)
    for number in range(2):
        suggested = search.suggest(str(number))
        assert isinstance(suggested, dict)
        values = dict(text.split("=") for text in suggested["config"]["pruning_sensitivities"])
        halves = {name: pytest.approx(0.5 * max(LEAST, bears), abs=0.02) for name, bears in found.items()}
        assert ({name: float(value) for name, value in values.items()} == halves) == (number == 0)
