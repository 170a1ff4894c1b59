"""JSON cache for expensive results."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    beside.write_text(json.dumps(facts), encoding="utf-8")
    os.replace(beside, path)
    return facts
