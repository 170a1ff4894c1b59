"""Opens image data at a path as images and labels in memory maps, decoded at first use.

Shapes: N images of a split; pixels (N, C=3, T, T) uint8; labels (N,) int64.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.workload_options import CACHE_VARIABLE
from trainables.workloads.images.decoding import Layout, choose_layout, decode_rows
from trainables.workloads.images.detect import find_source
from trainables.workloads.images.digest import content_digest
from trainables.workloads.images.json_cache import cached_json
from trainables.workloads.images.pixel_stats import image_moments, mean_and_deviation, statistics_indices
from trainables.workloads.images.source import ImageSplit, Source
from trainables.workloads.images.store import decoding_threads, locked, read_store, store_bytes, write_store

#: Part of every cache key: increase it when the pixels or files of a store change.
FORMAT = 2
#: Disk space that a store leaves free, in bytes.
SPARE_BYTES = 10**9
#: Images that a thread decodes at a time where nothing is stored.
PIECE_IMAGES = 8


def default_cache() -> Path:
    """Return the default folder for decoded images: the search's, or else this user's in the temporary folder."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    return Path(tempfile.gettempdir()) / f"tune_cac-images-{os.getuid()}"


class Pixels(Protocol):
    """Pixels of one split."""

    def take(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the pixels (B, 3, T, T) of these images, in this order."""


class StoredPixels:
    """Pixels from a memory map (N, 3, T, T)."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array

    def take(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return a copy of the pixels (B, 3, T, T) of these images."""
        return np.asarray(np.take(self._array, indices, axis=0))


class DecodedPixels:
    """Pixels that are decoded at every request."""

    def __init__(self, split: ImageSplit, layout: Layout) -> None:
        self._split, self._layout = split, layout

    def take(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Decode the pixels (B, 3, T, T) of these images.

        Raises:
            UserError: an image that cannot be decoded.
        """
        numbers = [int(index) for index in indices]
        encoded = self._split.encoded(numbers)
        pieces = [slice(at, at + PIECE_IMAGES) for at in range(0, len(numbers), PIECE_IMAGES)]

        def work(piece: slice) -> NDArray[np.uint8]:
            return decode_rows(self._split, numbers[piece], encoded[piece], self._layout)

        with ThreadPoolExecutor(decoding_threads()) as pool:
            return np.concatenate(list(pool.map(work, pieces)))


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """A data set, ready to draw batches from."""

    source: Source
    """Its files."""
    digest: str
    """The `content_digest` of these files."""
    layout: Layout
    """S and T."""
    class_names: list[str] | None
    """Names by class number, if the source has them."""
    pixels: Mapping[str, Pixels]
    """Pixels by split."""
    labels: Mapping[str, NDArray[np.int64]]
    """Labels (N,) by split."""
    moments: NDArray[np.int64] | None
    """Moments (N, 2, 3) of the training images; None where nothing is stored."""
    memory: Path
    """Common beginning of the paths of files that cache facts about this data."""

    def statistics(self, indices: NDArray[np.int64]) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of each channel over these training images, in 0..255.

        Exact up to `pixel_stats.STATISTICS_IMAGES` images, else over that many of them.
        """
        chosen = statistics_indices(indices)
        image_pixels = self.layout.stored_size**2
        if self.moments is not None:
            return mean_and_deviation(self.moments[chosen], image_pixels)

        def compute() -> dict[str, list[float]]:
            parts = [chosen[at : at + 256] for at in range(0, len(chosen), 256)]
            moments = np.concatenate([image_moments(self.pixels["train"].take(part)) for part in parts])
            mean, deviation = mean_and_deviation(moments, image_pixels)
            return {"mean": mean, "deviation": deviation}

        name = hashlib.sha256(chosen.tobytes()).hexdigest()[:16]
        facts = cached_json(self.memory.with_name(f"{self.memory.name}-statistics-{name}.json"), compute)
        return facts["mean"], facts["deviation"]

    def place(self, split: str, index: int) -> str:
        """Return the location of an image, for messages."""
        return self.source.open()[split].place(index)


def open_images(data: str, *, cache: Path, cache_limit_bytes: float, image_size: int | None) -> ImageData:
    """Open the images at a path; decode them into ``cache`` if that was not done before.

    Where decoded images would take more than ``cache_limit_bytes``, or leave less than 1 GB of the disk free, they are
    decoded for each batch instead, with a warning: the same pixels, slower. Resized images also cause a warning.

    Args:
        data: a Parquet file or a folder, see `detect.find_source`.
        cache: a folder, created if needed; several processes may use it at once.
        cache_limit_bytes: >= 0.
        image_size: S in pixels, or None, see `decoding.choose_layout`.

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
    made = partial(ImageData, source=source, digest=digest, memory=folder)
    store = read_store(folder)
    if store is None:
        with _cache_errors(cache), locked(cache / f"{key}.lock"):
            store = read_store(folder)  # another process may have written it meanwhile
            if store is None:
                splits, layout = _read_splits(source, folder, image_size)
                if not _fits(cache, store_bytes(splits, layout), cache_limit_bytes):
                    _say(layout)
                    return made(
                        layout=layout,
                        class_names=source.class_names(),
                        pixels={name: DecodedPixels(split, layout) for name, split in splits.items()},
                        labels={name: split.labels for name, split in splits.items()},
                        moments=None,
                    )
                write_store(folder, splits, layout, source.class_names())
                store = read_store(folder)
                if store is None:
                    raise UserError(f"the image cache in {folder} was written and cannot be read: use another folder")
    _say(store.layout)
    return made(
        layout=store.layout,
        class_names=store.class_names,
        pixels={name: StoredPixels(array) for name, array in store.pixels.items()},
        labels=store.labels,
        moments=store.moments,
    )


def _say(layout: Layout) -> None:
    if layout.note:
        warnings.warn(layout.note, stacklevel=3)


def _read_splits(source: Source, folder: Path, image_size: int | None) -> tuple[dict[str, ImageSplit], Layout]:
    splits = source.open()
    for name, split in splits.items():
        if not len(split):
            raise UserError(f"{source.root} must have images in every split, and {name} is empty")
    found = cached_json(
        folder.with_name(f"{folder.name}-layout.json"),
        lambda: vars(choose_layout(splits, image_size)),
    )
    return splits, Layout(**found)


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
