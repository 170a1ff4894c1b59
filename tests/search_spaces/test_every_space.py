"""The contract of search spaces; a new one is covered by being there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import optuna
import pytest

import search_spaces
from search_spaces import SpaceContext
from search_spaces.space import corners, describe
from trainables.config import TrialConfig, field_names
from trainables.gradskip.variables import BY_NAME
from trainables.registry import METHODS

LAYERS = tuple(f"layer{i}" for i in range(20))
#: A schedule with a mark of each kind.
MARKED = """
version: 1
pruners:
  p: {class: AutomatedGradualPruner, initial_sparsity: 0.05, weights: ["*.weight"],
      final_sparsity: !search {low: 0.3, high: 0.9, step: 0.1, name: final}}
lr_schedulers:
  l: {class: StepLR, step_size: !search {low: 1, high: 9, log: true}, gamma: !search {choices: [0.1, 1.0]}}
policies:
- {pruner: {instance_name: p}, starting_epoch: !search {low: 0, high: 4}, ending_epoch: 9}
- {lr_scheduler: {instance_name: l}, starting_epoch: 0, ending_epoch: 9}
"""
WEIGHTS = ("conv.weight", "layer1.0.conv1.weight", "layer1.0.conv2.weight", "layer1.1.conv1.weight", "fc.weight")
#: Models as spaces see them: unknown, without units, with one unit that may stop, with several; with weights to prune;
#: runs of few epochs.
MODELS: list[dict[str, Any]] = [
    {},
    {"layer_names": LAYERS},
    {"layer_names": LAYERS[:1], "weight_names": WEIGHTS[:1], "epochs": 2},
    {"layer_names": LAYERS, "unit_ends": (4,), "weight_names": WEIGHTS, "epochs": 20, "schedule": MARKED},
    {"layer_names": LAYERS, "unit_ends": (2, 5, 8, 11, 14), "weight_names": WEIGHTS, "schedule": MARKED},
]  # fmt: skip
CONTEXTS = [SpaceContext(total_steps=steps, **model) for steps in (1, 300, 450_450) for model in MODELS]


@pytest.mark.slow
@pytest.mark.parametrize("name", search_spaces.SPACES)
def test_every_sample_is_a_valid_config_whose_keys_are_fields_and_whose_parameters_are_described(name: str) -> None:
    space = search_spaces.load(name)
    assert space.name == name
    assert space.method in METHODS
    for context in CONTEXTS:
        described = {found.name for found in describe(space, context)}
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        asked: set[str] = set()
        for _ in range(30):
            trial = study.ask()
            values = space.suggest(trial, context)
            assert set(values) <= set(field_names())
            settings = TrialConfig(method=space.method, **values).gradskip_settings()
            settings.check_layers(max(1, len(context.layer_names)))
            asked |= set(trial.params)
        assert asked <= described
        if context.total_steps == 300:
            assert asked == described  # sixty samples come to every branch


@pytest.mark.parametrize("name", search_spaces.SPACES)
def test_the_ends_of_the_ranges_are_valid_configs(name: str) -> None:
    space = search_spaces.load(name)
    for context in CONTEXTS:
        for values in corners(space, context):
            TrialConfig(method=space.method, **values)


@pytest.mark.parametrize("name", search_spaces.SPACES)
def test_the_starting_point_is_what_the_space_asks_for_and_inside_its_ranges_unless_published(name: str) -> None:
    space = search_spaces.load(name)
    for context in CONTEXTS:
        start = dict(space.start(context))
        # As a search does it. FixedTrial raises for a parameter that is asked for and not given.
        study = optuna.create_study()
        study.enqueue_trial(start)
        enqueued = study.ask()
        values = space.suggest(optuna.trial.FixedTrial(start), context)
        assert space.suggest(enqueued, context) == values
        assert enqueued.params == start
        TrialConfig(method=space.method, **values)
        ranges = {found.name: found for found in describe(space, context)}
        for parameter, value in start.items():
            found = ranges[parameter]
            if found.choices is not None:
                assert value in found.choices
            else:
                # Published values need not be on the grid that the search goes on with; Optuna takes them (above).
                assert found.base_name.startswith("CAC_VAR_") or found.low <= value <= found.high, (parameter, value)


@pytest.mark.parametrize("name", search_spaces.SPACES)
def test_a_space_travels_between_processes(name: str) -> None:
    space = search_spaces.load(name)
    again = pickle.loads(pickle.dumps(space))
    context = CONTEXTS[-1]
    assert corners(again, context) == corners(space, context)
    assert again.start(context) == space.start(context)
    assert again.notes(context) == space.notes(context)


@pytest.mark.parametrize("name", search_spaces.SPACES)
def test_every_parameter_has_a_meaning(name: str) -> None:
    space = search_spaces.load(name)
    for found in describe(space, CONTEXTS[-1]):
        assert found.base_name in BY_NAME or space.meaning(found.base_name)


@pytest.mark.parametrize("name", search_spaces.SPACES)
def test_a_space_is_the_file_of_its_name(name: str) -> None:
    found = [path.suffix for path in Path(search_spaces.__file__).parent.glob(f"{name}.*")]
    assert found in ([".py"], [".yaml"])
