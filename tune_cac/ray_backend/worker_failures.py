"""The cause of a failed trial: an exception of its code, or the death of its process."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError

from trainables.runtime.watchdog import was_ended
from tune_cac.ray_backend.multi_worker_trial import WorkerDied
from tune_cac.ray_backend.session import DEATHS

#: What to do when a node's memory, or a GPU's, is used up.
_LESS_MEMORY = "with --concurrency fewer trials share the memory; or take a smaller batch or model"
_LESS_GPU_MEMORY = "with a larger --gpus-per-trial fewer trials share a GPU; or take a smaller batch or model"
#: Parts of the messages with which torch says that the host's memory does not suffice.
_NO_MEMORY = ("can't allocate memory", "not enough memory")

#: Memory used and there, in Ray's message.
_USED = re.compile(r"was ([0-9.]+\wB) used / ([0-9.]+\wB) limit")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a trial failed."""

    message: str
    """One line."""
    died: bool = False
    """Its process, its node or one of its workers died without raising, and may not do so again."""
    out_of_memory: bool = False
    """Its node's memory was used up, which fewer trials at a time may avoid."""


def failure_of(trial: Any, *, silent_s: float = 0.0, timeout_s: float | None = None) -> Failure:
    """Return how a trial failed.

    Args:
        trial: Ray's.
        silent_s: seconds since the trial began or reported its last row.
        timeout_s: seconds after which its process is ended (`trainables.runtime.watchdog`); None for no limit.
    """
    died, message, error = worker_died(trial), failure_message(trial), _error_of(trial)
    if isinstance(error, OutOfMemoryError):
        used = _USED.search(str(error))
        how = "memory was used up" if used is None else f"memory was used up, {used[1]} of {used[2]}"
        return Failure(message=f"out of memory: its node's {how}, so Ray ended it: {_LESS_MEMORY}", out_of_memory=True)
    # The file may be on another node, and a trial that hangs while its model is built was never silent.
    if died and timeout_s is not None and (silent_s >= timeout_s or was_ended(Path(trial.config["folder"]))):
        return Failure(
            message=f"it reported nothing for {timeout_s:g} s (--trial-timeout), so its process was ended: it hangs, "
            "or an epoch takes longer"
        )
    cause = getattr(error, "cause", None)
    if type(cause).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return Failure(message=f"{message.rstrip('.')}: {_LESS_GPU_MEMORY}")
    if isinstance(cause, MemoryError) or any(part in str(cause) for part in _NO_MEMORY):
        return Failure(message=f"{message.rstrip('.')}: {_LESS_MEMORY}", out_of_memory=True)
    return Failure(message=message, died=died)


def _error_of(trial: Any) -> BaseException | None:
    """Return the exception that Ray stored for a failed trial on this machine; None if there is none."""
    try:
        found = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    except (OSError, TypeError, EOFError, AttributeError, ImportError, pickle.UnpicklingError):
        return None
    return found if isinstance(found, BaseException) else None


def worker_died(trial: Any) -> bool:
    """Return whether a trial's process, its node or one of its workers died without raising."""
    error = _error_of(trial)
    if isinstance(getattr(error, "cause", None), WorkerDied):
        return True
    if isinstance(error, RayActorError):  # Ray also raises it for an error in the actor's constructor
        return not error.actor_init_failed
    return isinstance(error, DEATHS)


def failure_message(trial: Any) -> str:
    """Return a failed trial's own exception as one line, from what Ray stored on this machine."""
    error = _error_of(trial)
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}".splitlines()[0]
    if worker_died(trial):
        return f"its worker died ({str(error).strip().splitlines()[-1].strip()})"
    lines = [line for line in str(error or "unknown error").splitlines() if line.strip()]
    return lines[-1].strip()
