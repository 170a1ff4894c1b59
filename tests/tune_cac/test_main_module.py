"""The end of a command, in real processes: its code, its output and whatever wants to be done at exit are kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Says what happens at its exit, in order; an object that is taken down would say so too.
LEAVES = """
import atexit, sys, threading, time
from tune_cac.__main__ import FastExit

class Loud:
    def __del__(self):
        print("taken down", flush=True)

def late():
    time.sleep(0.3)
    print("thread")

leaving = FastExit()
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


def test_output_that_nobody_takes_is_told_as_python_tells_it() -> None:
    plain = "import atexit; atexit.register(print, 'output')"
    ours = f"from tune_cac.__main__ import FastExit; leaving = FastExit(); leaving.code = 0; {plain}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    found = []
    for code in (plain, ours):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered
        )
        os.close(writer)
        found.append((done.returncode, done.stderr))
    assert found[0] == found[1]
    assert found[0][0] == 120
    assert "BrokenPipeError" in found[0][1]
