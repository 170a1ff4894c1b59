"""A small program between us and a user's command: it starts the command and leaves none of its processes running.

Run as ``python -I -S guard.py PARENT_PID LC_CTYPE COMMAND PSUTIL_FOLDER`` by `trainables.script.run`, which
holds the other ends:

- stdin: a socket. ``seconds`` and a line feed end the command with that grace period, end of file with `GRACE_S`.
  Back comes one line with the exit status as `subprocess` counts it, once it is known and nothing more is to be read,
  and end of file when nothing runs.
- stdout and stderr: files, which the command inherits.

It is needed because our process may be killed with SIGKILL, and descendants of a script may leave its process group.
The guard is a child subreaper (Linux, prctl(2)), so every descendant that loses its parent becomes a child of the
guard, and "no child left" means that nothing is left. It detaches itself from its parent by a second fork, because a
Ray worker that exits kills its direct children.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Container
from contextlib import suppress
from functools import partial
from itertools import product

if __name__ == "__main__":
    sys.path.append(sys.argv[4])

import psutil

#: Seconds between SIGTERM and SIGKILL unless another grace period is given.
GRACE_S = 5.0
#: Seconds between two rounds of SIGKILL: children may be started meanwhile, and a process may hang in the kernel.
KILL_PAUSE_S = 0.2
#: Seconds for which background children may go on after the script itself has ended.
STRAGGLERS_S = 1.0
#: Milliseconds between two looks at the clock while something is due.
TICK_MS = 50
READ_BYTES = 2**16
STDIN, STDERR = 0, 2
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
prctl = getattr(ctypes.CDLL(None), "prctl", None)


class Guard:
    """Guard of a script: waits for its end, and ends its remaining processes.

    Args:
        command: a command line for ``/bin/sh -c``, started in its own session.
        environment: of the command.
        wakeup: descriptor on which the numbers of signals arrive as bytes.
        callers: descriptors that are readable when the script is to be ended: stdin, and a pidfd of our parent.
    """

    def __init__(self, command: str, environment: dict[str, str], *, wakeup: int, callers: set[int]) -> None:
        self.wakeup, self.callers = wakeup, callers
        self.script = subprocess.Popen(
            command, shell=True, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
            # the last resort where the guard itself is killed
            preexec_fn=prctl and partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
        )  # fmt: skip
        self.has_children = True
        self.status: int | None = None  # the script's exit status, until it is told
        self.stragglers_until: float | None = None  # known once the script has ended
        self.kill_at: float | None = None
        self.terminated: set[psutil.Process] = set()  # processes that got SIGTERM

    def run(self) -> None:
        """Run until no process is left."""
        while self.has_children:
            poll = select.poll()
            for number in (self.wakeup, *self.callers):
                poll.register(number, select.POLLIN)
            is_timed = self.kill_at is not None or self.stragglers_until is not None
            ready = dict(poll.poll(TICK_MS if is_timed else None))
            if self.wakeup in ready:
                self.on_signals()
            for caller in self.callers & ready.keys():
                self.callers.discard(caller)
                text = os.read(STDIN, READ_BYTES) if caller == STDIN else b""
                self.end(float(text) if text else GRACE_S)
            if self.kill_at is None and self.stragglers_until is not None and time.monotonic() >= self.stragglers_until:
                self.end(GRACE_S)  # the remaining processes
            if self.status is not None and (self.kill_at is not None or not self.has_children):
                with suppress(OSError):  # no reader is left
                    os.write(STDIN, f"{self.status}\n".encode())
                self.status = None
            if self.has_children and self.kill_at is not None and time.monotonic() >= self.kill_at:
                signal_all(signal.SIGKILL)
                self.kill_at = time.monotonic() + KILL_PAUSE_S
        if prctl is None:  # without subreapers a process group can outlive its leader
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.script.pid, signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        """Send SIGTERM now and SIGKILL after ``grace_s`` seconds; a second call can only shorten the grace period."""
        if self.kill_at is None:
            self.terminate()
        kill_at = time.monotonic() + max(0.0, grace_s)
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def terminate(self) -> None:
        """Send SIGTERM once to each process, parents first, so that a shell does not begin its next command.

        A further call signals children started meanwhile whose parent has ended. Processes that a parent starts to
        clean up are not signalled.
        """
        # A stopped process gets SIGTERM only when it is continued.
        self.terminated.update(signal_all(signal.SIGTERM, signal.SIGCONT, spared=self.terminated))

    def on_signals(self) -> None:
        """Reap ended children, and end the script if another signal than theirs has arrived."""
        if set(os.read(self.wakeup, READ_BYTES)) - {signal.SIGCHLD}:
            self.end(GRACE_S)
        process = -1
        while self.has_children and process:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.has_children = False
            else:
                if process == self.script.pid:
                    self.status = os.waitstatus_to_exitcode(status)
                    self.stragglers_until = time.monotonic() + STRAGGLERS_S
        if self.has_children and self.kill_at is not None:
            self.terminate()


def signal_all(*numbers: int, spared: Container[psutil.Process] = ()) -> list[psutil.Process]:
    """Send signals to every descendant, parents before their children; return these processes.

    Children of this process that are ``spared`` are omitted, and so are their descendants.
    """
    found = []
    for child in psutil.Process().children():
        if child not in spared:
            found.append(child)
            with suppress(psutil.Error):  # it has ended
                found += child.children(recursive=True)
    for number, process in product(numbers, found):
        with suppress(psutil.Error):  # it has ended, or is another user's
            process.send_signal(number)
    return found


def main() -> None:
    """Detach from the parent, start the command and guard it until the end."""
    parent, lc_ctype, command = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    callers = {STDIN}
    with suppress(AttributeError, OSError):  # not Linux, or too old: only the socket is used
        callers.add(os.pidfd_open(parent))
    if os.getppid() != parent or os.fork():
        os._exit(0)
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # without a handler nothing wakes us
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # our parent may have blocked them
    # In the C locale Python sets this for itself (PEP 538); the script must get the value that was given.
    environment = {**os.environ, "LC_CTYPE": lc_ctype}
    if not lc_ctype:
        del environment["LC_CTYPE"]
    try:
        guard = Guard(command, environment, wakeup=wakeup, callers=callers)
    except OSError as error:
        os.write(STDERR, f"/bin/sh cannot be started: {error}\n".encode())
        os.write(STDIN, b"127\n")
    else:
        guard.run()
    os._exit(0)


if __name__ == "__main__":
    main()
