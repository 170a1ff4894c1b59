"""Gradient-Skip's rules compared with each other: which one (`CAC_RULE`), and each rule's own settings.

Layers stop as whole units under every rule, the published one included, so that rules are compared on equal terms.
Every rule's parameters are prefixed with its name (``linear.CAC_RULE_DEPTH``): a conditional space, each rule with its
own ranges.
"""

from __future__ import annotations

from typing import Any

from search_spaces import auto_thresholds
from search_spaces.auto_thresholds import latest_start, longest_interval, suggest_braking
from search_spaces.space import Branch, Space, SpaceContext, Suggests, branch_name
from trainables.gradskip.rules.choice import NAMED
from trainables.gradskip.rules.state_machine import NamedRule
from trainables.gradskip.variables import RULES


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for a rule, then for that rule's settings."""
    rule = trial.suggest_categorical("CAC_RULE", RULES)
    branch = Branch(trial, rule)
    own = auto_thresholds.suggest(branch, context) if rule not in NAMED else _settings(branch, context, NAMED[rule])
    return {"CAC_RULE": rule, "CAC_WHOLE_UNITS": True, **own}


def _settings(trial: Suggests, context: SpaceContext, rule: type[NamedRule]) -> dict[str, Any]:
    """Ask for what a rule reads, in its order, and for the braking distance."""
    steps = context.total_steps
    ranges = {field: bounds for field, *bounds in rule.searched}
    found: dict[str, Any] = {}
    for field in rule.reads:
        name, bounds = f"CAC_{field.upper()}", ranges.get(field)
        if field == "rule_end_itr":
            found[name] = steps
        elif field == "rule_interval":
            found[name] = trial.suggest_int(name, 1, longest_interval(steps), log=True)
        elif field == "rule_start_itr":
            first, last = 0, latest_start(steps)
            if "rule_end_itr" in rule.reads:  # a schedule ends after it starts
                last = min(last, steps - 1)
            if bounds is not None:
                first, last = (min(steps - 1, max(1, int(share * steps))) for share in bounds)
            found[name] = trial.suggest_int(name, first, last)
        elif bounds is None:
            found[name] = trial.suggest_categorical(name, (False, True))
        elif isinstance(bounds[0], int):
            found[name] = trial.suggest_int(name, *bounds)
        else:
            found[name] = trial.suggest_float(name, *bounds[:2], log="log" in bounds)
    return found | ({"CAC_BRAKING_DISTANCE": suggest_braking(trial, context)} if rule.brakes else {})


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the published rule with its defaults scaled to the run."""
    published = auto_thresholds.start(context)
    return {"CAC_RULE": "variance", **{branch_name("variance", name): value for name, value in published.items()}}


def notes(context: SpaceContext) -> list[str]:
    """Return a line with the fixed variables."""
    return [
        "fixed: CAC_WHOLE_UNITS=1 under every rule; "
        f"CAC_RULE_END_ITR={context.total_steps}, the length of the run, under "
        + " and ".join(name for name, rule in NAMED.items() if "rule_end_itr" in rule.reads)
    ]


# The published library does not stop whole units, so with its defaults this is not the published run.
SPACE = Space(name="stop_rules", method="gradskip", suggest=suggest, start=start, start_is_published=False, notes=notes)
