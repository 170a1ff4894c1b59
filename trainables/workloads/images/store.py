"""Decoded images on disk: one folder per data set, written once, read through memory maps.

Shapes: N images of a split; pixels (N, C=3, T, T) uint8; labels (N,) int64; moments (N, 2, C) int64 of the training
images. Each is one .npy file; ``meta.json`` holds the rest. A folder is written under a temporary name and then
renamed, so that a folder with the final name is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from trainables.runtime.processors import processors
from trainables.workloads.images.decoding import CHUNK_IMAGES, Layout, decode_rows
from trainables.workloads.images.pixel_stats import image_moments
from trainables.workloads.images.progress import Progress
from trainables.workloads.images.source import Encoded, ImageSplit

META_FILE = "meta.json"
#: Most decoding threads; Pillow releases the interpreter lock.
MOST_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class Store:
    """A data set's decoded images."""

    layout: Layout
    """S and T."""
    class_names: list[str] | None
    """Names by class number, if the source has them."""
    pixels: dict[str, NDArray[np.uint8]]
    """Pixels (N, 3, T, T) by split, memory-mapped."""
    labels: dict[str, NDArray[np.int64]]
    """Labels (N,) by split."""
    moments: NDArray[np.int64]
    """Moments (N, 2, 3) of the training images."""


def store_bytes(splits: Mapping[str, ImageSplit], layout: Layout) -> int:
    """Return the bytes that the pixels of all splits take."""
    return sum(len(split) for split in splits.values()) * layout.image_bytes


def decoding_threads() -> int:
    """Return the number of decoding threads: one per processor that this process may use, at most `MOST_THREADS`."""
    return min(MOST_THREADS, processors())


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at this path; other processes and threads wait for it.

    Raises:
        OSError: the lock file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("images: waiting for another process that decodes the same data", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, and so does the end of the process


def read_store(folder: Path) -> Store | None:
    """Return the store in a folder; None if there is no complete one."""
    try:
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        layout = Layout(
            image_size=int(meta["image_size"]), as_they_are=bool(meta["as_they_are"]), note=str(meta["note"])
        )
        counts = {str(split): int(count) for split, count in meta["images"].items()}
        side = layout.stored_size
        pixels = {split: _mapped(folder / f"{split}.npy", (count, 3, side, side)) for split, count in counts.items()}
        labels = {split: np.load(folder / f"{split}-labels.npy") for split in counts}
        moments = np.load(folder / "train-moments.npy")
        if any(labels[split].shape != (count,) for split, count in counts.items()):
            return None
        if moments.shape != (counts["train"], 2, 3):
            return None
        names = meta["class_names"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None
    return Store(layout=layout, class_names=names, pixels=pixels, labels=labels, moments=moments)


def _mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = np.load(path, mmap_mode="r")  # ValueError for a file that is too short
    if array.shape != shape or array.dtype != np.uint8:
        raise ValueError(f"{path} holds {array.dtype} {array.shape}")
    return array


def write_store(folder: Path, splits: Mapping[str, ImageSplit], layout: Layout, class_names: list[str] | None) -> None:
    """Decode all images into a folder, replacing its content; the caller must hold the folder's lock.

    Raises:
        UserError: an image that cannot be read; nothing is left behind.
        OSError: for example a full disk; nothing is left behind.
    """
    beside = folder.with_name(f"{folder.name}.partial")
    for old in (beside, folder):  # left by a process that ended while it wrote
        shutil.rmtree(old, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        with Progress(sum(len(split) for split in splits.values()), "decoding images") as progress:
            for name, split in splits.items():
                moments = _write_pixels(beside / f"{name}.npy", split, layout, progress)
                _save(beside / f"{name}-labels.npy", split.labels)
                if name == "train":
                    _save(beside / "train-moments.npy", moments)
        meta = {
            "image_size": layout.image_size,
            "as_they_are": layout.as_they_are,
            "note": layout.note,
            "class_names": class_names,
            "images": {name: len(split) for name, split in splits.items()},
        }
        with (beside / META_FILE).open("wb") as file:
            file.write(json.dumps(meta).encode())
            _to_disk(file)
        os.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write_pixels(path: Path, split: ImageSplit, layout: Layout, progress: Progress) -> NDArray[np.int64]:
    """Write pixels (N, 3, T, T) and return their moments.

    Writes to a file instead of a memory map, so that a full disk is an error and not a signal.
    """
    side = layout.stored_size
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(split), 3, side, side)}
    moments = []
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for pixels, sums in _decoded(split, layout):
            file.write(pixels.data)
            moments.append(sums)
            progress.advance(len(pixels))
        _to_disk(file)
    return np.concatenate(moments)


def _decoded(split: ImageSplit, layout: Layout) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield pixels and moments, chunk by chunk in order; only a few chunks are in memory."""

    def work(first: int, chunk: list[Encoded]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        pixels = decode_rows(split, range(first, first + len(chunk)), chunk, layout)
        return pixels, image_moments(pixels)

    threads = decoding_threads()
    under_way: deque[Future[tuple[NDArray[np.uint8], NDArray[np.int64]]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for first, chunk in split.chunks(CHUNK_IMAGES):
            under_way.append(pool.submit(work, first, chunk))
            if len(under_way) > 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def _save(path: Path, array: NDArray[np.int64]) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)
        _to_disk(file)


def _to_disk(file: BinaryIO) -> None:
    # Otherwise the renamed folder could survive a power cut without its content.
    file.flush()
    os.fsync(file.fileno())
