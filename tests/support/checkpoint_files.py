"""Contents of checkpoints, and the files in which a store keeps them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

LARGE = 10**9


def content(stage: str, step: int, size: int) -> bytes:
    """The state of a stage at a step: the same in every process, so that any reader can check it."""
    return random.Random(f"{stage} {step}").randbytes(size)


def stored(root: Path) -> list[Path]:
    """Files of checkpoints, by name."""
    return sorted(path for path in (root / "checkpoints").rglob("*") if path.is_file())


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in stored(root))


def file_of(root: Path, data: bytes) -> Path:
    """The file with this content."""
    (found,) = (root / "checkpoints").rglob(f"*.{hashlib.sha256(data).hexdigest()}")
    return found
