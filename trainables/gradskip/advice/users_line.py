"""The line of the user's code that a warning is about."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import trainables

#: Folders and packages whose lines are not the user's: ours, and libraries that call the optimizer for users.
_NOT_THE_USERS = tuple(f"{Path(path).resolve()}{os.sep}" for path in trainables.__path__)
_LIBRARIES = ("torch", "accelerate", "transformers", "lightning", "pytorch_lightning")


def users_level() -> int:
    """Return the ``stacklevel`` with which the caller's `warnings.warn` points at the user's innermost line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        ours = frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        if not ours and module not in _LIBRARIES:
            return level
        frame, level = frame.f_back, level + 1
    return level
