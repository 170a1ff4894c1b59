"""Small image data sets on disk, in the layouts that the workload ``images`` reads.

Shapes: pixels (N, H, W, 3) uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def noise(count: int, height: int, width: int | None = None, seed: int = 0) -> np.ndarray:
    """Pixels that no two images share."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width or height, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    """One image (H, W, 3) as a file's bytes."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_parquet(
    path: Path,
    images: Sequence[Any],
    labels: Sequence[Any],
    *,
    image: str = "img",
    label: str = "label",
    group_rows: int | None = None,
) -> Path:
    """A file as Hugging Face writes it; images are pixels, bytes, or {"bytes": ..., "path": ...}."""
    rows = []
    for content in images:
        content = encoded(content) if isinstance(content, np.ndarray) else content
        rows.append(content if isinstance(content, dict) else {"bytes": content, "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(rows, kind), label: pa.array(labels)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group_rows)
    return path


def write_folder(root: Path, pixels: Sequence[np.ndarray], classes: Sequence[str]) -> Path:
    """PNG files root/CLASS/NUMBER.png."""
    for number, (content, name) in enumerate(zip(pixels, classes, strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / f"{number:04}.png").write_bytes(encoded(content))
    return root
