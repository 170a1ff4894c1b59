"""A trial's folder in its Ray experiment: its name, and the results of an interrupted trial in it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainables.runtime.checkpoint_folder import CHECKPOINT
from trainables.storage import files_of, joined

#: Columns of the compute that was spent on a trial that did not end well.
SPENT = ("search_flops", "dense_flops")


def trial_folder_name(number: int) -> str:
    """Return the name of a trial's folder in its Ray experiment, by Optuna's trial number."""
    return f"trial-{number:05d}"


def is_trial_folder(name: Any) -> bool:
    """Return whether a name from a journal is that of a trial's folder, relative to its study."""
    return isinstance(name, str) and re.fullmatch(r"ray/run-\d+/trial-\d+", name) is not None


def last_checkpoint(trial_folder: Path | str) -> Path | str | None:
    """Return the newest complete checkpoint in a trial's folder, which may be a URI; None if there is none."""
    from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE

    files = files_of(trial_folder)
    try:
        found = [
            name
            for name in files.names("")
            if name.startswith(CHECKPOINT) and files.size(f"{name}/{CHECKPOINT_FILE}") is not None
        ]
    except OSError:  # a failing storage: the trial begins anew
        return None
    return joined(trial_folder, max(found)) if found else None


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
