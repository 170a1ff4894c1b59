"""Ray actor that grants leases on stages to all processes and nodes of a search.

It only saves work and does not affect results: a stage trained twice is written twice with equal content. So if the
coordinator is gone or does not answer, every claim is granted: training twice is waste, waiting for ever is worse.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RaySystemError

from trainables.stage_tree.leases import Leases

#: Time limit of a call. Longer than a restart of the actor, which takes a second or two.
TIMEOUT_S = 10.0

#: After a timeout, the coordinator is not called for this many timeouts; otherwise every call would wait.
_TIMEOUTS_LEFT_ALONE = 6
#: Attempts to start the coordinator, and the pause between them.
_STARTS, _BETWEEN_STARTS_S = 3, 2.0

_warned = False


def start_coordinator(name: str, kind: type[Leases] = Leases) -> Any:
    """Return the actor of this name in the current Ray namespace; start it if there is none.

    It ends when the process that started it ends or drops the returned handle: keep the handle during the search. When
    the actor's process dies, Ray restarts it without claims. A worker imports the class by its name.
    """
    # Calls may be repeated after a restart: Leases allows it.
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=1)(kind)
    actor = actor.options(name=name, get_if_exists=True)
    for _ in range(_STARTS - 1):
        try:
            return actor.remote()
        except RaySystemError:  # "Actor creation cancelled": of a head that has just come back, or of a node just lost
            time.sleep(_BETWEEN_STARTS_S)
    return actor.remote()


def find_coordinator(name: str) -> Any | None:
    """Return the actor of this name in the current Ray namespace, or None without such an actor or without Ray."""
    if not ray.is_initialized():  # get_actor would start Ray
        return None
    try:
        return ray.get_actor(name)
    except (ValueError, RayError):
        return None


class RayLeases(Leases):
    """`Leases` of the coordinator of this name; without an answer it grants, with one warning per process."""

    def __init__(self, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._actor: Any | None = None
        self._left_alone_until_s = float("-inf")

    def claim(self, stage: str, holder: str, lease_s: float) -> bool:
        return bool(self._ask("claim", stage, holder, lease_s))

    def renew(self, holder: str, lease_s: float) -> None:
        self._ask("renew", holder, lease_s)

    def release(self, stage: str, holder: str) -> None:
        self._ask("release", stage, holder)

    def release_all(self, holder: str) -> None:
        self._ask("release_all", holder)

    def _ask(self, method: str, *arguments: Any) -> Any:
        if time.monotonic() < self._left_alone_until_s:
            return True
        if self._actor is None or not ray.is_initialized():
            self._actor = find_coordinator(self._name)
        if self._actor is None:
            _warn_once(f"there is no {self._name!r}")
            return True
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=self._timeout_s)
        except GetTimeoutError:
            self._left_alone_until_s = time.monotonic() + _TIMEOUTS_LEFT_ALONE * self._timeout_s
            _warn_once(f"{self._name!r} did not answer within {self._timeout_s:g} s")
        except (RayError, ValueError) as error:  # ValueError: an actor of an earlier Ray session
            self._actor = None  # another may have been started under this name
            _warn_once(f"{self._name!r} cannot be asked: {type(error).__name__}")
        return True


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"trials cannot agree on who trains which stage, for the coordinator {reason}; training goes on, and some "
            "stretches may be trained twice",
            stacklevel=4,
        )
