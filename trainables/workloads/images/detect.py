"""Detects the kind of image data at a path."""

from __future__ import annotations

from pathlib import Path

from trainables.errors import UserError
from trainables.workloads.images.folder import find_folder
from trainables.workloads.images.parquet import find_parquet
from trainables.workloads.images.source import Source


def find_source(data: str) -> Source:
    """Find the image source at a path: a Parquet file, a folder of Parquet files, or folders of images by class.

    Raises:
        UserError: the path does not exist or holds none of them.
    """
    root = Path(data).expanduser()
    if not root.exists():
        raise UserError(f"image data must be a Parquet file or a folder, and {str(root)!r} does not exist")
    source = find_parquet(root) or (find_folder(root) if root.is_dir() else None)
    if source is None:
        raise UserError(
            f"{root} holds neither Parquet files (train-*.parquet) nor folders of images by class "
            "(train/CLASS/*.jpg or CLASS/*.jpg)"
        )
    return source
