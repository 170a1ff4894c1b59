"""Configuration of a trial from what Optuna suggests or its attributes give."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FixedTrial

from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.storage import is_uri, joined, parent
from trainables.workload_options import CACHE_VARIABLE
from tune_cac.tuning.outcomes.run_lengths import EPOCHS
from tune_cac.tuning.study_trials import plain


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


# --- Fields that Ray sends to `trainables.trial.Trial` beside a trial's configuration ---------------------------------


class TrialFields:
    """Fields of one study's trials.

    Args:
        tree: the study's ``tree`` folder, or its URI where the study is in object storage.
        budget_bytes: most bytes of checkpoints.
        trials: number of trials that may share training.
        watch: `CAC_WATCH` of all trials; None where they have the default or several.
        checkpoint_every_s: seconds between checkpoints of a trial.
        trial_timeout_s: seconds without a row after which a trial's process is ended; None for no limit.
        worker_resources: Ray's resources of each worker of a trial; None for trials of one process.
    """

    def __init__(
        self,
        *,
        tree: Path | str,
        budget_bytes: int,
        trials: int,
        watch: Sequence[str] | None,
        checkpoint_every_s: float,
        trial_timeout_s: float | None,
        worker_resources: Mapping[str, float] | None,
    ) -> None:
        self._place = parent(tree)
        self._of_all = {
            "checkpoint_every_s": checkpoint_every_s, "trial_timeout_s": trial_timeout_s,
            "worker_resources": None if worker_resources is None else dict(worker_resources),
        }  # fmt: skip
        self._sharing = {
            "tree": str(tree), "budget_bytes": budget_bytes, "trials": trials,
            "watches": [] if watch is None else [list(watch)], "checkpoint_every_s": checkpoint_every_s,
        }  # fmt: skip

    def of(
        self,
        trial: optuna.Trial,
        config: Mapping[str, Any],
        *,
        folder: str,
        resume_from: str | None,
        shares: bool,
        claims: str | None,
    ) -> dict[str, Any]:
        """Return the fields of a trial, its configuration among them.

        Args:
            trial: of Optuna's study.
            config: fields of its configuration.
            folder: its folder, relative to the study.
            resume_from: folder of a checkpoint to continue from, or None.
            shares: whether it is trained over the stage tree.
            claims: name of the coordinator of the tree's leases; None for none.
        """
        attrs = trial.user_attrs
        return {
            "config": dict(config),
            "trial": trial.number,
            "folder": str(joined(self._place, folder)),
            "cache": None if is_uri(self._place) else os.environ.get(CACHE_VARIABLE),  # of this machine's disk
            "role": attrs.get("role", "search"),
            "options": attrs.get("options", ""),
            "resume_from": resume_from,
            **self._of_all,
            "sharing": {**self._sharing, "claims": claims, "holder": folder} if shares else None,
        }
