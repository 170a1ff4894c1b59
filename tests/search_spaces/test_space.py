"""What `describe` sees of a conditional space, what counts as searched, and branches on a real Optuna trial."""

from __future__ import annotations

from typing import Any

import optuna

from search_spaces import Space, SpaceContext
from search_spaces.space import Branch, Suggests, describe

CONTEXT = SpaceContext(total_steps=300)


def branching(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Two levels of choices, a parameter shared by branches with other ranges, one that is always asked."""
    kind = trial.suggest_categorical("kind", ("a", "b", "c"))
    values: dict[str, Any] = {"CAC_VAR_SLOPE_THR": 0.9, "CAC_VAR_MT_THR": trial.suggest_float("mt", 0.1, 0.2)}
    if kind == "a":
        values["CAC_VAR_SAMPLES"] = trial.suggest_int("shared", 1, 5)
    if kind != "a" and trial.suggest_categorical("flag", (False, True)):
        values["CAC_VAR_SAMPLES"] = trial.suggest_int("shared", 3, 9 if kind == "b" else 12)
        if kind == "c":
            values["CAC_BRAKING_DISTANCE"] = trial.suggest_int("deep", 0, 1)
    return values


def no_start(context: SpaceContext) -> dict[str, Any]:
    return {}


SPACE = Space(name="branching", method="gradskip", suggest=branching, start=no_start)


def test_all_branches_are_described_with_their_conditions() -> None:
    found = {r.name: (str(r), r.condition) for r in describe(SPACE, CONTEXT)}
    assert found == {
        "kind": ("one of a, b, c", ""),
        "mt": ("0.1 .. 0.2", ""),
        "shared": ("1 .. 12", ""),  # asked for in every kind; no one choice says when
        "flag": ("one of False, True", "kind=b or c"),
        "deep": ("0 .. 1", "kind=c and flag=True"),
    }


def test_a_branch_bears_its_name_on_every_kind_of_parameter() -> None:
    trial = optuna.create_study().ask()
    branch = Branch(trial, "linear")
    branch.suggest_int("i", 2, 8, step=2)
    branch.suggest_float("f", 0.1, 10.0, log=True)
    branch.suggest_categorical("c", (False, True))
    assert trial.distributions == {
        "linear.i": optuna.distributions.IntDistribution(2, 8, step=2),
        "linear.f": optuna.distributions.FloatDistribution(0.1, 10.0, log=True),
        "linear.c": optuna.distributions.CategoricalDistribution((False, True)),
    }
    (step,) = (r.step for r in describe(Space(name="s", method="gradskip", suggest=stepped, start=no_start), CONTEXT))
    assert step == 2


def stepped(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    return {"CAC_VAR_SAMPLES": Branch(trial, "b").suggest_int("i", 2, 8, step=2)}
