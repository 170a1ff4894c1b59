"""Files of Ray trials as Ray writes them: its own encoder, its own names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.tune.utils.util import SafeFallbackEncoder


def write_trial(
    folder: Path,
    config: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    *,
    done: bool = False,
    error: str | None = None,
) -> Path:
    """A trial's folder; `done` marks its last row as Ray does. Written twice, rows are appended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(config, indent=2, sort_keys=True, cls=SafeFallbackEncoder))
    with (folder / "result.json").open("at") as file:
        for position, row in enumerate(rows, start=1):
            result = {**row, "done": done and position == len(rows), "trial_id": "c388c_00000", "config": config}
            json.dump(result, file, cls=SafeFallbackEncoder)
            file.write("\n")
    if error is not None:
        (folder / "error.txt").write_text(error)
    return folder
