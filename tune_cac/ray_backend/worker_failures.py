"""The cause of a failed trial: an exception of its code, or the death of its process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayActorError

from tune_cac.ray_backend.multi_worker_trial import WorkerDied
from tune_cac.ray_backend.session import DEATHS


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
