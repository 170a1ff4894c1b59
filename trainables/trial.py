"""The Ray trainable: config in, one row an epoch out. The only file here that imports ray."""

from __future__ import annotations

import pickle
import time
import warnings
from typing import Any

from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from trainables.config import TrialConfig
from trainables.training.run import TrainingRun


def build_run(config: TrialConfig, resume_from: str | None) -> TrainingRun:
    """A run, continued from a checkpoint if one is given; one that cannot be read costs its epochs, not the trial."""
    run = TrainingRun(config)
    if not resume_from:
        return run
    try:
        run.load(resume_from)
    except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        run.close()  # it may be half loaded
        warnings.warn(f"training from the start, for {resume_from} cannot be read: {error}", stacklevel=2)
        return TrainingRun(config)
    return run


class Trial(tune.Trainable):
    """One configuration trained. The process is reused for the next one (`TuneConfig(reuse_actors=True)`).

    Ray's config holds:
        config: the fields of `TrialConfig`.
        trial: the Optuna trial's number.
        resume_from: folder of a checkpoint to continue from, or None.
        checkpoint_every_s: seconds from one checkpoint to the next, at epoch ends.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the run; a wrong config raises here and fails the trial."""
        self._run: TrainingRun | None = None
        self._start(config)

    def _start(self, config: dict[str, Any]) -> None:
        self._run = build_run(TrialConfig.from_mapping(config["config"]), config.get("resume_from"))
        self._checkpoint_every_s = float(config.get("checkpoint_every_s", 60.0))
        self._checkpointed = time.monotonic()

    def step(self) -> dict[str, Any]:
        """Train one epoch."""
        run = self._live()
        row = run.row if run.finished and run.row is not None else run.train_epoch()
        result = {**row, DONE: run.finished}
        if not run.finished and time.monotonic() - self._checkpointed >= self._checkpoint_every_s:
            result[SHOULD_CHECKPOINT] = True
            self._checkpointed = time.monotonic()
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the run's whole state."""
        self._live().save(checkpoint_dir)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from it."""
        self._live().load(checkpoint)

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

    def _live(self) -> TrainingRun:
        assert self._run is not None
        return self._run
