"""What the spaces of compression ask for, and that every sample fits a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import search_spaces
from search_spaces import Space, SpaceContext
from search_spaces.pruning_sensitivities import STEP, WIDEST
from search_spaces.pruning_sensitivities_by_block import blocks
from search_spaces.space import Range, corners, describe
from trainables.compression.schedule import read_schedule
from trainables.compression.schedule.timing import Timing
from trainables.compression.scheduler import check_on_model
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from trainables.workloads import build
from tune_cac.tuning.run_context import run_context

SPACES = [name for name in search_spaces.SPACES if search_spaces.load(name).method == "compression"]
MARKED = """
version: 1
pruners:
  p: {class: AutomatedGradualPruner, initial_sparsity: 0.05, weights: ["re:conv[1-6].weight"],
      final_sparsity: !search {low: 0.3, high: 0.9, step: 0.1, name: final}}
  q: {class: SensitivityPruner, sensitivities: {classifier.weight: !search {low: 0.01, high: 1.0, log: true}}}
lr_schedulers:
  l: {class: StepLR, step_size: !search {low: 1, high: 9}, gamma: !search {choices: [0.1, 1.0, 0.3333333333]}}
policies:
- {pruner: {instance_name: p}, starting_epoch: !search {low: 0, high: 4}, ending_epoch: 9}
- {pruner: {instance_name: q, args: {keep_mask: !search {choices: [true, false]}}}, epochs: [3]}
- {lr_scheduler: {instance_name: l}, starting_epoch: 0, ending_epoch: 9}
"""


def sampled(space: Space, context: SpaceContext, count: int, seed: int = 0) -> list[tuple[dict[str, Any], Any]]:
    """Fields and parameters of random samples."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    found = []
    for _ in range(count):
        trial = study.ask()
        found.append((space.suggest(trial, context), trial))
    return found


def ranges(name: str, context: SpaceContext) -> dict[str, Range]:
    return {found.name: found for found in describe(search_spaces.load(name), context)}


@pytest.mark.filterwarnings("ignore:the teacher")
@pytest.mark.parametrize("name", SPACES)
def test_every_sample_builds_on_the_models_of_digits(name: str, tmp_path: Path) -> None:
    base = TrialConfig(epochs=12, method="none")
    hold: dict[str, Any] = {}
    if name == "distillation":
        torch.save(build("digits").make_model().state_dict(), tmp_path / "t.pt")
        hold["distill_checkpoint"] = str(tmp_path / "t.pt")
    if name == "schedule":
        hold["schedule"] = MARKED
    context = run_context(base)
    assert context.weight_names == (*(f"conv{n}.weight" for n in range(1, 7)), "classifier.weight")
    context = SpaceContext(
        total_steps=context.total_steps, epochs=12, weight_names=context.weight_names, schedule=hold.get("schedule")
    )
    space = search_spaces.load(name)
    schedules = set()
    samples = [values for values, _ in sampled(space, context, 30)] + corners(space, context)
    for values in samples:
        config = TrialConfig(epochs=12, method="compression", **{**values, **hold})
        schedule = schedule_of(config)
        schedules.add(json.dumps(schedule))
        if schedule["policies"]:
            check_on_model(schedule, base)
    assert len(schedules) > 10  # the parameters make a difference


@pytest.mark.parametrize("epochs", [*range(2, 60), 90, 100, 200, 350])
def test_gradual_pruning_has_two_epochs_at_least_in_a_run_of_any_length(epochs: int) -> None:
    context = SpaceContext(total_steps=10 * epochs, epochs=epochs, weight_names=("a.weight",))
    space = search_spaces.load("agp")
    found = {one.name: one for one in describe(space, context)}
    tightest = {
        "agp_final_sparsity": 0.5, "pruning_start_epoch": found["pruning_start_epoch"].high,
        "pruning_end_epoch": found["pruning_end_epoch"].low, "pruning_frequency": found["pruning_frequency"].high,
    }  # fmt: skip
    ends = [*corners(space, context), space.suggest(optuna.trial.FixedTrial(tightest), context)]
    for values in [*ends, *(v for v, _ in sampled(space, context, 10, seed=epochs))]:
        (policy,) = schedule_of(TrialConfig(epochs=epochs, method="compression", **values))["policies"]
        timing = Timing(**{key: policy[key] for key in ("starting_epoch", "ending_epoch", "frequency")})
        assert len(timing.active_epochs()) >= 2
        assert 0 <= timing.starting_epoch <= 0.4 * epochs
        assert timing.ending_epoch <= epochs


# --- sensitivities --------------------------------------------------------------------------------------------------

WEIGHTS = ("conv1.weight", "layer1.0.conv1.weight", "layer1.0.conv2.weight", "layer1.1.conv1.weight", "fc.weight")
CONTEXT = SpaceContext(total_steps=300, weight_names=WEIGHTS)


def test_a_layer_or_block_has_one_sensitivity_and_the_start_is_a_third_of_the_largest() -> None:
    assert blocks(CONTEXT) == [[WEIGHTS[0]], [WEIGHTS[1], WEIGHTS[2]], [WEIGHTS[3]], [WEIGHTS[4]]]
    by_layer = {"s:" + name.replace(".", "/") for name in WEIGHTS}
    by_block = {"s:conv1/weight", "s:layer1/0", "s:layer1/1/conv1/weight", "s:fc/weight"}
    for name, parameters in (("pruning_sensitivities", by_layer), ("pruning_sensitivities_by_block", by_block)):
        space, found = search_spaces.load(name), ranges(name, CONTEXT)
        assert found.keys() == parameters
        assert {(one.low, one.high, one.step) for one in found.values()} == {(0.0, WIDEST, STEP)}
        values = space.suggest(optuna.trial.FixedTrial(dict(space.start(CONTEXT))), CONTEXT)
        assert values == {"pruning_sensitivities": tuple(f"{weight}=0.5" for weight in WEIGHTS)}


# --- marks ----------------------------------------------------------------------------------------------------------


def test_a_schedules_marks_get_the_sampled_values() -> None:
    context = SpaceContext(total_steps=120, epochs=12, schedule=MARKED)
    seen: dict[str, set[Any]] = {}
    for values, trial in sampled(search_spaces.load("schedule"), context, 60):
        schedule = schedule_of(TrialConfig(epochs=12, method="compression", schedule=MARKED, **values))
        read_schedule(schedule)
        filled = {
            "mark:final": schedule["pruners"]["p"]["final_sparsity"],
            "mark:pruners/q/sensitivities/classifier/weight": schedule["pruners"]["q"]["sensitivities"][
                "classifier.weight"
            ],
            "mark:lr_schedulers/l/step_size": schedule["lr_schedulers"]["l"]["step_size"],
            "mark:lr_schedulers/l/gamma": schedule["lr_schedulers"]["l"]["gamma"],
            "mark:policies/0/starting_epoch": schedule["policies"][0]["starting_epoch"],
            "mark:policies/1/pruner/args/keep_mask": schedule["policies"][1]["pruner"]["args"]["keep_mask"],
        }
        assert set(filled) == set(trial.params)
        for name, value in trial.params.items():
            assert filled[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
            assert type(filled[name]) is type(value)
            seen.setdefault(name, set()).add(value)
    assert seen["mark:lr_schedulers/l/gamma"] == {0.1, 1.0, 0.3333333333}
    assert {round(value, 6) for value in seen["mark:final"]} == {0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}
    assert seen["mark:policies/0/starting_epoch"] == {0, 1, 2, 3, 4}
    assert seen["mark:policies/1/pruner/args/keep_mask"] == {True, False}


def test_distillation_asks_for_the_same_epochs_that_the_run_has() -> None:
    for epochs in (1, 2, 9, 10, 25, 90):
        found = ranges("distillation", SpaceContext(total_steps=epochs, epochs=epochs))["distill_start_epoch"]
        assert found.low == 0
        assert found.high <= epochs / 2
        assert (found.high - found.low) % found.step == 0
