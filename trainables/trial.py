"""The Ray trainable: takes a config, reports one row per epoch. Only it and the coordinator import ray here.

What trains a model is imported when the first trial of a process needs it: a process that only starts scripts does
not load torch, which takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

import os
import pickle
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from trainables.config import TrialConfig
from trainables.gradskip.script_counting.trace_file import DEFAULT_WATCH
from trainables.registry import SCRIPT
from trainables.runtime.checkpoint_folder import has_room, on_disk, write_checkpoint
from trainables.runtime.watchdog import Watchdog
from trainables.script.run import ScriptRun
from trainables.stage_tree.coordinator import RayLeases
from trainables.storage import is_uri
from trainables.workload_options import CACHE_VARIABLE

if TYPE_CHECKING:
    from trainables.stage_tree.shared_run import SharedRun
    from trainables.training.run import TrainingRun


def continued(kind: type[TrainingRun], config: TrialConfig, resume_from: str | None) -> TrainingRun:
    """Build a run, continued from a checkpoint if one is given; start from scratch if it cannot be read."""
    run = kind(config)
    if not resume_from:
        return run
    try:
        with on_disk(resume_from) as folder:
            run.load(folder)
        run.cost.begin_spending()  # the interrupted trial has its own record of what it executed
    except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        run.close()  # it may be half loaded
        warnings.warn(f"training from the start, for {resume_from} cannot be read: {error}", stacklevel=2)
        return kind(config)
    return run


def keep_decoded_data(config: Mapping[str, Any]) -> None:
    """Set the folder for decoded data to the search's, for all trials of this process."""
    if config.get("cache"):
        os.environ[CACHE_VARIABLE] = config["cache"]


class Trial(tune.Trainable):
    """Train one configuration. The process is reused for the next one (`TuneConfig(reuse_actors=True)`).

    Ray's config holds:
        config: the fields of `TrialConfig`.
        trial: the Optuna trial's number.
        folder: folder of the trial, absolute, or its URI in object storage; a script's output is kept there.
        cache: folder for decoded data, or None.
        resume_from: folder of a checkpoint to continue from, or None; not needed with a stage tree.
        checkpoint_every_s: seconds from one checkpoint to the next, at epoch ends.
        steps: optimizer steps that a script of this length takes, or None.
        sharing: fields of `Sharing`, the name of the coordinator (``claims``, None for none) and of this trial there
            (``holder``); None: the trial shares no training.
        trial_timeout_s: seconds without a row after which this process is ended; None for no limit.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the run; an invalid config raises here and fails the trial."""
        self._run: TrainingRun | SharedRun | ScriptRun | None = None
        self._trained_here: TrainingRun | None = None
        """The run if its state is in this process alone; None for one over a stage tree, and a script's."""
        self._watchdog = Watchdog(config.get("trial_timeout_s"), Path(config["folder"]))
        with self._watchdog.watch():
            self._start(config)

    def _start(self, config: dict[str, Any]) -> None:
        trial, sharing = TrialConfig.from_mapping(config["config"]), config.get("sharing")
        keep_decoded_data(config)
        if trial.workload == SCRIPT:
            trace = "" if sharing is None else ",".join((sharing["watches"] or [[DEFAULT_WATCH]])[0])
            self._run = ScriptRun(trial, config["folder"], trace=trace, steps=config.get("steps"))
        elif sharing is None:
            from trainables.training.run import TrainingRun

            self._run = self._trained_here = continued(TrainingRun, trial, config.get("resume_from"))
        else:
            from trainables.stage_tree.shared_run import SharedRun, Sharing

            fields = {key: sharing[key] for key in ("tree", "budget_bytes", "trials", "checkpoint_every_s")}
            how = Sharing(**fields, watches=tuple(tuple(watch) for watch in sharing["watches"]))
            claims = None if sharing["claims"] is None else RayLeases(sharing["claims"])
            self._run = SharedRun(trial, how, claims=claims, holder=sharing["holder"])
        self._folder = config.get("folder")
        self._checkpoint_every_s = float(config.get("checkpoint_every_s", 60.0))
        self._checkpointed = time.monotonic()

    def step(self) -> dict[str, Any]:
        """Train one epoch and return its row."""
        run, trained_here = self._run, self._trained_here
        assert run is not None
        with self._watchdog.watch():
            row = run.row if run.finished and run.row is not None else run.train_epoch()
        if run.finished:
            self._watchdog.close()  # Ray may end this process before it is asked to clean up
        result = {**row, DONE: run.finished}
        is_due = time.monotonic() - self._checkpointed >= self._checkpoint_every_s
        if trained_here is not None and not run.finished and is_due:
            if is_uri(str(self._folder)):
                self._keep_checkpoint(trained_here)
            else:
                result[SHOULD_CHECKPOINT] = has_room(trained_here.model, str(self._folder))
            self._checkpointed = time.monotonic()
        return result

    def _keep_checkpoint(self, run: TrainingRun) -> None:
        """Write a checkpoint into object storage; Ray would want a disk that all nodes see."""
        try:
            write_checkpoint(run, str(self._folder))
        except OSError as error:  # the next one may succeed
            warnings.warn(f"a checkpoint was not kept, training goes on: {error}", stacklevel=2)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the run's whole state; runs over a stage tree and scripts keep theirs elsewhere."""
        if self._trained_here is not None:
            self._trained_here.save(checkpoint_dir)
        else:
            (Path(checkpoint_dir) / "kept_elsewhere").touch()

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from a checkpoint; a run over a stage tree replays to its position instead."""
        if self._trained_here is not None:
            self._trained_here.load(checkpoint)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start the next trial in this process, with the process state of a fresh one."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Close the run, which restores the process state."""
        if self._run is not None:
            self._run.close()
            self._run = self._trained_here = None
        self._watchdog.close()
