"""The Ray trainable: config in, one row an epoch out. Imports ray, as only the coordinator does beside it here."""

from __future__ import annotations

import os
import pickle
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from trainables.config import TrialConfig
from trainables.registry import SCRIPT
from trainables.script.run import ScriptRun
from trainables.stage_tree.coordinator import RayClaims
from trainables.stage_tree.shared_run import SharedRun, Sharing
from trainables.training.run import TrainingRun
from trainables.workload_options import CACHE_VARIABLE


def continued(kind: type[TrainingRun], config: TrialConfig, resume_from: str | None) -> TrainingRun:
    """A run, continued from a checkpoint if one is given; one that cannot be read costs its epochs, not the trial."""
    run = kind(config)
    if not resume_from:
        return run
    try:
        run.load(resume_from)
        run.count_spent_from_here()  # the interrupted trial has its own record of what it executed
    except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        run.close()  # it may be half loaded
        warnings.warn(f"training from the start, for {resume_from} cannot be read: {error}", stacklevel=2)
        return kind(config)
    return run


def build_shared_run(config: TrialConfig, sharing: dict[str, Any]) -> SharedRun:
    """A run over a study's stage tree."""
    name = sharing["claims"]
    how = Sharing(
        tree=Path(sharing["tree"]),
        budget_bytes=sharing["budget_bytes"],
        trials=sharing["trials"],
        watches=tuple(tuple(watch) for watch in sharing["watches"]),
        checkpoint_every_s=sharing["checkpoint_every_s"],
    )
    claims = None if name is None else RayClaims(name)
    return SharedRun(config, how, claims=claims, holder=sharing["holder"])


def keep_decoded_data(config: Mapping[str, Any]) -> None:
    """Keep it where the search does: the same place for all trials of this process."""
    if config.get("cache"):
        os.environ[CACHE_VARIABLE] = config["cache"]


class Trial(tune.Trainable):
    """One configuration trained. The process is reused for the next one (`TuneConfig(reuse_actors=True)`).

    Ray's config holds:
        config: the fields of `TrialConfig`.
        trial: the Optuna trial's number.
        folder: of the trial, absolute; a script's output is kept there.
        cache: folder for decoded data, or None.
        resume_from: folder of a checkpoint to continue from, or None; not needed with a stage tree.
        checkpoint_every_s: seconds from one checkpoint to the next, at epoch ends.
        sharing: fields of `Sharing`, the name of the coordinator (``claims``, None for none) and of this trial there
            (``holder``); None trains alone.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the run; a wrong config raises here and fails the trial."""
        self._run: TrainingRun | SharedRun | ScriptRun | None = None
        self._start(config)

    def _start(self, config: dict[str, Any]) -> None:
        trial, sharing = TrialConfig.from_mapping(config["config"]), config.get("sharing")
        keep_decoded_data(config)
        if trial.workload == SCRIPT:
            self._run = ScriptRun(trial, Path(config["folder"]))
        elif sharing is None:
            self._run = continued(TrainingRun, trial, config.get("resume_from"))
        else:
            self._run = build_shared_run(trial, sharing)
        self._checkpoint_every_s = float(config.get("checkpoint_every_s", 60.0))
        self._checkpointed = time.monotonic()

    def step(self) -> dict[str, Any]:
        """Train one epoch."""
        run = self._live()
        row = run.row if run.finished and run.row is not None else run.train_epoch()
        result = {**row, DONE: run.finished}
        if (
            isinstance(run, TrainingRun)
            and not run.finished
            and time.monotonic() - self._checkpointed >= self._checkpoint_every_s
        ):
            result[SHOULD_CHECKPOINT] = True
            self._checkpointed = time.monotonic()
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the run's whole state. One over a stage tree has it there; a script keeps its own."""
        run = self._live()
        if isinstance(run, TrainingRun):
            run.save(checkpoint_dir)
        else:
            (Path(checkpoint_dir) / "kept_elsewhere").touch()

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from it. A run over a stage tree walks to where it was."""
        run = self._live()
        if isinstance(run, TrainingRun):
            run.load(checkpoint)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start the next trial in this process, with the process state of a fresh one."""
        self.cleanup()
        self._start(new_config)
        return True

    def cleanup(self) -> None:
        """Put the process state back."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def _live(self) -> TrainingRun | SharedRun | ScriptRun:
        assert self._run is not None
        return self._run
