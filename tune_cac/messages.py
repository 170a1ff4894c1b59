"""Messages on standard error; a search continues when nothing reads them any more."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


def say(line: str) -> None:
    """Print a line on standard error and flush it; ignore a missing or closed stream."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # as in `... 2>&1 | head`, a terminal that hung up, or closed
        close_unread(sys.stderr)


@contextmanager
def warnings_as_messages() -> Iterator[None]:
    """Print a `UserWarning` as one line, without its place in code that the command's user did not write."""
    usual = warnings.formatwarning

    def formatted(message: Any, category: type[Warning], *place: Any, **more: Any) -> str:
        if issubclass(category, UserWarning):
            return f"warning: {message}\n"
        return usual(message, category, *place, **more)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = usual


def close_unread(stream: TextIO) -> None:
    """Redirect a stream that has no reader to the null device, so that flushing it at exit does not fail."""
    with suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
