"""A shell command as a child process: its output is read as it arrives, and no process of it is left behind."""

from __future__ import annotations

import codecs
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from io import FileIO
from itertools import chain
from pathlib import Path

#: Maximum number of characters kept of a line.
LINE_CHARACTERS = 2**20
#: Maximum number of bytes read from a log's end.
TAIL_BYTES = 2**18
BLOCK_BYTES = 2**13
READ_BYTES = 2**16
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

    Raises:
        OSError: the log cannot be opened, a folder does not exist, or no process can be started.
    """

    def __init__(self, command: str, *, environment: Mapping[str, str], cwd: Path, log: Path) -> None:
        self._log = log.absolute()
        self._reading, self._waiting = threading.Lock(), threading.Lock()
        with ExitStack() as ours, ExitStack() as theirs:
            end_of_log = theirs.enter_context(self._log.open("ab"))
            self._log_start = end_of_log.tell()
            control, self._control = _pipe(reader=theirs, writer=ours)
            self._output, output = _pipe(reader=ours, writer=theirs)
            self._status, status = _pipe(reader=ours, writer=theirs)
            _start_guard(command, {"PYTHONUNBUFFERED": "1", **environment}, cwd, control, output, end_of_log, status)
            ours.pop_all()
        self._lines = split_lines(self._chunks())
        self.returncode: int | None = None
        """The command's exit status once it has ended, negative for signals; known when `lines` has ended.

        Also -9 if the guard was killed from outside.
        """

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lines(self) -> Iterator[str]:
        r"""Return the lines of stdout as they arrive, without their ends, until the command has ended.

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
        with suppress(OSError, ValueError):  # the guard has ended, or this is the second call
            self._control.write(f"{grace_s}\n".encode())
        self._wait(all_gone=True, timeout_s=max(0.0, grace_s) + KILL_S)
        self._control.close()
        self._status.close()
        if self._reading.acquire(timeout=1.0):
            self._output.close()
            self._reading.release()

    def _chunks(self) -> Iterator[bytes]:
        while True:
            with self._reading:  # not closed while being read: its number could be reused
                chunk = b"" if self._output.closed else self._output.read(READ_BYTES)
            if not chunk:
                self._wait(all_gone=False, timeout_s=None)
                return
            yield chunk

    def _wait(self, *, all_gone: bool, timeout_s: float | None) -> None:
        """Wait until the exit status is known, or until no process of the script runs."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waiting:
            while not self._status.closed and (all_gone or self.returncode is None):
                poll = select.poll()
                poll.register(self._status, select.POLLIN)
                if not poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000):
                    return
                text = self._status.read(READ_BYTES)
                if text:
                    self.returncode = int(text)
                    continue
                self._status.close()
                if self.returncode is None:  # only SIGKILL ends the guard before the script
                    self.returncode = -signal.SIGKILL


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    r"""Yield the lines of UTF-8 text that arrives in pieces, each as soon as its end has arrived.

    A ``\n`` after ``\r`` does not end another line. Line ends are removed; the last line needs none. Lines are cut to
    `LINE_CHARACTERS`.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    begun = io.StringIO()
    for chunk in chain(chunks, [None]):
        text = decoder.decode(b"", final=True) if chunk is None else decoder.decode(chunk)
        for number, part in enumerate(text.split("\n")):
            if number > 0:
                yield begun.getvalue()
                begun = io.StringIO()
            begun.write(part[: LINE_CHARACTERS - begun.tell()])
    if begun.tell():
        yield begun.getvalue()


def tail(path: Path, n: int, *, start: int = 0) -> list[str]:
    """Return up to ``n`` last lines of a text file, read from its end; at most the last `TAIL_BYTES`.

    A line that was overwritten with carriage returns (a progress bar) gives its last state.

    Args:
        path: the file.
        n: maximum number of lines.
        start: byte before which nothing is read.
    """
    data = b""
    with path.open("rb") as file:
        end = at = file.seek(0, os.SEEK_END)
        while at > start and end - at < TAIL_BYTES and data.count(b"\n") <= n:
            size = min(BLOCK_BYTES, at - start)
            at -= size
            file.seek(at)
            data = file.read(size) + data
    lines = data.decode("utf-8", errors="replace").removesuffix("\n").split("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines[max(0, len(lines) - n) :]] if data else []


def _pipe(*, reader: ExitStack, writer: ExitStack) -> tuple[FileIO, FileIO]:
    """Return the two ends of a pipe, each closed with its stack."""
    read, write = os.pipe()
    return reader.enter_context(FileIO(read, "r")), writer.enter_context(FileIO(write, "w"))


def _start_guard(
    command: str,
    environment: Mapping[str, str],
    cwd: Path,
    control: FileIO,
    output: FileIO,
    log: io.BufferedWriter,
    status: FileIO,
) -> None:
    guard = Path(__file__).with_name("guard.py")
    # -I -S: neither the user's variables nor installed packages can change the guard, and it starts in 15 ms.
    arguments = [sys.executable, "-I", "-S", str(guard), str(status.fileno()), str(os.getpid())]
    with subprocess.Popen(
        [*arguments, environment.get("LC_CTYPE", ""), command],
        env=environment,
        cwd=cwd,
        stdin=control,
        stdout=output,
        stderr=log,
        pass_fds=[status.fileno()],
        start_new_session=True,
    ) as launcher:  # it ends as soon as the guard has detached itself
        returncode = launcher.wait()
    if returncode != 0:
        raise OSError(f"the guard of a script could not be started (exit status {returncode}): see {log.name}")
