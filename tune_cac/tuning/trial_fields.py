"""Fields that Ray sends to `trainables.trial.Trial` beside a trial's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from trainables.storage import is_uri, joined, parent
from trainables.workload_options import CACHE_VARIABLE


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
