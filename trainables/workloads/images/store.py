"""Decoded images on disk: one folder per data set, written at first use, read through memory maps.

Shapes: N images of a split; an image is (C=3, T, T) uint8 in the order red, green, blue, T the stored side; pixels
(N, 3, T, T); labels (N,) int64. Inputs of the model have the side S <= T (``image_size``). Each array is one .npy
file; ``meta.json`` holds the rest. A folder is written under a temporary name and then renamed, so that one with the
final name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tqdm import tqdm

from trainables.errors import UserError
from trainables.runtime.processors import processors
from trainables.workload_options import CACHE_VARIABLE
from trainables.workloads.images.source import Encoded, ImageSplit, Source, find_source

#: Part of every folder's name: increase it when the pixels or files of a store change.
FORMAT = 4
#: Disk space that a store leaves free, in bytes.
SPARE_BYTES = 10**9

#: Progress is shown after this time, then at these intervals.
QUIET_S, INTERVAL_S = 2.0, 10.0
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

    @property
    def stored_size(self) -> int:
        """Return T, the width and height of a stored image, in pixels."""
        return self.image_size if self.as_they_are else round(self.image_size * STORED_SHARE)


def choose_layout(splits: Mapping[str, ImageSplit], image_size: int | None) -> Layout:
    """Choose a layout without resizing if more than half of the images are squares of one side up to `SMALL_SIDE`.

    Args:
        splits: `CHUNK_IMAGES` images of each are looked at.
        image_size: S, or None for the images' own side, or else `LARGE_IMAGE_SIZE`.

    Raises:
        UserError: an image whose size cannot be read.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    for split in splits.values():
        for number, encoded in enumerate(next(split.chunks(CHUNK_IMAGES))[1]):
            with _blamed(split, number), Image.open(_file(encoded)) as image:
                sizes[image.size] += 1
    [((width, height), count)] = sizes.most_common(1)
    small = 2 * count > sizes.total() and width == height <= SMALL_SIDE and image_size in (None, width)
    return Layout(image_size=image_size or (width if small else LARGE_IMAGE_SIZE), as_they_are=small)


def _decoded_chunk(split: ImageSplit, first: int, encoded: Sequence[Encoded], layout: Layout) -> NDArray[np.uint8]:
    """Decode successive images of a split, from number ``first`` on, to pixels (B, 3, T, T).

    An image of another size is its central square, resized (bilinear over all source pixels of a target pixel, also
    called antialias).

    Raises:
        UserError: an image that cannot be decoded, with its place.
    """
    side = layout.stored_size
    pixels = np.empty((len(encoded), 3, side, side), dtype=np.uint8)
    for row, content in enumerate(encoded):
        with _blamed(split, first + row):
            with Image.open(_file(content)) as image:
                square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
            pixels[row] = np.asarray(square).transpose(2, 0, 1)
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


# --- The folder -------------------------------------------------------------------------------------------------------


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
    """Of the files' names and contents."""
    layout: Layout
    """S and T."""
    pixels: Mapping[str, NDArray[np.uint8]]
    """Pixels (N, 3, T, T) by split, in memory maps."""
    labels: Mapping[str, NDArray[np.int64]]
    """Labels (N,) by split."""


def open_images(data: str, *, cache: Path, cache_limit_bytes: float, image_size: int | None) -> ImageData:
    """Open the images at a path; decode them into ``cache`` if that was not done before.

    Args:
        data: a Parquet file or a folder, see `source.find_source`.
        cache: a folder, created if needed; several processes may use it at once.
        cache_limit_bytes: >= 0.
        image_size: S in pixels, or None, see `choose_layout`.

    Raises:
        UserError: data that cannot be read, an empty split, a folder that cannot be written, or decoded images that
            would take more than ``cache_limit_bytes`` or leave less than 1 GB of the disk free.
    """
    source = find_source(data)
    key = hashlib.sha256(repr((FORMAT, source.digest(contents=False), image_size)).encode()).hexdigest()[:32]
    folder = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(cache / f"{key}.lock"):
            found = read_store(folder, source)
            if found is None:
                splits = source.open()
                for name, split in splits.items():
                    if not len(split):
                        raise UserError(f"{source.root} must have images in every split, and {name} is empty")
                layout = choose_layout(splits, image_size)
                _check_fits(cache, 3 * layout.stored_size**2 * sum(map(len, splits.values())), cache_limit_bytes)
                write_store(folder, source, splits, layout)
                found = read_store(folder, source)
    except OSError as error:
        raise UserError(f"the image cache must be a folder that can be written: {error} (cache={cache})") from error
    if found is None:
        raise UserError(f"the image cache in {folder} was written and cannot be read: use another folder")
    return found


def _check_fits(cache: Path, needed_bytes: int, limit_bytes: float) -> None:
    free_bytes = shutil.disk_usage(cache).free
    if needed_bytes > limit_bytes:
        why = f"cache_limit_gb must be at least that, got {limit_bytes / 1e9:.3g}"
    elif needed_bytes + SPARE_BYTES > free_bytes:
        why = f"the disk of {cache} has {free_bytes / 1e9:.3g} GB free: cache=FOLDER names another"
    else:
        return
    raise UserError(f"decoded the images take {needed_bytes / 1e9:.3g} GB; {why}; a smaller image_size=S takes less")


def read_store(folder: Path, source: Source) -> ImageData | None:
    """Return the data of a source from a folder; None if there is no complete store."""
    try:
        meta: dict[str, Any] = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        splits = meta.pop("splits")
        return ImageData(
            source=source,
            layout=Layout(**meta.pop("layout")),
            # ValueError for a file that is too short
            pixels={split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in splits},
            labels={split: np.load(folder / f"{split}-labels.npy") for split in splits},
            **meta,
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def write_store(folder: Path, source: Source, splits: Mapping[str, ImageSplit], layout: Layout) -> None:
    """Decode all images into a folder, replacing its content; the caller must hold the folder's lock.

    Raises:
        UserError: an image that cannot be read; nothing is left behind.
        OSError: for example a full disk; nothing is left behind.
    """
    beside = folder.with_name(f"{folder.name}.partial")
    for old in (beside, folder):  # left by a process that ended while it wrote
        shutil.rmtree(old, ignore_errors=True)
    beside.mkdir()
    try:
        count = sum(map(len, splits.values()))
        with tqdm(total=count, desc="decoding images", unit="", delay=QUIET_S, mininterval=INTERVAL_S) as progress:
            for name, split in splits.items():
                _write_pixels(beside / f"{name}.npy", split, layout, progress)
                with _written(beside / f"{name}-labels.npy") as file:
                    np.save(file, split.labels)
        meta = {"digest": source.digest(contents=True), "layout": asdict(layout), "splits": list(splits)}
        with _written(beside / META_FILE) as file:
            file.write(json.dumps(meta).encode())
        os.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _write_pixels(path: Path, split: ImageSplit, layout: Layout, progress: Any) -> None:
    """Write pixels (N, 3, T, T); to a file instead of a memory map, so that a full disk is an error and no signal."""
    side = layout.stored_size
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(split), 3, side, side)}
    with _written(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for pixels in _decoded(split, layout):
            file.write(pixels.data)
            progress.update(len(pixels))


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
