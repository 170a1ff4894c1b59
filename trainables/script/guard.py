"""A small program between us and a user's command: it starts the command and leaves none of its processes running.

Run as ``python -I -S guard.py STATUS_FD PARENT_PID LC_CTYPE COMMAND`` by `trainables.script.process`, which holds the
other ends of these pipes:

- stdin: ``seconds`` and a line feed end the command with that grace period; end of file ends it with `GRACE_S`.
- stdout: the command's stdout, buffered here while the reader is slow.
- stderr: the log; stdout and stderr of the command, as they arrive.
- STATUS_FD: one line with the exit status as `subprocess` counts it, once it is known; closed when nothing runs.

It is needed because our process may be killed with SIGKILL, and descendants of a script may leave its process group.
The guard is a child subreaper (Linux, prctl(2)), so every descendant that loses its parent becomes a child of the
guard: all of them are found under /proc, and "no child left" means that nothing is left. It detaches itself from its
parent by a second fork, because a Ray worker that exits kills its direct children.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from itertools import product

#: Seconds between SIGTERM and SIGKILL unless another grace period is given.
GRACE_S = 5.0
#: Seconds for which background children may continue writing after the script itself has ended.
STRAGGLERS_S = 1.0
#: Maximum output buffered for a slow reader; beyond it the script waits, as with a full pipe.
HELD_BYTES = 16 * 2**20
#: Maximum capacity of an unprivileged process's pipe: the script's last output.
PIPE_BYTES = 2**20
READ_BYTES = 2**16
STDIN, STDOUT, STDERR = 0, 1, 2
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def load_prctl() -> Callable[[int, int], object]:
    """Return a function that calls prctl(2) with one argument; it does nothing where there is no prctl."""
    try:
        import ctypes

        function = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    function.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    return lambda option, value: function(option, value, 0, 0, 0)


def descendants(root: int, spared: Container[int] = ()) -> list[int] | None:
    """Return the numbers of all processes below ``root``, parents before their children; None without /proc.

    Children of ``root`` that are ``spared`` are omitted, and so are their descendants.
    """
    children: dict[int, list[int]] = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    for number in numbers:
        try:
            with open(f"/proc/{number}/stat", "rb") as file:
                text = file.read()
        except OSError:  # it has ended
            continue
        # The name in brackets may contain anything, brackets too; state and parent follow the last one.
        children.setdefault(int(text[text.rindex(b")") + 1 :].split()[1]), []).append(number)
    found = [number for number in children.get(root, []) if number not in spared]
    for number in found:  # grows during the loop
        found += children.get(number, [])
    return found


def start(command: str, environment: dict[str, str], prctl: Callable[[int, int], object]) -> tuple[int, int, int]:
    """Start the command in its own session; return its number and the read ends of its stdout and stderr."""
    out, out_of_script = os.pipe()
    errors, errors_of_script = os.pipe()
    # Blocked, so that a signal between fork and exec gets the script's handling, not ours.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    script = os.fork()
    if script == 0:
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the last resort where the guard itself is killed
            for number in (*SIGNALS, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
            os.dup2(out_of_script, STDOUT)
            os.dup2(errors_of_script, STDERR)
            os.execve("/bin/sh", ["sh", "-c", command], environment)
        except OSError as error:
            os.write(STDERR, f"/bin/sh cannot be started: {error}\n".encode())
        finally:
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # also where our parent had blocked them
    os.close(out_of_script)
    os.close(errors_of_script)
    return script, out, errors


class Guard:
    """Guard of a script: forwards its output, waits for its end, and ends its remaining processes.

    Args:
        script: number of the script's process.
        out: read end of its stdout.
        errors: read end of its stderr.
        status: descriptor to which its exit status is written.
        parent: a pidfd, readable once our parent has ended; None if there is none.
        wakeup: descriptor on which the numbers of signals arrive as bytes.
    """

    def __init__(self, *, script: int, out: int, errors: int, status: int, parent: int | None, wakeup: int) -> None:
        self.script, self.out, self.errors, self.status, self.wakeup = script, out, errors, status, wakeup
        self.output = {out, errors}  # those still open
        self.callers: dict[int, Callable[[], None]] = {wakeup: self.on_signals, STDIN: self.on_control}
        if parent is not None:
            self.callers[parent] = partial(self.hang_up, parent)
        self.held = bytearray()
        self.forwards, self.stdout_is_open = True, True  # stdout is forwarded to the reader
        self.told, self.has_children = False, True  # the end was requested; a process is left
        self.stragglers_until: float | None = None  # known once the script has ended
        self.kill_at: float | None = None
        self.kill_pause_s = 0.05
        self.terminated: set[int] = set()  # processes that got SIGTERM

    def run(self) -> None:
        """Run until no process is left and all output has been delivered."""
        while self.has_children or not self.is_read() or (self.held and not self.told):
            watched = self.watched()
            poll = select.poll()
            # In reverse: if stderr is ready, what was written to stdout before is seen too, and handled first.
            for number, (events, _) in reversed(watched.items()):
                poll.register(number, events)
            ready = dict(poll.poll(self.timeout_ms()))
            for number, (_, handle) in watched.items():
                if number in ready:
                    handle()
            self.keep_time()
        self.signal_all(signal.SIGTERM)  # without subreapers a process group can outlive its leader

    def is_read(self) -> bool:
        """Return whether the script has ended, and its output too or the time for stragglers."""
        until = self.stragglers_until
        return until is not None and (not self.output or time.monotonic() >= until)

    def watched(self) -> dict[int, tuple[int, Callable[[], object]]]:
        """Return the descriptors to wait for, each with its events and its handler, in the order of handling."""
        watched: dict[int, tuple[int, Callable[[], object]]]
        watched = {number: (select.POLLIN, handle) for number, handle in self.callers.items()}
        # What the script wrote before its end is in the pipe, and is read even if the reader is slow.
        room = HELD_BYTES if self.stragglers_until is None else HELD_BYTES + PIPE_BYTES
        if self.out in self.output and len(self.held) < room:
            watched[self.out] = (select.POLLIN, self.on_out)
        if self.errors in self.output:
            watched[self.errors] = (select.POLLIN, lambda: self.take(self.errors))
        if self.held:
            watched[STDOUT] = (select.POLLOUT, self.on_reader)
        return watched

    def timeout_ms(self) -> float | None:
        """Return the milliseconds until the next timed action; None if there is none."""
        times = [self.kill_at if self.has_children else None, None if self.is_read() else self.stragglers_until]
        due = min((at for at in times if at is not None), default=None)
        return None if due is None else max(0.0, due - time.monotonic()) * 1000

    def keep_time(self) -> None:
        """Run the timed actions that are due."""
        if self.is_read():
            self.forwards = False
            if not self.held and self.stdout_is_open:
                os.close(STDOUT)  # end of file for the reader
                self.stdout_is_open = False
            if self.has_children and self.kill_at is None:
                self.end(GRACE_S, told=self.told)  # the remaining processes
        if self.has_children and self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.signal_all(signal.SIGKILL)
            # Repeated for children started meanwhile; at growing intervals, because a process may hang in the kernel.
            self.kill_at = time.monotonic() + self.kill_pause_s
            self.kill_pause_s = min(1.0, 2 * self.kill_pause_s)

    def end(self, grace_s: float, *, told: bool = True) -> None:
        """Send SIGTERM now and SIGKILL after ``grace_s`` seconds; a second call can only shorten the grace period."""
        self.told = told
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
        self.terminated.update(self.signal_all(signal.SIGTERM, signal.SIGCONT, spared=self.terminated))

    def signal_all(self, *numbers: int, spared: Container[int] = ()) -> list[int]:
        """Send signals to every descendant; return the numbers of these processes."""
        found = descendants(os.getpid(), spared)
        kill, processes = (os.killpg, [self.script]) if found is None else (os.kill, found)
        for number, process in product(numbers, processes):
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
                kill(process, number)
        return processes

    def on_signals(self) -> None:
        if set(os.read(self.wakeup, READ_BYTES)) - {signal.SIGCHLD}:
            self.end(GRACE_S)
        while self.has_children:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.has_children = False
                break
            if process == 0:
                break
            if process == self.script:
                self.stragglers_until = time.monotonic() + STRAGGLERS_S
                with suppress(OSError):  # no reader is left
                    os.write(self.status, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        if self.has_children and self.kill_at is not None:
            self.terminate()

    def on_control(self) -> None:
        text = os.read(STDIN, READ_BYTES)
        if not text:
            self.hang_up(STDIN)
        for grace_s in text.split():
            self.end(float(grace_s))

    def hang_up(self, caller: int) -> None:
        """End the script because our parent has ended or closed its pipe, and stop watching that descriptor."""
        del self.callers[caller]
        self.end(GRACE_S)

    def on_out(self) -> None:
        data = self.take(self.out)
        self.held += data if self.forwards else b""

    def take(self, number: int) -> bytes:
        """Read the next part of the script's output, log it and return it; empty at its end."""
        data = os.read(number, READ_BYTES)
        write_log(data)
        if not data:
            os.close(number)
            self.output.discard(number)
        return data

    def on_reader(self) -> None:
        try:
            del self.held[: os.write(STDOUT, bytes(self.held[:READ_BYTES]))]
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone
            self.held.clear()
            self.forwards = False


def write_log(data: bytes) -> None:
    """Write all of the data to the log; a full disk ends the log, not the training."""
    with suppress(OSError):
        while data:
            data = data[os.write(STDERR, data) :]


def main() -> None:
    """Detach from the parent, start the command and guard it until the end."""
    status, parent_number, lc_ctype, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.set_inheritable(status, False)
    parent = None
    with suppress(AttributeError, OSError):  # not Linux, or too old: only the pipe is used
        parent = os.pidfd_open(parent_number)
    if os.getppid() != parent_number or os.fork():
        os._exit(0)
    prctl = load_prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, woken = os.pipe()
    for number in (wakeup, woken, STDOUT):
        os.set_blocking(number, False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # without a handler nothing wakes us
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    # In the C locale Python sets this for itself (PEP 538); the script must get the value that was given.
    environment = {**os.environ, "LC_CTYPE": lc_ctype}
    if not lc_ctype:
        del environment["LC_CTYPE"]
    script, out, errors = start(command, environment, prctl)
    Guard(script=script, out=out, errors=errors, status=status, parent=parent, wakeup=wakeup).run()
    os._exit(0)


if __name__ == "__main__":
    main()
