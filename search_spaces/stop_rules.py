"""Gradient-Skip's rules compared with each other: which one (`CAC_RULE`), and each rule's own settings.

Layers stop as whole units under every rule, the published one included, so that rules are compared on equal terms.
Every rule's parameters are prefixed with its name (``linear.CAC_RULE_DEPTH``): a conditional space, each rule with its
own ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from search_spaces import auto_thresholds
from search_spaces.auto_thresholds import latest_start, longest_interval, suggest_braking
from search_spaces.space import Branch, Space, SpaceContext, Suggests, branch_name

#: Earliest and latest stop of the first layer under freezeout, as fractions of the run.
FIRST_END = (0.1, 0.9)


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for a rule, then for that rule's settings."""
    rule = trial.suggest_categorical("CAC_RULE", tuple(_RULES))
    return {"CAC_RULE": rule, "CAC_WHOLE_UNITS": True, **_RULES[rule](Branch(trial, rule), context)}


def _linear(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    last_start = min(latest_start(context.total_steps), context.total_steps - 1)  # a schedule ends after it starts
    return {
        "CAC_RULE_START_ITR": trial.suggest_int("CAC_RULE_START_ITR", 0, last_start),
        "CAC_RULE_END_ITR": context.total_steps,
        "CAC_RULE_DEPTH": trial.suggest_float("CAC_RULE_DEPTH", 0.1, 1.0),
        "CAC_BRAKING_DISTANCE": suggest_braking(trial, context),
    }


def _freezeout(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    steps = context.total_steps
    earliest, latest = (min(steps - 1, max(1, int(fraction * steps))) for fraction in FIRST_END)
    return {
        "CAC_RULE_START_ITR": trial.suggest_int("CAC_RULE_START_ITR", earliest, latest),
        "CAC_RULE_END_ITR": steps,
        "CAC_RULE_CUBIC": trial.suggest_categorical("CAC_RULE_CUBIC", (False, True)),
        "CAC_RULE_SCALED": trial.suggest_categorical("CAC_RULE_SCALED", (False, True)),
    }


def _gradient_norm(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    return {
        **_measured(trial, context),
        "CAC_RULE_PERCENTILE": trial.suggest_float("CAC_RULE_PERCENTILE", 10.0, 90.0),
        "CAC_BRAKING_DISTANCE": suggest_braking(trial, context),
    }


def _plasticity(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    return {
        **_measured(trial, context),
        "CAC_RULE_TOLERANCE": trial.suggest_float("CAC_RULE_TOLERANCE", 0.02, 0.8, log=True),
        "CAC_RULE_WINDOW": trial.suggest_int("CAC_RULE_WINDOW", 2, 8),
        "CAC_BRAKING_DISTANCE": suggest_braking(trial, context),
    }


def _measured(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    steps = context.total_steps
    return {
        "CAC_RULE_START_ITR": trial.suggest_int("CAC_RULE_START_ITR", 0, latest_start(steps)),
        "CAC_RULE_INTERVAL": trial.suggest_int("CAC_RULE_INTERVAL", 1, longest_interval(steps), log=True),
    }


_RULES: dict[str, Callable[[Suggests, SpaceContext], dict[str, Any]]] = {
    "variance": auto_thresholds.suggest,
    "linear": _linear,
    "freezeout": _freezeout,
    "gradient_norm": _gradient_norm,
    "plasticity": _plasticity,
}


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the published rule with its defaults scaled to the run."""
    published = auto_thresholds.start(context)
    return {"CAC_RULE": "variance", **{branch_name("variance", name): value for name, value in published.items()}}


def notes(context: SpaceContext) -> list[str]:
    """Return a line with the fixed variables."""
    return [
        "fixed: CAC_WHOLE_UNITS=1 under every rule; "
        f"CAC_RULE_END_ITR={context.total_steps}, the length of the run, under linear and freezeout"
    ]


# The published library does not stop whole units, so with its defaults this is not the published run.
SPACE = Space(name="stop_rules", method="gradskip", suggest=suggest, start=start, start_is_published=False, notes=notes)
