"""The space of the training recipe: what it asks for on a run, and what it joins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna
import pytest

import search_spaces
from search_spaces.space import ANY_RUN, describe
from search_spaces.training_recipe import DEFAULT, one_by_one
from trainables.config import TrialConfig
from trainables.training.recipe.fields import RECIPE_FIELDS
from tune_cac.study.search_options import SearchOptions
from tune_cac.tuning.run_context import run_context

SPACE = search_spaces.load("training_recipe")


def context_of(workload: str, **fields: Any) -> search_spaces.SpaceContext:
    return run_context(TrialConfig(workload=workload, method="none", saving="time", **fields))


def test_a_run_is_asked_for_what_makes_a_difference_on_it() -> None:
    digits = context_of("digits").recipe
    assert digits["batch_size"] == (None, 32, 128, 256)
    assert digits["loader_workers"] == (None, 1, 2)
    assert {"channels_last", "fused_optimizer", "activation_checkpointing", "compile_mode"} <= set(digits)
    text = context_of("text").recipe
    assert not {"batch_size", "loader_workers", "channels_last"} & set(text)
    assert {"precision", "activation_checkpointing", "fused_optimizer"} <= set(text)
    assert "fused_optimizer" not in context_of("rosenbrock").recipe  # an optimizer of its own
    assert not {"cudnn_benchmark", "pin_memory"} & set(digits)
    gpu = context_of("digits", device="cuda").recipe
    assert gpu["precision"] == (None, "bfloat16", "float16")
    assert gpu["compile_mode"] == (None, "default", "reduce-overhead", "max-autotune")
    assert {"cudnn_benchmark", "pin_memory"} <= set(gpu)


def test_what_is_fixed_is_not_searched_and_other_searches_do_not_look() -> None:
    assert "precision" not in context_of("digits", precision="bfloat16").recipe
    assert run_context(TrialConfig(method="none")).recipe == {}


def test_each_choice_is_first_tried_by_itself() -> None:
    starts = one_by_one(ANY_RUN)
    assert len(starts) == sum(len(values) - 1 for values in ANY_RUN.recipe.values())
    for start in starts:
        changed = {name: value for name, value in start.items() if value != DEFAULT}
        assert len(changed) == 1
        values = SPACE.suggest(optuna.trial.FixedTrial(start), ANY_RUN)
        assert list(values) == list(changed)
        TrialConfig(method="recipe", **values)


def test_joined_with_gradient_skip_both_are_searched_by_the_clock() -> None:
    joined = search_spaces.load("auto_thresholds+training_recipe")
    assert (joined.method, joined.saving) == ("gradskip", "time")
    names = {found.name for found in describe(joined, ANY_RUN)}
    assert {"CAC_VAR_START_THR", "precision", "batch_size"} <= names
    first = joined.further_starts(ANY_RUN)[0]
    assert set(joined.start(ANY_RUN)) >= set(first) - {"activation_checkpointing"}
    run = replace(ANY_RUN, total_steps=90, recipe={"compile_mode": (None, "default")})
    asked = {**joined.start(run), "compile_mode": "default"}
    compiled, eager = (
        joined.suggest(optuna.trial.FixedTrial({**asked, "compile_mode": mode}), run) for mode in ("default", DEFAULT)
    )
    assert len(range(compiled["CAC_STOP_INTERVAL"], 90, compiled["CAC_STOP_INTERVAL"])) == 3
    assert eager == {
        name: value for name, value in compiled.items() if name not in ("compile_mode", "CAC_STOP_INTERVAL")
    }
    # Of three epochs of 30 batches of 64 samples.
    sized = replace(run, epochs=3, batch_size=64, recipe={**run.recipe, "batch_size": (None, 32, 128, 256)})
    for size, steps in ((DEFAULT, 90), ("32", 180), ("128", 45), ("256", 24)):
        interval = joined.suggest(optuna.trial.FixedTrial({**asked, "batch_size": size}), sized)["CAC_STOP_INTERVAL"]
        assert 2 <= len(range(interval, steps, interval)) <= 3
    rules, stops = (search_spaces.load(f"{name}+training_recipe") for name in ("stop_rules", "manual_layers"))
    for space in (rules, stops):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
        for _ in range(60):
            values = space.suggest(study.ask(), run)
            TrialConfig(method=space.method, **values)
            assert "CAC_STOP_LAYER_ITR" not in values or "CAC_STOP_INTERVAL" not in values
    # Compiled in every trial, by `--set`, in a space that does not search it.
    options = SearchOptions(space="auto_thresholds", hold={"compile_mode": "default", "batch_size": 128})
    own = options.loaded_space
    known = replace(sized, fixed={name: value for name, value in options.fixed.items() if name in own.may_be_fixed})
    assert own.suggest(optuna.trial.FixedTrial(own.start(known)), known)["CAC_STOP_INTERVAL"] == -(-45 // 4)
    wished = replace(known, fixed={**known.fixed, "CAC_STOP_INTERVAL": 5})
    assert "CAC_STOP_INTERVAL" not in own.suggest(optuna.trial.FixedTrial(own.start(known)), wished)
    pruning = search_spaces.load("agp+training_recipe")
    assert (pruning.method, pruning.saving) == ("compression", "time")


def test_times_are_measured_alone() -> None:
    options = SearchOptions(space="training_recipe")
    assert (options.ranked_by, options.sharing, options.fresh_processes, options.trials_at_a_time) == (
        "time", False, True, 1,
    )  # fmt: skip
    assert SearchOptions(space="training_recipe", concurrency=2).trials_at_a_time == 2


def test_fields_of_the_recipe_alone_are_of_its_method() -> None:
    from trainables.config import method_of

    assert method_of(["precision", "batch_size"]) == "recipe"
    assert method_of(["precision", "CAC_VAR_START_THR"]) == "gradskip"
    assert method_of(["learning_rate"]) == "none"
    assert set(SPACE.meanings) == set(RECIPE_FIELDS)


@pytest.mark.parametrize("workload", ["digits", "text", "rosenbrock", "binary_mlp", "gan_digits"])
def test_every_choice_is_a_valid_configuration_of_the_workload(workload: str) -> None:
    context = context_of(workload)
    for start in [SPACE.start(context), *one_by_one(context)]:
        TrialConfig(workload=workload, method="recipe", **SPACE.suggest(optuna.trial.FixedTrial(dict(start)), context))
