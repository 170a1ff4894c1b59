"""Opens image data at a path as images and labels in memory maps, decoded at first use.

Shapes: N images of a split; pixels (N, C=3, T, T) uint8; labels (N,) int64 in 0..K-1 for K classes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.workload_options import CACHE_VARIABLE
from trainables.workloads.images.source import ImageSplit, Source, cached_json, content_digest, find_source
from trainables.workloads.images.store import (
    Layout,
    choose_layout,
    decode_rows,
    decoding_threads,
    image_moments,
    locked,
    mean_and_deviation,
    read_store,
    statistics_indices,
    write_store,
)

#: Part of every cache key: increase it when the pixels or files of a store change.
FORMAT = 2
#: Disk space that a store leaves free, in bytes.
SPARE_BYTES = 10**9
#: Images that a thread decodes at a time where nothing is stored.
PIECE_IMAGES = 8
#: Seed of the choice of validation images; not a hyperparameter, so that every study has the same split.
SPLIT_SEED = 0

#: From numbers of images (B,) to their pixels (B, 3, T, T).
TakePixels = Callable[[NDArray[np.int64]], NDArray[np.uint8]]


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
    pixels: Mapping[str, TakePixels]
    """Takes pixels of each split."""
    labels: Mapping[str, NDArray[np.int64]]
    """Labels (N,) by split."""
    moments: NDArray[np.int64] | None
    """Moments (N, 2, 3) of the training images; None where nothing is stored."""
    memory: Path
    """Common beginning of the paths of files that cache facts about this data."""

    def statistics(self, indices: NDArray[np.int64]) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of each channel over these training images, in 0..255.

        Exact up to `store.STATISTICS_IMAGES` images, else over that many of them.
        """
        chosen = statistics_indices(indices)
        image_pixels = self.layout.stored_size**2
        if self.moments is not None:
            return mean_and_deviation(self.moments[chosen], image_pixels)

        def compute() -> dict[str, list[float]]:
            parts = [chosen[at : at + 256] for at in range(0, len(chosen), 256)]
            moments = np.concatenate([image_moments(self.pixels["train"](part)) for part in parts])
            mean, deviation = mean_and_deviation(moments, image_pixels)
            return {"mean": mean, "deviation": deviation}

        name = hashlib.sha256(chosen.tobytes()).hexdigest()[:16]
        facts = cached_json(self.memory.with_name(f"{self.memory.name}-statistics-{name}.json"), compute)
        return facts["mean"], facts["deviation"]


def open_images(data: str, *, cache: Path, cache_limit_bytes: float, image_size: int | None) -> ImageData:
    """Open the images at a path; decode them into ``cache`` if that was not done before.

    Where decoded images would take more than ``cache_limit_bytes``, or leave less than 1 GB of the disk free, they are
    decoded for each batch instead, with a warning: the same pixels, slower. Resized images also cause a warning.

    Args:
        data: a Parquet file or a folder, see `source.find_source`.
        cache: a folder, created if needed; several processes may use it at once.
        cache_limit_bytes: >= 0.
        image_size: S in pixels, or None, see `store.choose_layout`.

    Raises:
        UserError: data that cannot be read, an empty split, or a folder that cannot be written.
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
                splits, layout = _read_splits(source, folder, image_size)
                if _fits(cache, 3 * layout.stored_size**2 * sum(map(len, splits.values())), cache_limit_bytes):
                    write_store(folder, splits, layout, source.class_names())
                    store = read_store(folder)
                else:
                    store = {
                        "layout": layout,
                        "class_names": source.class_names(),
                        "pixels": {name: partial(_decoded, split, layout) for name, split in splits.items()},
                        "labels": {name: split.labels for name, split in splits.items()},
                        "moments": None,
                    }
                if store is None:
                    raise UserError(f"the image cache in {folder} was written and cannot be read: use another folder")
    if store["layout"].note:
        warnings.warn(store["layout"].note, stacklevel=2)
    return ImageData(source=source, digest=digest, memory=folder, **store)


def _decoded(split: ImageSplit, layout: Layout, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
    numbers = [int(index) for index in indices]
    encoded = split.encoded(numbers)
    pieces = [slice(at, at + PIECE_IMAGES) for at in range(0, len(numbers), PIECE_IMAGES)]

    def decoded(piece: slice) -> NDArray[np.uint8]:
        return decode_rows(split, numbers[piece], encoded[piece], layout)

    with ThreadPoolExecutor(decoding_threads()) as pool:
        return np.concatenate(list(pool.map(decoded, pieces)))


def _read_splits(source: Source, folder: Path, image_size: int | None) -> tuple[dict[str, ImageSplit], Layout]:
    splits = source.open()
    for name, split in splits.items():
        if not len(split):
            raise UserError(f"{source.root} must have images in every split, and {name} is empty")
    facts = folder.with_name(f"{folder.name}-layout.json")
    return splits, Layout(**cached_json(facts, lambda: asdict(choose_layout(splits, image_size))))


def _fits(cache: Path, needed_bytes: int, limit_bytes: float) -> bool:
    free_bytes = shutil.disk_usage(cache).free
    if needed_bytes <= limit_bytes and needed_bytes + SPARE_BYTES <= free_bytes:
        return True
    why = (
        f"the limit is {limit_bytes / 1e9:.3g} GB (cache_limit_gb)"
        if needed_bytes > limit_bytes
        else f"the disk of {cache} has {free_bytes / 1e9:.3g} GB free (cache=FOLDER names another)"
    )
    warnings.warn(
        f"images are decoded anew for each batch, which is slow: decoded they take {needed_bytes / 1e9:.3g} GB, {why}",
        stacklevel=2,
    )
    return False


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
