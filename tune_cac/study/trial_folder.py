"""A trial's folder in its Ray experiment: its name, and the results of an interrupted trial in it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Columns of the compute that was spent on a trial that did not end well.
SPENT = ("search_flops", "dense_flops")


def trial_folder_name(number: int) -> str:
    """Return the name of a trial's folder in its Ray experiment, by Optuna's trial number."""
    return f"trial-{number:05d}"


def last_checkpoint(trial_folder: Path) -> Path | None:
    """Return the newest complete checkpoint that Ray wrote into a trial's folder; None if there is none."""
    from trainables.runtime.checkpoint_file import CHECKPOINT_FILE

    found = [p for p in trial_folder.glob("checkpoint_*") if (p / CHECKPOINT_FILE).is_file()]
    return max(found, default=None)


def last_row(trial_folder: Path) -> dict[str, Any]:
    """Return what an interrupted trial had executed by the last result that Ray wrote; empty if there is none."""
    try:
        lines = (trial_folder / "result.json").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in reversed(lines):
        with suppress(ValueError):  # the last line may be cut off
            row = json.loads(line)
            if isinstance(row, dict):
                return {name: row[name] for name in SPENT if name in row}
    return {}
