"""Contents of checkpoints, and the files that a store keeps of them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

LARGE = 10**9


def content(stage: str, step: int, size: int) -> bytes:
    """The state of a stage at a step: the same in every process, so that any reader can check it."""
    return random.Random(f"{stage} {step}").randbytes(size)


def object_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "objects").rglob("*") if path.is_file())


def object_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in object_files(root))


def object_of(root: Path, data: bytes) -> Path:
    digest = hashlib.sha256(data).hexdigest()
    return root / "objects" / digest[:2] / digest
