"""Options of a search, checked before torch or ray is loaded."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import search_spaces
from analysis.metrics.ranking import check_allowed_drop
from trainables.config import MOST_SEED, SAVINGS, check_integer
from trainables.errors import UserError, unknown_name
from trainables.registry import SCRIPT, check_workload
from trainables.script.placeholders import names
from trainables.workload_options import canonical, read_options
from trainables.workloads import default_epochs
from tune_cac.study.fixed_params import check_hold, has_marks

#: Default for the most bytes of checkpoints that sharing keeps.
DEFAULT_BUDGET = "20GB"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def read_bytes(value: int | str) -> int:
    """Return a number of bytes from a number, or from text with a unit.

    >>> read_bytes("1.5MB")
    1500000

    Raises:
        UserError: no such number, or a negative one.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or found is None or found[2].upper() not in _UNITS:
        raise UserError(
            f"--checkpoint-budget must be a number of bytes >= 0 with or without a unit, such as 20GB, got {value!r}"
        )
    return round(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The options of a search.

    Raises:
        UserError: an unknown space or workload, a number out of range, or a value that cannot be fixed.
    """

    space: str = "auto_thresholds"
    """Search space."""
    workload: str = "digits"
    """Workload: a registered name, or ``package.module:function``."""
    workload_options: tuple[str, ...] = ()
    """Options of the workload, texts NAME=VALUE."""
    trials: int = 24
    """Number of trials, including the baseline and the published defaults, >= 1."""
    epochs: int | None = None
    """Epochs per trial, >= 1; None for the workload's own number."""
    seed: int = 0
    """Seed of the trials and of the sampler, >= 0."""
    allowed_drop: float = 0.005
    """Accuracy that may be lost against the baseline, a fraction in [0, 1)."""
    concurrency: int | None = None
    """Trials at a time, >= 1; None for as many as the processors allow."""
    cpus_per_trial: int = 1
    """Processors per trial, >= 1; also its torch threads."""
    gpus_per_trial: float = 0.0
    """GPUs per trial, >= 0; a fraction shares one."""
    workers_per_trial: int = 1
    """Processes that train a trial data-parallel, >= 1; each has ``cpus_per_trial`` and ``gpus_per_trial``."""
    results: Path = Path("results")
    """Folder that holds the studies."""
    name: str | None = None
    """Name of the study's folder; None makes one from workload, space and time."""
    checkpoint_every_s: float = 60.0
    """Seconds from one checkpoint of a running trial to the next, >= 0 (0: every epoch)."""
    sharing: bool = True
    """True if trials share training prefixes; the baseline's signals are recorded either way."""
    checkpoint_budget: int | str = DEFAULT_BUDGET
    """Bytes of checkpoints that sharing may keep: a number >= 0, or text such as ``20GB`` (10^9) or ``512MiB``."""
    fresh_processes: bool = False
    """True if every trial has its own process and nothing is shared, because training depends on what the process
    trained before."""
    controls: bool = True
    """True if cut dense runs and random stops are trained beside the trials."""
    retries: int = 1
    """Most restarts of a trial whose worker died, or of a failed baseline, >= 0."""
    hold: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that have one value in every trial but the baseline, by name."""
    saving: str | None = None
    """Compute that trials are ranked by: ``training``, ``inference`` or ``both``; None for the space's own."""

    def __post_init__(self) -> None:
        space = search_spaces.load(self.space)
        options = read_options(self.workload_options)
        object.__setattr__(self, "workload_options", canonical(options))
        check_workload(self.workload, self.workload_options)
        check_integer("--seed", self.seed, 0, MOST_SEED)
        for flag, value, low in (
            ("--trials", self.trials, 1),
            ("--epochs", self.epochs, 1),
            ("--concurrency", self.concurrency, 1),
            ("--cpus-per-trial", self.cpus_per_trial, 1),
            ("--workers-per-trial", self.workers_per_trial, 1),
            ("--retries", self.retries, 0),
        ):
            if value is not None:
                check_integer(flag, value, low)
        for flag, number in (
            ("--gpus-per-trial", self.gpus_per_trial),
            ("--checkpoint-every", self.checkpoint_every_s),
        ):
            if not math.isfinite(number) or number < 0:
                raise UserError(f"{flag} must be a number >= 0, got {number!r}")
        check_allowed_drop(self.allowed_drop)
        object.__setattr__(self, "checkpoint_budget", read_bytes(self.checkpoint_budget))
        if self.is_script and self.epochs is None and "epochs" in names(options["command"]):
            raise UserError("--epochs must be given where the command has {epochs}, got none")
        if self.saving not in (None, *SAVINGS):
            raise unknown_name("saving", str(self.saving), SAVINGS)
        self._check_compression(space)
        if self.workers_per_trial > 1 and self.hold.get("forward_cache_mb"):
            raise UserError(
                "forward_cache_mb must be 0 with several workers a trial, for the rows that one has change from epoch "
                f"to epoch, got {self.hold['forward_cache_mb']}"
            )
        if self.is_script or self.workers_per_trial > 1 or self.fresh_processes:
            object.__setattr__(self, "sharing", False)  # there is no training state that trials could share
        object.__setattr__(self, "results", Path(self.results))
        object.__setattr__(self, "hold", check_hold(self.space, self.hold))
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UserError(
                f"--name must be letters, digits, '.', '_' and '-', beginning with a letter or digit, got {self.name!r}"
            )

    def _check_compression(self, space: search_spaces.Space) -> None:
        parts = search_spaces.parts_of(self.space)
        if "schedule" in parts and not self.hold.get("schedule"):
            raise UserError("space schedule searches a schedule of yours: give its file by --schedule FILE, got none")
        if "schedule" in parts and not has_marks(str(self.hold["schedule"])):
            raise UserError(
                "space schedule searches marked values, and the schedule has none: mark some, such as "
                "!search {low: 0.1, high: 0.9}, or search another space"
            )
        if self.hold.get("schedule") and not self.compresses:
            raise UserError(f"--schedule needs a space of compression, such as schedule, got --space {self.space}")
        if "distillation" in parts and not (self.hold.get("distill_teacher") or self.hold.get("distill_checkpoint")):
            raise UserError(
                "space distillation needs a teacher: --set distill_teacher=NAME, --set distill_checkpoint=FILE, or "
                "both, got neither"
            )
        if not self.compresses:
            return
        if self.is_script:
            raise UserError(f"a script compresses by itself: space {self.space} needs a workload, got --script")
        if self.workers_per_trial > 1:
            raise UserError(
                f"space {self.space} trains in one process, got --workers-per-trial {self.workers_per_trial}"
            )

    @property
    def compresses(self) -> bool:
        """Return whether a compression schedule is searched."""
        return "compression" in search_spaces.load(self.space).method

    @property
    def skips_gradients(self) -> bool:
        """Return whether Gradient-Skip is searched."""
        return "gradskip" in search_spaces.load(self.space).method

    @property
    def ranked_by(self) -> str:
        """Return the compute that trials are ranked by."""
        return self.saving or search_spaces.load(self.space).saving

    @property
    def schedule(self) -> str | None:
        """Return the text of the schedule that is searched or fixed; None if there is none."""
        found = self.hold.get("schedule")
        return None if found is None else str(found)

    @property
    def budget_bytes(self) -> int:
        """Return `checkpoint_budget` as a number."""
        return read_bytes(self.checkpoint_budget)

    @property
    def trial_epochs(self) -> int:
        """Return the epochs per trial."""
        return self.epochs or default_epochs(self.workload, self.workload_options)

    @property
    def is_script(self) -> bool:
        """Return whether trials run a command of the user."""
        return self.workload == SCRIPT

    @property
    def processors_per_trial(self) -> int:
        """Return the processors of a trial over all of its workers."""
        return self.cpus_per_trial * self.workers_per_trial

    @property
    def trials_at_a_time(self) -> int:
        """Return how many trials train at a time; on a cluster, give ``--concurrency``."""
        return self.concurrency or max(1, (os.cpu_count() or 1) // self.processors_per_trial)
