"""Entry point of ``python -m tune_cac`` and of the console script ``tune-cac``."""

from __future__ import annotations

import sys

from tune_cac.cli.fast_exit import FastExit
from tune_cac.cli.main import main

__all__ = ["main", "run"]


def run() -> None:
    """Run the command of ``sys.argv`` and end the process with its exit code."""
    leaving = FastExit()
    leaving.code = main()
    sys.exit(leaving.code)


if __name__ == "__main__":
    run()
