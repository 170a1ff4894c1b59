"""A real command as a child: its output as it comes, its end, and that nothing of it stays behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from trainables.script.run import LINE_BYTES, ScriptProcess

START = "with ScriptProcess({command!r}, environment=dict(os.environ), cwd=Path('.'), folder=Path('.')) as script:\n"
IMPORTS = "import os, signal, time\nfrom pathlib import Path\nfrom trainables.script.run import ScriptProcess\n"
ROOT = Path(__file__).parents[3]


def start(command: str, folder: Path, **environment: str) -> ScriptProcess:
    return ScriptProcess(command, environment={**os.environ, **environment}, cwd=folder, folder=folder)


def python(program: str) -> str:
    """A command that runs a program without waiting for site-packages."""
    return f"{shlex.quote(sys.executable)} -S -c {shlex.quote(program)}"


def runs(process: int) -> bool:
    """Whether there is such a process, and it is no zombie that its parent has yet to see."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until it holds; a minute without is a failure on any machine."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def descendants() -> list[int]:
    return [process.pid for process in psutil.Process().children(recursive=True)]


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    """Neither files nor threads nor children of this process, whatever a test does."""
    files, threads, children = os.listdir("/proc/self/fd"), threading.active_count(), descendants()
    yield
    assert len(os.listdir("/proc/self/fd")) == len(files)
    assert threading.active_count() == threads
    assert descendants() == children


@pytest.mark.parametrize(
    "command",
    [
        "echo one; echo aside >&2; while [ ! -e go ]; do sleep 0.01; done; echo two",
        python(
            "import os, sys, time\nprint('one')\nprint('aside', file=sys.stderr)\n"
            "while not os.path.exists('go'): time.sleep(0.01)\nprint('two')"
        ),
    ],
)
def test_lines_and_log_come_while_the_script_runs(command: str, tmp_path: Path) -> None:
    with start(command, tmp_path) as script:
        for line in script.lines():
            assert line == "one"
            break
        assert script.returncode is None
        wait_for(lambda: script.last_lines() == ["one", "aside"], "stderr comes too")
        (tmp_path / "go").touch()
        assert list(script.lines()) == ["two"]  # goes on where the first loop left off
        assert script.returncode == 0
        assert script.last_lines() == ["one", "two", "aside"]
        assert script.last_lines(2) == ["two", "aside"]


@pytest.mark.parametrize(
    ("command", "returncode"),
    [
        ("true", 0),
        ("exit 3", 3),
        ("exit 143", 143),  # told apart from SIGTERM
        ("kill -TERM $$", -signal.SIGTERM),
        ("kill -KILL $$", -signal.SIGKILL),
        ("no-such-program-anywhere", 127),
        ("echo 'unfinished", 2),
        ("exec " + python("import os; os.abort()"), -signal.SIGABRT),
    ],
)
def test_exit_status(command: str, returncode: int, tmp_path: Path) -> None:
    with start(command, tmp_path) as script:
        assert list(script.lines()) == []
        assert script.returncode == returncode
    assert script.returncode == returncode


def test_a_background_child_that_keeps_stdout_holds_nobody_up(tmp_path: Path) -> None:
    command = "sleep 1000 & echo $!; while :; do echo tick; sleep 0.05; done & echo $!; exit 4"
    with start(command, tmp_path) as script:
        lines = [line for line in script.lines() if line != "tick"]
        assert script.returncode == 4
    assert len(lines) == 2
    assert not any(runs(int(line)) for line in lines)


#: Prints the numbers of a child in a session of its own and of a daemon (double fork), deaf to SIGTERM if asked.
STRAYS = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())  # whole lines: three processes write into one pipe
child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL)
os.write(1, b"%d\\n" % child.pid)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(1000)
os.write(1, b"ready\\n")
time.sleep(1000)
"""


@pytest.mark.parametrize("ears", ["deaf", "hearing"])
def test_close_ends_children_in_other_sessions_and_daemons(ears: str, tmp_path: Path) -> None:
    (tmp_path / "strays.py").write_text(STRAYS)
    with start(f"{shlex.quote(sys.executable)} -S strays.py {ears}; true", tmp_path) as script:
        lines = [next(script.lines()) for _ in range(4)]
        processes = [int(line) for line in lines if line != "ready"]
        assert len({os.getsid(process) for process in processes}) == 3
        assert all(runs(process) for process in processes)
        script.close(grace_s=0.2)
        assert not any(runs(process) for process in processes)
        assert script.returncode == -signal.SIGTERM  # the shell around them
        script.close()
        assert list(script.lines()) == []


def test_whatever_a_script_leaves_behind_is_ended_when_it_ends(tmp_path: Path) -> None:
    command = "setsid sleep 1000 > /dev/null 2>&1 & echo $!; (sleep 1000 > /dev/null 2>&1 & echo $!)"
    with start(command, tmp_path) as script:
        processes = [int(line) for line in script.lines()]
        assert script.returncode == 0
        wait_for(lambda: not any(runs(process) for process in processes), "they end before close")
    assert len(processes) == 2


#: Says goodbye at SIGTERM.
GOODBYE = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"bye\\n"), os.write(2, b"sorry\\n"), os._exit(5)))
print("on")
time.sleep(1000)
"""
#: Has a child after SIGTERM, which gets its own when its parent ends; else it would run for the whole grace.
LATE_CHILD = """
import os, signal, time
def born(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if os.fork():
        os._exit(5)
    signal.sigwait([signal.SIGTERM])
    os.write(1, b"told")
    os._exit(0)
signal.signal(signal.SIGTERM, born)
print("on")
time.sleep(1000)
"""
#: Runs a command to clean up, also where its shell, a child of the guard as well, ends at once.
CLEANING = """
import os, signal, subprocess, time
def clean(*_):
    while os.getppid() == shell: time.sleep(0.01)
    subprocess.run(["sh", "-c", "sleep 0.1; echo clean"])
    os._exit(5)
shell = os.getppid()
signal.signal(signal.SIGTERM, clean)
print("on")
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("command", "returncode", "lines"),
    [
        ("exec " + python(GOODBYE), 5, ["bye", "sorry"]),
        ("exec " + python(LATE_CHILD), 5, ["told"]),
        (python(CLEANING) + "; true", -signal.SIGTERM, ["clean"]),
    ],
    ids=["goodbye", "late child", "cleaning"],
)
def test_sigterm_comes_first(command: str, returncode: int, lines: list[str], tmp_path: Path) -> None:
    with start(command, tmp_path) as script:
        assert next(script.lines()) == "on"
    assert script.returncode == returncode
    assert script.last_lines() == ["on", *lines]


@pytest.mark.parametrize("copies", [False, True])
def test_the_guard_ends_everything_when_our_process_is_killed(copies: bool, tmp_path: Path) -> None:
    """Also where a forked copy of our process holds the pipes open."""
    (tmp_path / "strays.py").write_text(STRAYS)
    command = f"{shlex.quote(sys.executable)} -S strays.py hearing; true"
    body = "    for line in script.lines():\n        print(line, flush=True)\n"
    if copies:
        body = "    print(os.fork() or time.sleep(1000), flush=True)\n" + body
    parent = subprocess.Popen(
        [sys.executable, "-c", IMPORTS + START.format(command=command) + body],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        copy = int(parent.stdout.readline()) if copies else None
        lines = [parent.stdout.readline().strip() for _ in range(4)]
        processes = [int(line) for line in lines if line != "ready"]
        assert len(processes) == 3
        guard = parent_of(parent_of(processes[0]))
        wait_for(lambda: parent_of(processes[2]) == guard, "the daemon is the guard's child now")
        parent.kill()
        wait_for(lambda: not any(runs(process) for process in [*processes, guard]), "all end")
        if copy is not None:
            assert runs(copy)
            os.kill(copy, signal.SIGKILL)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_where_the_guard_itself_is_ended_the_script_ends(number: int, tmp_path: Path) -> None:
    with start("echo $$; exec sleep 1000", tmp_path) as script:
        process = int(next(script.lines()))
        os.kill(parent_of(process), number)
        assert list(script.lines()) == []
        wait_for(lambda: not runs(process), "the script ends")
        assert script.returncode == (-signal.SIGKILL if number == signal.SIGKILL else -signal.SIGTERM)


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    program = "import os; os.write(1, b'x' * 3_000_000 + b'\\nnext\\n')"
    with start(python(program), tmp_path) as script:
        assert list(script.lines()) == ["x" * LINE_BYTES, "next"]


def test_the_script_has_the_environment_given_and_no_other(tmp_path: Path) -> None:
    def names(**environment: str) -> dict[str, str]:
        command = "tr '\\0' '\\n' < /proc/$$/environ"
        with ScriptProcess(command, environment=environment, cwd=tmp_path, folder=tmp_path) as script:
            return dict(line.split("=", 1) for line in script.lines())

    path = os.environ["PATH"]
    assert names(PATH=path, CAC_X="1 2") == {"PATH": path, "CAC_X": "1 2", "PYTHONUNBUFFERED": "1"}
    given = {"PATH": path, "PYTHONUNBUFFERED": "", "LC_CTYPE": "C"}
    assert names(**given) == given


def test_what_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ScriptProcess("true", environment={}, cwd=tmp_path / "none", folder=tmp_path)
    with pytest.raises(FileNotFoundError):
        ScriptProcess("true", environment={}, cwd=tmp_path, folder=tmp_path / "none")
    with pytest.raises(OSError, match="too long"):
        ScriptProcess("true #" + "x" * 10**6, environment={}, cwd=tmp_path, folder=tmp_path)
