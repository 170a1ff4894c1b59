"""Lines on standard error that nobody has to read: a search goes on when its reader has gone."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def say(line: str) -> None:
    """Print a line on standard error, at once; nowhere where there is none."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # as in `... 2>&1 | head`, a terminal that hung up, or closed
        close_unread(sys.stderr)


def close_unread(stream: TextIO) -> None:
    """Lead a stream that nobody reads any more to nowhere, so that the process's end does not stumble over it."""
    with suppress(OSError, ValueError):
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
