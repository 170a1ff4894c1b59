"""JSON cache for expensive results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainables.storage import atomic_write


def cached_json(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the file, or else compute it and write it there.

    Two processes may do this at once: each computes the same, and the file is written atomically. A file that is no
    JSON object counts as missing.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict):
        return found
    facts = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(json.dumps(facts).encode())
    return facts
