"""The end of a command, in real processes: its code, its output and whatever wants to be done at exit are kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Says what happens at its exit, in order; an object that is taken down would say so too.
LEAVES = """
import atexit, sys, threading, time
from tune_cac.leaving import Leaving

class Loud:
    def __del__(self):
        print("taken down", flush=True)

def late():
    time.sleep(0.3)
    print("thread")

leaving = Leaving()
atexit.register(print, "handler")
kept = Loud()
threading.Thread(target=late).start()
print("output")
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("leaving.code = 3; sys.exit(3)", 3, ["output", "thread", "handler"]),
        ("leaving.code = 0", 0, ["output", "thread", "handler"]),
        ("raise RuntimeError('wrong')", 1, ["output", "thread", "handler", "taken down"]),
    ],
)
def test_it_leaves_after_everything_else(end: str, code: int, said: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES.format(end=end)], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout.split("\n")[:-1] == said
    assert ("RuntimeError: wrong" in done.stderr) == (code == 1)


def test_a_reader_that_has_gone_is_no_error() -> None:
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m tune_cac --help | true", shell=True, executable="/bin/bash",
        capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
