"""Check that a script's trial took the steps of its length, and did not go on from what an earlier one left.

Scripts that resume by themselves find, in a folder that all trials share, the checkpoint of the trial before: then a
trial trains on from another one's weights, and seems to cost next to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Share of the baseline's steps, scaled to a trial's epochs, that a trial must take: a scaler may skip some.
_LEAST = 0.98
#: Most entries of the working directory that are looked at, and most files that are named.
_MOST_ENTRIES, _NAMED = 5000, 4


@dataclass(frozen=True, kw_only=True)
class OwnLength:
    """What a trial's length asks of it."""

    steps: int
    """Optimizer steps: the baseline's, scaled to the trial's epochs."""
    since_s: float
    """Time at which the study's first trial began, seconds since the epoch."""

    def fault(self, told: Mapping[str, Any], *, cwd: Path, folder: Path, begun_s: float) -> str:
        """Return why a trial that has ended is no outcome; empty if it is one.

        Args:
            told: its last report.
            cwd: the script's working directory.
            folder: of the trial.
            begun_s: time at which the trial began, seconds since the epoch.
        """
        counted = told.get("gradskip") or {}
        steps = counted.get("steps", told.get("step"))
        if steps is None or steps >= _LEAST * self.steps or told.get("extra", {}).get("early_stopped"):
            return ""
        return (
            f"the script took {int(steps)} optimizer steps where a run of its length takes {self.steps}"
            f"{self.left_behind(cwd, folder, begun_s)}. If it stopped early by itself, let its last report say so: "
            "report(..., early_stopped=True)"
        )

    def left_behind(self, cwd: Path, folder: Path, begun_s: float) -> str:
        """Return the words for files that earlier trials wrote in the working directory; empty if there are none."""
        found = [(s, p) for s, p in files_below(cwd, folder) if self.since_s <= s < begun_s]
        if not found:
            return ""
        names = [str(path.relative_to(cwd)) for _, path in sorted(found, reverse=True)]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return (
            f": it may have gone on from what an earlier trial left in {cwd} ({', '.join(names[:_NAMED])}{more}). Give "
            "each trial a folder of its own for its checkpoints, {trial_dir} in the command"
        )


def files_below(cwd: Path, folder: Path) -> Iterator[tuple[float, Path]]:
    """Yield the files below a folder with the times of their last change; hidden ones and the study's are left out."""
    seen = 0
    for here, folders, names in os.walk(cwd):
        place = Path(here)
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__")) and place / name not in folder.parents and place / name != folder
        ]
        for name in names:
            seen += 1
            if seen > _MOST_ENTRIES:
                return
            try:
                yield (place / name).stat().st_mtime, place / name
            except OSError:  # gone meanwhile
                continue
