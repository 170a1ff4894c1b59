"""Seconds from SIGTERM to the end of a search, at several times of its start and of its first trials.

python benchmarks/interrupts.py [--repeats 1]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

from machine import header

#: Seconds after the search's first line: before Ray is loaded, while it starts, and while trials train.
AFTER_S = (0.3, 1.5, 3.0, 6.0, 10.0)
SEARCH = ("search", "--trials", "20", "--epochs", "100", "--name", "s")


def main() -> None:
    """Print a line for each mode and time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=1)
    repeats = parser.parse_args().repeats
    print(header(f"benchmarks/interrupts.py {' '.join(sys.argv[1:])}"), flush=True)
    for mode in ((), ("--no-sharing",)):
        for after_s in AFTER_S:
            ended = [ended_s(mode, after_s) for _ in range(repeats)]
            print(f"{' '.join(mode) or 'sharing':12} after {after_s:4.1f} s: {', '.join(ended)}", flush=True)


def ended_s(mode: tuple[str, ...], after_s: float) -> str:
    """Return how long a search took to end, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "tune_cac", *SEARCH, *mode],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(after_s)
        begun = time.monotonic()
        process.terminate()
        process.communicate()
        return f"{time.monotonic() - begun:.2f} s (exit code {process.returncode})"


if __name__ == "__main__":
    main()
