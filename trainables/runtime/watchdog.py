"""Watchdog that ends this process when a block takes too long, even if it hangs in C and holds Python's lock."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

#: File in a trial's folder with the stacks of all threads at the moment at which its process was ended.
HUNG_FILE = "hung.txt"

_armed: Watchdog | None = None


class Watchdog:
    """End this process without any clean-up when a watched block takes longer than ``timeout_s``.

    `faulthandler` does so in a thread of C: an exception, a signal handler or Python thread would wait for what hangs.

    Args:
        timeout_s: seconds; None watches nothing.
        folder: where `HUNG_FILE` is written; the stacks go to stderr where that is impossible.
    """

    def __init__(self, timeout_s: float | None, folder: Path) -> None:
        self._timeout_s = timeout_s
        self._path = folder / HUNG_FILE
        self._file: TextIO | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the block; at most one at a time in a process."""
        global _armed
        if self._timeout_s is None:
            yield
            return
        if self._file is None:
            with suppress(OSError):  # another node's folder, or a full disk
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("w")
        _armed = self
        self.begin_again()
        try:
            yield
        except BaseException:
            self.close()
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            _armed = None

    def begin_again(self) -> None:
        """Count the time from now."""
        assert self._timeout_s is not None
        file: Any = self._file or sys.__stderr__
        faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=file)

    def close(self) -> None:
        """Remove the file, which is empty as long as nothing hung."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):
                self._path.unlink()


def was_ended(folder: Path) -> bool:
    """Return whether a watchdog with this folder ended its process; False also where that cannot be seen."""
    try:
        return (folder / HUNG_FILE).stat().st_size > 0
    except OSError:
        return False


def waits_for_others() -> None:
    """Count the time of the watched block from now: this process waits for another one and does not hang."""
    if _armed is not None:
        _armed.begin_again()
