"""Spaces searched together, and which cannot be."""

from __future__ import annotations

import optuna
import pytest

import search_spaces
from search_spaces import SpaceContext, parts_of
from search_spaces.space import describe
from trainables.config import TrialConfig
from trainables.errors import UserError

CONTEXT = SpaceContext(
    total_steps=300, epochs=20, layer_names=tuple("abcdef"), unit_ends=(2, 3), weight_names=("a.weight", "b.weight")
)


def test_a_joined_space_asks_for_the_parameters_of_all() -> None:
    space = search_spaces.load("pruning_sensitivities+auto_thresholds")
    parts = [search_spaces.load(name) for name in parts_of(space.name)]
    assert (space.name, space.method) == ("pruning_sensitivities+auto_thresholds", "gradskip+compression")
    assert {r.name for r in describe(space, CONTEXT)} == {r.name for part in parts for r in describe(part, CONTEXT)}
    assert dict(space.start(CONTEXT)) == {**parts[0].start(CONTEXT), **parts[1].start(CONTEXT)}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    for _ in range(20):
        trial = study.ask()
        values = space.suggest(trial, CONTEXT)
        for part in parts:
            alone = part.suggest(optuna.trial.FixedTrial(trial.params), CONTEXT)
            assert {name: values[name] for name in alone} == alone
        config = TrialConfig(method=space.method, **values)
        assert config.compresses
        assert config.skips_gradients
    assert space.meaning("s:a/weight") == parts[0].meaning("s:a/weight")
    assert space.notes(CONTEXT)[0].startswith("pruning_sensitivities: prunes from")


def test_what_it_saves_and_whether_its_start_is_published() -> None:
    def saving(name: str) -> str:
        return search_spaces.load(name).saving

    assert saving("auto_thresholds+pruning_sensitivities") == "both-sparse"
    assert saving("auto_thresholds+schedule") == "both"
    assert saving("agp+schedule") == saving("agp") == "sparse-inference"
    assert saving("distillation+auto_thresholds") == "training"
    assert search_spaces.load("distillation+auto_thresholds").start_is_published
    assert not search_spaces.load("agp+auto_thresholds").start_is_published
    assert search_spaces.load("zero_gradients+manual_layers").method == "gradskip+zero_gradients"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agp+agp", r"a space can be searched once in a trial, got agp\+agp"),
        (
            "auto_thresholds+manual_layers",
            r"spaces of Gradient-Skip can't be searched together, got auto_thresholds\+manual_layers: they set",
        ),
        ("pruning_sensitivities+pruning_sensitivities_by_block", "both search pruning_sensitivities: join others"),
        ("agp+stop_rules", r"space stop_rules can't be searched together with compression, got agp\+stop_rules: "),
        ("zero_gradients+agp", "space zero_gradients can be searched together with spaces of Gradient-Skip alone"),
        ("stop_rules+zero_gradients", "space stop_rules can't be searched together with zero_gradients"),
        ("svrg+auto_thresholds", "space svrg can't be searched together with another"),
        ("auto_thresholds+agpp", "unknown space 'agpp'.*agp"),
        ("auto_thresholds+", "unknown space ''"),
        ("+", "unknown space ''"),
    ],
)
def test_spaces_that_cannot_be_searched_together(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        search_spaces.load(name)
