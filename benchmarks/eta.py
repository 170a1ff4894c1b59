"""Time left as the progress line says it, over the time that was left, in searches of three kinds.

python benchmarks/eta.py [digits] [text] [script]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import header, spread

#: The example's loop of training, which reports its accuracy.
SCRIPT = (
    (Path(__file__).parents[1] / "examples" / "loop.py").read_text()
    + """
cac.report(epoch=10, accuracy=float((model.eval()(images).argmax(1) == labels).float().mean()))
"""
)
SEARCHES = {
    "digits": ("--space", "auto_thresholds"),
    "text": ("--workload", "text", "--epochs", "10"),
    "script": ("--script", f"{sys.executable} loop.py"),
}
_UNITS = {"h": 3600, "min": 60, "s": 1}


def main() -> None:
    """Print each estimate, the time that was left, and their ratios."""
    print(header(f"benchmarks/eta.py {' '.join(sys.argv[1:])}"), flush=True)
    for name in sys.argv[1:] or SEARCHES:
        found, ended_s = said_by(SEARCHES[name])
        for line, at_s, estimate_s in found:
            print(f"{name:7} at {at_s:5.0f} s: {estimate_s:5.0f} s, were {ended_s - at_s:5.0f} s | {line}", flush=True)
        print(f"{name:7} ratio {spread([estimate_s / (ended_s - at_s) for _, at_s, estimate_s in found])}", flush=True)


def said_by(arguments: tuple[str, ...]) -> tuple[list[tuple[str, float, float]], float]:
    """Return (begin of the line, when it came, seconds left as it says) of each line of a search, and when it ended."""
    found: list[tuple[str, float, float]] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "loop.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "tune_cac", "search", "--name", "s", *arguments]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            if left := re.search(r"about (.*) left", line):
                seconds = sum(int(n) * _UNITS[unit] for n, unit in re.findall(r"(\d+) (h|min|s)", left[1]))
                found.append((line[:40], time.monotonic() - begun, seconds))
        process.wait()
    return found, time.monotonic() - begun


if __name__ == "__main__":
    main()
