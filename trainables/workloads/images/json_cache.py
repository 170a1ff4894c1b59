"""Small facts that are dear to compute, kept as JSON files."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def remembered(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file says, or else what ``compute`` gives, which is then kept there.

    Two processes may do this at once: each computes the same, and a file is there as a whole or not at all. A file
    that is no JSON object counts as none.
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
