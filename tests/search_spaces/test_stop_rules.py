"""The space of all rules: equal terms, and ranges that fit the run."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from search_spaces import SpaceContext, load
from search_spaces.space import describe
from trainables.config import TrialConfig
from trainables.gradskip.variables import RULES, VARIABLES

CONTEXT = SpaceContext(total_steps=300)


@pytest.fixture(scope="module")
def samples() -> dict[str, list[dict[str, Any]]]:
    space = load("stop_rules")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found: dict[str, list[dict[str, Any]]] = {rule: [] for rule in RULES}
    for _ in range(400):
        values = space.suggest(study.ask(), CONTEXT)
        found[values["CAC_RULE"]].append(values)
    return found


def test_every_rule_is_tried_and_stops_whole_units(samples: dict[str, list[dict[str, Any]]]) -> None:
    for rule in RULES:
        assert samples[rule]
        for values in samples[rule]:
            assert values["CAC_WHOLE_UNITS"] is True
            assert TrialConfig(**values).gradskip_settings().mode in (rule, "auto")


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_gets_its_own_variables_and_all_of_them(rule: str, samples: dict[str, list[dict[str, Any]]]) -> None:
    mode = "auto" if rule == "variance" else rule
    own = {v.name for v in VARIABLES if mode in v.mode.split(",")}
    shared = {"CAC_RULE", "CAC_WHOLE_UNITS"} | ({"CAC_BRAKING_DISTANCE"} if rule != "freezeout" else set())
    for values in samples[rule]:
        assert set(values) == own | shared


def test_the_variance_branch_is_auto_thresholds() -> None:
    found = describe(load("stop_rules"), CONTEXT)
    own = {r.name.removeprefix("variance."): str(r) for r in found if r.name.startswith("variance.")}
    assert own == {r.name: str(r) for r in describe(load("auto_thresholds"), CONTEXT)}


def test_ranges_of_the_other_rules() -> None:
    found = {r.name: str(r) for r in describe(load("stop_rules"), CONTEXT)}
    assert found["linear.CAC_RULE_START_ITR"] == "0 .. 150"
    assert found["freezeout.CAC_RULE_START_ITR"] == "30 .. 270"
    assert found["plasticity.CAC_RULE_INTERVAL"] == found["gradient_norm.CAC_RULE_INTERVAL"] == "1 .. 20 (log)"
    assert found["plasticity.CAC_RULE_TOLERANCE"] == "0.02 .. 0.8 (log)"
