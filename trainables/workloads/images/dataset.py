"""Opens image data at a path as images and labels in memory maps, decoded at first use.

Shapes: N images of a split; pixels (N, C=3, T, T) uint8; labels (N,) int64 in 0..K-1 for K classes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.workload_options import CACHE_VARIABLE
from trainables.workloads.images.source import Source, content_digest, find_source
from trainables.workloads.images.store import (
    Layout,
    choose_layout,
    locked,
    mean_and_deviation,
    read_store,
    write_store,
)

#: Part of every cache key: increase it when the pixels or files of a store change.
FORMAT = 2
#: Disk space that a store leaves free, in bytes.
SPARE_BYTES = 10**9
#: Seed of the choice of validation images; not a hyperparameter, so that every study has the same split.
SPLIT_SEED = 0


def default_cache() -> Path:
    """Return the default folder for decoded images: the search's, or else this user's in the temporary folder."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    return Path(tempfile.gettempdir()) / f"tune_cac-images-{os.getuid()}"


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """A data set, ready to draw batches from."""

    source: Source
    digest: str
    """The `content_digest` of these files."""
    layout: Layout
    """S and T."""
    class_names: list[str] | None
    """Names by class number, if the source has them."""
    pixels: Mapping[str, NDArray[np.uint8]]
    """Pixels (N, 3, T, T) by split, in memory maps."""
    labels: Mapping[str, NDArray[np.int64]]
    """Labels (N,) by split."""
    moments: NDArray[np.int64]
    """Moments (N, 2, 3) of the training images."""

    def statistics(self, indices: NDArray[np.int64]) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of each channel over these training images, in 0..255."""
        return mean_and_deviation(self.moments[indices], self.layout.stored_size**2)


def open_images(data: str, *, cache: Path, cache_limit_bytes: float, image_size: int | None) -> ImageData:
    """Open the images at a path; decode them into ``cache`` if that was not done before.

    Warns where images are resized that were expected to stay as they are.

    Args:
        data: a Parquet file or a folder, see `source.find_source`.
        cache: a folder, created if needed; several processes may use it at once.
        cache_limit_bytes: >= 0.
        image_size: S in pixels, or None, see `store.choose_layout`.

    Raises:
        UserError: data that cannot be read, an empty split, a folder that cannot be written, or decoded images that
            would take more than ``cache_limit_bytes`` or leave less than 1 GB of the disk free.
    """
    source = find_source(data)
    with _cache_errors(cache):
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        digest = content_digest(source, cache)
    except OSError as error:
        raise UserError(f"the image data in {source.root} cannot be read: {error}") from error
    key = hashlib.sha256(repr((FORMAT, digest, image_size)).encode()).hexdigest()[:32]
    folder = cache / key
    store = read_store(folder)
    if store is None:
        with _cache_errors(cache), locked(cache / f"{key}.lock"):
            store = read_store(folder)  # another process may have written it meanwhile
            if store is None:
                splits = source.open()
                for name, split in splits.items():
                    if not len(split):
                        raise UserError(f"{source.root} must have images in every split, and {name} is empty")
                layout = choose_layout(splits, image_size)
                _check_fits(cache, 3 * layout.stored_size**2 * sum(map(len, splits.values())), cache_limit_bytes)
                write_store(folder, splits, layout, source.class_names())
                store = read_store(folder)
                if store is None:
                    raise UserError(f"the image cache in {folder} was written and cannot be read: use another folder")
    if store["layout"].note:
        warnings.warn(store["layout"].note, stacklevel=2)
    return ImageData(source=source, digest=digest, **store)


def _check_fits(cache: Path, needed_bytes: int, limit_bytes: float) -> None:
    free_bytes = shutil.disk_usage(cache).free
    if needed_bytes > limit_bytes:
        why = f"cache_limit_gb must be at least that, got {limit_bytes / 1e9:.3g}"
    elif needed_bytes + SPARE_BYTES > free_bytes:
        why = f"the disk of {cache} has {free_bytes / 1e9:.3g} GB free: cache=FOLDER names another"
    else:
        return
    raise UserError(f"decoded the images take {needed_bytes / 1e9:.3g} GB; {why}; a smaller image_size=S takes less")


@contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"the image cache must be a folder that can be written: {error} (cache={cache})") from error


# --- Number of classes, checks of labels, and the choice of validation images -----------------------------------------


def count_classes(data: ImageData, asked: int | None) -> int:
    """Return K: as requested, or the number of class names in the data, or else the greatest training label plus one.

    Raises:
        UserError: a label outside 0..K-1, a class without a training image, or K < 2.
    """
    train = data.labels["train"]
    count = asked or (len(data.class_names) if data.class_names else int(train.max()) + 1)
    for split, labels in data.labels.items():
        wrong = np.flatnonzero((labels < 0) | (labels >= count))
        if len(wrong):
            row = int(wrong[0])
            raise UserError(
                f"{data.source.open()[split].place(row)}: a label must be in 0..{count - 1} for {count} classes, got "
                f"{labels[row]}"
            )
    present = np.unique(train)
    if len(present) < count:
        without_gaps = len(present) == int(present[-1]) + 1
        missing = np.setdiff1d(np.arange(count), present)
        listed = ", ".join(str(label) for label in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise UserError(
            f"{data.source.root} has training images of {len(present)} classes, fewer than the model's {count} outputs "
            f"(none has label {listed}): "
            + (f"say classes={len(present)}" if without_gaps else "number the classes from 0 without gaps")
        )
    if count < 2:
        raise UserError(f"{data.source.root} must have images of at least 2 classes, it has 1")
    return count


def hold_out(labels: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split training images into training and validation images, class by class.

    Of each class with n >= 2 images, ``share`` * n are for validation (rounded, at least 1, at most n - 1), chosen by
    one permutation with a fixed seed.

    Args:
        labels: (N,).
        share: in (0, 1).

    Returns:
        Numbers of the training images and of the validation images, each ascending.

    Raises:
        UserError: no class has two images.
    """
    # RandomState is numpy's generator whose numbers never change from version to version (NEP 19).
    order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
    validates = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        if len(members) >= 2:
            validates[members[: min(max(1, round(share * len(members))), len(members) - 1)]] = True
    if not validates.any():
        raise UserError("the validation split is empty: no class has two training images, one of which could validate")
    return np.flatnonzero(~validates), np.flatnonzero(validates)
