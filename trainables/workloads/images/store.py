"""Decoded images on disk: one folder per data set, written once, read through memory maps.

Shapes: N images of a split; an image is (C=3, T, T) uint8 in the order red, green, blue, T the stored side; pixels
(N, 3, T, T); labels (N,) int64; moments (N, 2, C) int64, sums of the pixels and of their squares, of the training
images. Inputs of the model have the side S <= T (``image_size``). Each array is one .npy file; ``meta.json`` holds the
rest. A folder is written under a temporary name and then renamed, so that one with the final name is complete.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from trainables.errors import UserError
from trainables.runtime.processors import processors
from trainables.workloads.images.source import Encoded, ImageSplit

#: Progress is shown after this time, then at these intervals on a terminal and elsewhere.
QUIET_S, TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 2.0, 0.5, 10.0
#: Square images of one size are stored unresized up to this side, in pixels.
SMALL_SIDE = 64
#: S of other images unless specified, in pixels.
LARGE_IMAGE_SIZE = 224
#: T / S of images that are resized: 256 / 224, as in the evaluation of He et al. 2016 (their section 3.4, after
#: Krizhevsky et al. 2012).
STORED_SHARE = 256 / 224
#: Images processed at a time.
CHUNK_IMAGES = 64
META_FILE = "meta.json"
#: Most decoding threads; Pillow releases the interpreter lock.
MOST_THREADS = 16


# --- Pixels of one size -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The stored form of images."""

    image_size: int
    """S: width and height of the model's inputs, in pixels."""
    as_they_are: bool
    """True if images are stored without resizing; then T = S, and the few of another size are resized to it."""
    note: str = ""
    """One sentence on changes to images that a user may not expect; empty for none."""

    @property
    def stored_size(self) -> int:
        """Return T, the width and height of a stored image, in pixels."""
        return self.image_size if self.as_they_are else round(self.image_size * STORED_SHARE)


def choose_layout(splits: Mapping[str, ImageSplit], image_size: int | None) -> Layout:
    """Choose a layout without resizing if more than half of the images are squares of one side up to `SMALL_SIDE`.

    Args:
        splits: read as far as needed: `CHUNK_IMAGES` of each, or all sizes if half of these are small.
        image_size: S, or None for the images' own side, or else `LARGE_IMAGE_SIZE`.

    Raises:
        UserError: an image whose size cannot be read.
    """
    sizes, places = _sizes(splits)
    squares = {size: count for size, count in sizes.items() if size[0] == size[1] <= SMALL_SIDE}
    common = max(squares, key=lambda size: squares[size], default=(0, 0))
    others = sizes.total() - sizes[common]
    if sizes[common] > others and image_size in (None, common[0]):
        side = common[0]
        note = ""
        if others:
            odd = next(size for size in sizes if size != common)
            note = (
                f"{others} of {sizes.total()} images are not {side}x{side} as the others ({places[odd]} is "
                f"{odd[0]}x{odd[1]}): their shorter side is brought to {side} and the square in the middle is kept; "
                "image_size=S chooses a size for all"
            )
        return Layout(image_size=side, as_they_are=True, note=note)
    longest = max(map(max, sizes), default=LARGE_IMAGE_SIZE)
    if image_size is not None or longest > SMALL_SIDE:
        return Layout(image_size=image_size or LARGE_IMAGE_SIZE, as_they_are=False)
    note = (
        f"the images are at most {longest} pixels long, of no common square size, and are enlarged to "
        f"{LARGE_IMAGE_SIZE}x{LARGE_IMAGE_SIZE}: image_size={min(map(min, sizes))} keeps them small"
    )
    return Layout(image_size=LARGE_IMAGE_SIZE, as_they_are=False, note=note)


def _sizes(splits: Mapping[str, ImageSplit]) -> tuple[Counter[tuple[int, int]], dict[tuple[int, int], str]]:
    """Count the images of each width and height, in the order in which they occur, and record the first one's place.

    Stops early where most images are large, which is sufficient to know.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[int, int], str] = {}
    for split in splits.values():
        for start, chunk in split.chunks(CHUNK_IMAGES):
            for number, encoded in enumerate(chunk, start=start):
                with _blamed(split, number), Image.open(_file(encoded)) as image:
                    size = image.size
                sizes[size] += 1
                places.setdefault(size, split.place(number))
            if 2 * sum(count for size, count in sizes.items() if max(size) > SMALL_SIDE) > sizes.total():
                return sizes, places
    return sizes, places


def _decoded_chunk(split: ImageSplit, first: int, encoded: Sequence[Encoded], layout: Layout) -> NDArray[np.uint8]:
    """Decode successive images of a split, from number ``first`` on, to pixels (B, 3, T, T).

    If an image is resized, its shorter side becomes T (bilinear over all source pixels of a target pixel, also called
    antialias), and the central square is kept.

    Raises:
        UserError: an image that cannot be decoded, with its place.
    """
    side = layout.stored_size
    pixels = np.empty((len(encoded), 3, side, side), dtype=np.uint8)
    for row, content in enumerate(encoded):
        with _blamed(split, first + row):
            with Image.open(_file(content)) as image:
                rgb = image.convert("RGB")
            if rgb.size != (side, side) or not layout.as_they_are:
                shorter = min(rgb.size)
                width, height = (max(side, round(length * side / shorter)) for length in rgb.size)
                left, top = (width - side) // 2, (height - side) // 2
                rgb = rgb.resize((width, height), Image.Resampling.BILINEAR)
                rgb = rgb.crop((left, top, left + side, top + side))
            pixels[row] = np.asarray(rgb).transpose(2, 0, 1)
    return pixels


def _file(encoded: Encoded) -> BytesIO | str:
    return BytesIO(encoded) if isinstance(encoded, bytes) else str(encoded)


@contextmanager
def _blamed(split: ImageSplit, index: int) -> Iterator[None]:
    """Convert what Pillow raises into a UserError of one line with the image's place."""
    try:
        yield
    except MemoryError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{split.place(index)}: the image file is gone") from error
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        said = (str(error).splitlines() or [""])[0] or type(error).__name__
        said = "no image format that Pillow knows" if isinstance(error, Image.UnidentifiedImageError) else said
        raise UserError(
            f"{split.place(index)}: the image cannot be decoded ({said}): replace it or leave it out"
        ) from error


# --- Exact mean and standard deviation of pixels, for any subset of images --------------------------------------------


def image_moments(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Compute moments (N, 2, C) of pixels (N, C, T, T)."""
    flat = pixels.reshape(*pixels.shape[:2], -1)
    squares = np.square(flat, dtype=np.uint16)  # 255 squared fits
    return np.stack([flat.sum(axis=2, dtype=np.int64), squares.sum(axis=2, dtype=np.int64)], axis=1)


def mean_and_deviation(moments: NDArray[np.int64], image_pixels: int) -> tuple[list[float], list[float]]:
    """Return mean and (population) standard deviation of each channel, in 0..255.

    Args:
        moments: (N, 2, C), N >= 1.
        image_pixels: T * T.
    """
    count = len(moments) * image_pixels
    sums = moments.sum(axis=0).T.tolist()
    # In integers: no cancellation. A constant channel gets deviation 1, so it is only shifted.
    deviations = [math.sqrt(count * squares - total * total) / count or 1.0 for total, squares in sums]
    return [total / count for total, _ in sums], deviations


# --- The folder -------------------------------------------------------------------------------------------------------


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


def read_store(folder: Path) -> dict[str, Any] | None:
    """Return what is stored in a folder, fields of `dataset.ImageData`; None if there is no complete store."""
    try:
        meta: dict[str, Any] = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        counts, names = meta.pop("images"), meta.pop("class_names")
        layout = Layout(**meta)
        sides = (3, layout.stored_size, layout.stored_size)
        # ValueError for a file that is too short
        pixels = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in counts}
        labels = {split: np.load(folder / f"{split}-labels.npy") for split in counts}
        moments = np.load(folder / "train-moments.npy")
        shapes = [moments.shape == (counts["train"], 2, 3)]
        for split, count in counts.items():
            shapes += [pixels[split].shape == (count, *sides), labels[split].shape == (count,)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None
    if not all(shapes) or any(array.dtype != np.uint8 for array in pixels.values()):
        return None
    return {"layout": layout, "class_names": names, "pixels": pixels, "labels": labels, "moments": moments}


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
    counts = {name: len(split) for name, split in splits.items()}
    every_s = TERMINAL_INTERVAL_S if sys.stderr.isatty() else LOG_INTERVAL_S
    try:
        with tqdm(
            total=sum(counts.values()), desc="decoding images", unit="", delay=QUIET_S, mininterval=every_s
        ) as progress:
            for name, split in splits.items():
                moments = _write_pixels(beside / f"{name}.npy", split, layout, progress)
                with _written(beside / f"{name}-labels.npy") as file:
                    np.save(file, split.labels)
                if name == "train":
                    with _written(beside / "train-moments.npy") as file:
                        np.save(file, moments)
        meta = {**asdict(layout), "class_names": class_names, "images": counts}
        with _written(beside / META_FILE) as file:
            file.write(json.dumps(meta).encode())
        os.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write_pixels(path: Path, split: ImageSplit, layout: Layout, progress: Any) -> NDArray[np.int64]:
    """Write pixels (N, 3, T, T) and return their moments.

    Writes to a file instead of a memory map, so that a full disk is an error and not a signal.
    """
    side = layout.stored_size
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(split), 3, side, side)}
    moments = []
    with _written(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for pixels in _decoded(split, layout):
            file.write(pixels.data)
            moments.append(image_moments(pixels))
            progress.update(len(pixels))
    return np.concatenate(moments)


def _decoded(split: ImageSplit, layout: Layout) -> Iterator[NDArray[np.uint8]]:
    """Yield pixels, chunk by chunk in order; only a few chunks are in memory."""
    threads = min(MOST_THREADS, processors())
    under_way: deque[Future[NDArray[np.uint8]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for first, chunk in split.chunks(CHUNK_IMAGES):
            under_way.append(pool.submit(_decoded_chunk, split, first, chunk, layout))
            if len(under_way) > 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Write a file to the disk: else the renamed folder could survive a power cut without its content."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
