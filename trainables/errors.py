"""What a user did wrong, said in one line: the rule, the value given and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class DiskError(UserError):
    """A disk that is full, over quota or read-only: nothing was wrong with what the user asked for."""

    exit_code = 3


class TrainingDiverged(RuntimeError):
    """A trial's loss or accuracy is not a number, so nothing can be ranked from it."""


class WorkerDied(RuntimeError):
    """A process of a trial ended without a word: killed, out of memory, or its node is gone."""


def unknown_name(kind: str, given: str, valid: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest one that does and the whole list.

    >>> print(unknown_name("space", "auto_treshold", ["auto_thresholds", "agp"]))
    unknown space 'auto_treshold': did you mean 'auto_thresholds'? Valid: agp, auto_thresholds
    """
    names = sorted(valid)
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(given.casefold(), list(folded), n=1)
    hint = f"did you mean {folded[near[0]]!r}? " if near else ""
    return UserError(f"unknown {kind} {given!r}: {hint}Valid: {', '.join(names)}")
