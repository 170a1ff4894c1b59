"""``python -m tune_cac`` and the console script ``tune-cac``."""

from __future__ import annotations

import sys

from tune_cac.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
