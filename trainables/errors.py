"""What a user did wrong, said in one line: the rule, the value given and the way out."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class DiskError(UserError):
    """A disk that is full, over quota or read-only: nothing was wrong with what the user asked for."""

    exit_code = 3


#: What a disk says when it is full, over quota, read-only or broken.
DISK_REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


def cannot_write(what: str, error: OSError, instead: str) -> UserError:
    """Return the error for a file that cannot be written: a `DiskError` where that is the disk's fault.

    >>> print(cannot_write("--output x", OSError(errno.ENOSPC, "No space left on device"), "choose another file"))
    cannot write --output x: No space left on device; choose another file
    """
    kind = DiskError if error.errno in DISK_REFUSALS else UserError
    return kind(f"cannot write {what}: {error.strerror or error}; {instead}")


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
