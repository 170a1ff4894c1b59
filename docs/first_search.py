"""Make the README's picture and print what its first command prints: `python docs/first_search.py`, about a minute.

One trial at a time, so that the same versions give the same trials.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parent / "pareto.png"
SEARCH = ("search", "--space", "auto_thresholds", "--concurrency", "1", "--name", "first")


def tune_cac(folder: Path, *arguments: str) -> str:
    """Run a command in a folder; return what it prints."""
    command = [sys.executable, "-m", "tune_cac", *arguments]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(tune_cac(folder, *SEARCH))
        print((folder / "results" / "first" / "best.env").read_text("utf-8"))
        tune_cac(folder, "report", "first", "--picture", str(PICTURE))
