"""A shell command as a child process: its output is read as it arrives, and no process of it is left behind."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

import psutil

#: Maximum number of characters kept of a line.
LINE_CHARACTERS = 2**20
#: Maximum number of bytes read from a log's end.
TAIL_BYTES = 2**18
#: Seconds between two looks for a report while stdout is silent, and lines of stdout that are read ahead.
_LOOK_S, _WAITING_LINES = 0.1, 10_000
#: Seconds to wait for a killed process to disappear.
KILL_S = 10.0


class ScriptProcess:
    """A running command; a context manager that ends it.

    A guard process (`trainables.script.guard`) runs the command: it ends the command and all its descendants when
    `close` is called, and also when this process dies in any way.

    Args:
        command: a command line for ``/bin/sh -c``. It runs in its own session, with an empty stdin.
        environment: the complete environment of the command, as for `subprocess`: nothing else is inherited.
            ``PYTHONUNBUFFERED=1`` is added unless it is given, because Python scripts would buffer their lines.
        cwd: the command's working directory.
        log: a file to which stdout and stderr are appended as they arrive.
        reports: a file, made empty here, whose lines come among those of stdout; None for none.

    Raises:
        OSError: the log cannot be opened, a folder does not exist, or no process can be started.
    """

    def __init__(
        self, command: str, *, environment: Mapping[str, str], cwd: Path, log: Path, reports: Path | None = None
    ) -> None:
        self._log = log.absolute()
        self._reports = None
        self._waiting = threading.Lock()
        with self._log.open("ab") as end_of_log, ExitStack() as on_failure:
            if reports is not None:
                reports.write_bytes(b"")
                self._reports = on_failure.enter_context(reports.open(encoding="utf-8", errors="replace"))
            self._log_start = end_of_log.tell()
            self._guard, theirs = socket.socketpair()
            on_failure.enter_context(self._guard)
            # -I -S: neither the user's variables nor installed packages can change the guard.
            arguments = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(os.getpid())]
            with theirs:
                launcher = subprocess.Popen(
                    [*arguments, environment.get("LC_CTYPE", ""), command, str(Path(psutil.__file__).parents[1])],
                    env={"PYTHONUNBUFFERED": "1", **environment},
                    cwd=cwd,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=end_of_log,
                    start_new_session=True,
                    encoding="utf-8",
                    errors="replace",
                )
            assert launcher.stdout is not None
            self._output = on_failure.enter_context(launcher.stdout)
            if launcher.wait() != 0:  # it ends as soon as the guard has detached itself
                raise OSError(
                    f"the guard of a script could not be started (exit status {launcher.returncode}): see {self._log}"
                )
            on_failure.pop_all()
        self._lines = self._read_lines()
        self.returncode: int | None = None
        """The command's exit status once it has ended, negative for signals; known when `lines` has ended.

        Also -9 if the guard was killed from outside.
        """

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lines(self) -> Iterator[str]:
        r"""Return the lines of stdout, and of the reports, as they arrive, without ends, until the command has ended.

        Every call returns the same iterator, so that one loop can continue where another stopped. It ends when all
        processes have closed stdout, at the latest a second after the command itself, and after `close`. Bytes that are
        not UTF-8 become U+FFFD, ``\r`` and ``\r\n`` also end a line, and longer lines are cut to their first
        `LINE_CHARACTERS` characters.
        """
        return self._lines

    def last_lines(self, n: int = 20) -> list[str]:
        """Return up to ``n`` last lines of the log that this command wrote, stdout and stderr."""
        return tail(self._log, n, start=self._log_start)

    def close(self, grace_s: float = 5.0) -> None:
        """End the command and all its descendants: SIGTERM, then SIGKILL after ``grace_s`` seconds; callable twice.

        If another thread is waiting in `lines`, its loop ends. A process that hangs in the kernel can outlive this
        call; the guard continues until it ends.
        """
        with suppress(OSError):  # the guard has ended, or this is the second call
            self._guard.send(f"{grace_s}\n".encode())
        self._wait(all_gone=True, timeout_s=max(0.0, grace_s) + KILL_S)
        self._guard.close()
        self._output.close()
        if self._reports is not None:
            self._reports.close()

    def _read_lines(self) -> Iterator[str]:
        with suppress(ValueError):  # closed meanwhile
            if self._reports is None:
                yield from cut_lines(self._output.readline)
            else:
                yield from self._with_reports(self._reports)
        self._wait(all_gone=False, timeout_s=None)

    def _with_reports(self, reports: TextIO) -> Iterator[str]:
        """Yield lines of stdout and reports; a line of stdout that has not ended must not delay a report."""
        arrived: queue.Queue[str | None] = queue.Queue(_WAITING_LINES)

        def put(line: str | None) -> None:
            while not self._output.closed:  # else nobody takes it any more
                with suppress(queue.Full):
                    return arrived.put(line, timeout=_LOOK_S)

        def read() -> None:
            with suppress(ValueError):  # closed meanwhile
                for line in cut_lines(self._output.readline):
                    put(line)
            put(None)

        threading.Thread(target=read, daemon=True).start()
        begun = ""
        ended = False
        while not ended and not self._output.closed:
            line = None
            try:
                line = arrived.get(timeout=_LOOK_S)
                ended = line is None
            except queue.Empty:
                pass
            for part in reports:
                begun += part
                if begun.endswith("\n"):
                    yield begun[:-1]
                    begun = ""
            if line is not None:
                yield line

    def _wait(self, *, all_gone: bool, timeout_s: float | None) -> None:
        """Wait until the exit status is known, or until no process of the script runs."""
        with self._waiting, suppress(OSError):  # the time is over, or it has been closed
            self._guard.settimeout(timeout_s)
            while all_gone or self.returncode is None:
                text = self._guard.recv(64)
                if text:
                    self.returncode = int(text)
                    continue
                if self.returncode is None:  # only SIGKILL ends the guard before the script
                    self.returncode = -signal.SIGKILL
                return


def cut_lines(readline: Callable[[int], str]) -> Iterator[str]:
    """Yield the lines of a text file without their ends, cut to `LINE_CHARACTERS`, each as soon as it has arrived."""
    begins = True
    while part := readline(LINE_CHARACTERS + 1):
        if begins:
            yield part.removesuffix("\n")[:LINE_CHARACTERS]
        begins = part.endswith("\n")


def tail(path: Path, n: int, *, start: int = 0) -> list[str]:
    """Return up to ``n`` last lines of a text file, read from its end; at most the last `TAIL_BYTES`.

    A line that was overwritten with carriage returns (a progress bar) gives its last state.

    Args:
        path: the file.
        n: maximum number of lines.
        start: byte before which nothing is read.
    """
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        data = file.read()
    lines = data.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines[max(0, len(lines) - n) :]] if data else []
