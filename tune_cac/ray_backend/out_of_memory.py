"""Ray's error for a process that it ended because its node's memory was used up, as an error of a trial.

For such an actor Ray raises `OutOfMemoryError`, which is no `RayActorError`. Ray Tune 2.56 to 2.60 expect nothing else
and end the whole search: "Caught unexpected exception".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import OutOfMemoryError, RayActorError


class ActorOutOfMemoryError(OutOfMemoryError, RayActorError):
    """The same error in the family of errors that end one trial."""

    def __init__(self, message: str) -> None:
        RayActorError.__init__(self, error_msg=message)
        OutOfMemoryError.__init__(self, message)

    def __reduce__(self) -> tuple[type[ActorOutOfMemoryError], tuple[str]]:
        return ActorOutOfMemoryError, (self.message,)


@contextmanager
def memory_ends_trials() -> Iterator[None]:
    """Make Ray's memory errors `ActorOutOfMemoryError` in this process during the block."""

    def make(kind: type[OutOfMemoryError], *_: Any, **__: Any) -> OutOfMemoryError:
        found: OutOfMemoryError = Exception.__new__(ActorOutOfMemoryError if kind is OutOfMemoryError else kind)
        return found

    OutOfMemoryError.__new__ = make
    try:
        yield
    finally:
        del OutOfMemoryError.__new__
