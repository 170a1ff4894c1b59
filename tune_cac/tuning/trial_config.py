"""Configuration of a trial from what Optuna suggests or its attributes give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.trial import FixedTrial

from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from tune_cac.tuning.outcomes.run_lengths import EPOCHS
from tune_cac.tuning.predefined_trial import plain


def config_of_trial(
    trial: optuna.Trial | FixedTrial,
    space: Space,
    base: TrialConfig,
    hold: Mapping[str, Any],
    context_of: Callable[[int], SpaceContext],
) -> dict[str, Any]:
    """Return all fields of a trial's configuration; suggests its parameters.

    Args:
        trial: of Optuna's study, or one of fixed parameters.
        space: what is searched.
        base: config of the baseline, which the trial's own values override.
        hold: fields with a fixed value in every trial but the baseline.
        context_of: returns the facts on a run of so many epochs.
    """
    if "given" in trial.user_attrs:
        values: dict[str, Any] = dict(trial.user_attrs["given"])
    elif trial.user_attrs.get("role") == "baseline":
        values = {"method": "none"}
    else:
        epochs = trial.user_attrs.get(EPOCHS, base.epochs)
        context = context_of(epochs)
        with warnings.catch_warnings():  # the published defaults may lie outside the ranges of this run
            warnings.filterwarnings("ignore", message="(Fixed|The value .*) parameter .* is out of (the )?range")
            suggested = space.suggest(trial, context)
        values = {"method": space.method, **plain(suggested), **hold}
        if epochs != base.epochs:
            values[EPOCHS] = trial.suggest_int(EPOCHS, 1, base.epochs)
    return {**base.to_dict(), **values}


def asked_of(space: Space, parameters: Mapping[str, Any], context: SpaceContext) -> tuple[FixedTrial, dict[str, Any]]:
    """Return a trial of fixed parameters that a space has asked, and the values that the space makes of them.

    Values outside its ranges, such as a starting point's, give no warning.

    Args:
        space: that asks.
        parameters: Optuna's, by name; those that it does not ask for are ignored.
        context: the run.

    Raises:
        ValueError: it asks for one that is not there.
    """
    asked = FixedTrial(dict(parameters))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return asked, space.suggest(asked, context)
