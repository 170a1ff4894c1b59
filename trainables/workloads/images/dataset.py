"""Opens image data at a path as images and labels in memory maps, decoded at first use.

Shapes: N images of a split; pixels (N, C=3, T, T) uint8; labels (N,) int64.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.workload_options import CACHE_VARIABLE
from trainables.workloads.images.source import SPLIT_NAMES, Encoded, ImageSplit, Source, cached_json, content_digest
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
    store_bytes,
    write_store,
)

# --- Image-classification data in Parquet, in the layout of Hugging Face `datasets` -----------------------------------
# A row is an image (``img`` or ``image``: a struct with ``bytes`` and optionally ``path``) and a class number. Names of
# the classes are in the schema's metadata under ``huggingface`` (the feature type ClassLabel).
# Rows and row groups are counted from 0.

#: Accepted column names; the first that exists is used.
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "fine_label")
#: Most bytes of encoded images of row groups that are kept in memory for reading single rows.
KEPT_BYTES = 256 * 10**6


def find_parquet(root: Path) -> Source | None:
    """Find the Parquet files of a path, by split; return None if there are none.

    Raises:
        UserError: Parquet files that belong to no split, or none for training.
    """
    if root.is_file():
        return ParquetSource(root, {"train": [root]})
    for folder in (root, root / "data"):
        found = {split: _of_split(folder, names) for split, names in SPLIT_NAMES.items()}
        if found["train"]:
            return ParquetSource(root, {split: paths for split, paths in found.items() if paths})
        others = sorted(path.name for path in folder.glob("*.parquet"))
        if others:
            raise UserError(f"{folder} needs Parquet files named train-*.parquet for training, got {', '.join(others)}")
    return None


def _of_split(folder: Path, names: tuple[str, ...]) -> list[Path]:
    for name in names:
        for pattern in (f"{name}-*.parquet", f"{name}.parquet", f"{name}/*.parquet"):
            paths = sorted(folder.glob(pattern))
            if paths:
                return paths
    return []


class ParquetSource(Source):
    """Parquet files by split."""

    def __init__(self, root: Path, files: dict[str, list[Path]]) -> None:
        self.root, self.files = root, files

    def open(self) -> dict[str, ImageSplit]:
        # Columns may differ in order from file to file, but their names are those of the first.
        names = _columns(self.files["train"][0], IMAGE_COLUMNS, LABEL_COLUMNS)
        splits: dict[str, ImageSplit] = {}
        for split, paths in self.files.items():
            opened = ParquetSplit(paths, *names)
            if split == "test" and len(opened) and bool(np.all(opened.labels == -1)):
                continue  # Hugging Face writes -1 where the labels are not public: no usable test split
            splits[split] = opened
        return splits

    def class_names(self) -> list[str] | None:
        path = self.files["train"][0]
        _, label = _columns(path, IMAGE_COLUMNS, LABEL_COLUMNS)
        with _opened(path) as file:
            return _class_names(file.schema_arrow.metadata or {}, label)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One file of a split."""

    path: Path
    """The file."""
    first: int
    """Number of its first row in the split."""
    group_starts: tuple[int, ...]
    """First row of each row group, in the file."""


class ParquetSplit(ImageSplit):
    """The rows of Parquet files, one file after the other.

    Raises:
        UserError: a file that cannot be read, a missing column, a column of another type, a label that is null.
    """

    def __init__(self, paths: Sequence[Path], image_column: str, label_column: str) -> None:
        self._image_column = image_column
        self._parts: list[_Part] = []
        self._kept: OrderedDict[tuple[int, int], list[Encoded | None]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        labels, first = [np.empty(0, dtype=np.int64)], 0
        for path in paths:
            _columns(path, (image_column,), (label_column,))
            with _opened(path) as file:
                _check_image_type(path, image_column, file.schema_arrow.field(image_column).type)
                labels.append(_read_labels(path, file, label_column))
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            starts = tuple(int(start) for start in np.cumsum([0, *sizes])[:-1])
            self._parts.append(_Part(path=path, first=first, group_starts=starts))
            first += sum(sizes)
        self.labels = np.concatenate(labels)
        self._firsts = [part.first for part in self._parts]

    def _find(self, index: int) -> tuple[int, int]:
        """Return the number of the file and the row in it; never a file without rows."""
        number = bisect_right(self._firsts, index) - 1
        return number, index - self._firsts[number]

    def place(self, index: int) -> str:
        number, row = self._find(index)
        return f"{self._parts[number].path}, row {row} (from 0)"

    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        for part in self._parts:
            first = part.first
            with _opened(part.path) as file:
                for batch in file.iter_batches(batch_size=size, columns=[self._image_column]):
                    images = _encoded_images(part.path, batch.column(0))
                    yield first, [self._present(first + i, image) for i, image in enumerate(images)]
                    first += len(images)

    def encoded(self, indices: Sequence[int]) -> list[Encoded]:
        with self._lock:  # batches for training and for evaluation may be read at the same time
            found = {}
            # Row group by row group, so that each is read once for a batch.
            for index in sorted(indices):
                number, row = self._find(index)
                group = bisect_right(self._parts[number].group_starts, row) - 1
                images = self._row_group(number, group)
                found[index] = self._present(index, images[row - self._parts[number].group_starts[group]])
        return [found[index] for index in indices]

    def _present(self, index: int, image: Encoded | None) -> Encoded:
        if image is None:
            raise UserError(
                f"{self.place(index)}: an image must have bytes or a path, and {self._image_column} has neither"
            )
        if isinstance(image, Path) and not image.exists():
            raise UserError(f"{self.place(index)}: the image has no bytes, and its path {str(image)!r} does not exist")
        return image

    def _row_group(self, number: int, group: int) -> list[Encoded | None]:
        key = (number, group)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        path = self._parts[number].path
        with _opened(path) as file:
            column = file.read_row_group(group, columns=[self._image_column]).column(0).combine_chunks()
        images = _encoded_images(path, column)
        self._kept[key] = images
        self._kept_bytes += _bytes(images)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _bytes(self._kept.popitem(last=False)[1])
        return images


def _bytes(images: list[Encoded | None]) -> int:
    return sum(len(image) for image in images if isinstance(image, bytes))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a Parquet file that can be read: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _columns(path: Path, *choices: tuple[str, ...]) -> tuple[str, ...]:
    """Return, for each choice of names, the first that is a column of the file."""
    with _opened(path) as file:
        there = list(file.schema_arrow.names)
    found = []
    for names in choices:
        present = [name for name in names if name in there]
        if not present:
            raise UserError(f"{path} needs a column {' or '.join(names)}; its columns are {', '.join(there) or 'none'}")
        found.append(present[0])
    return tuple(found)


def _check_image_type(path: Path, column: str, kind: Any) -> None:
    fields = {kind.field(i).name for i in range(kind.num_fields)} if pa.types.is_struct(kind) else set()
    if not fields & {"bytes", "path"} and not _is_binary(kind):
        raise UserError(f"column {column} of {path} must be a struct with bytes or a path, or binary, got {kind}")


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _encoded_images(path: Path, column: Any) -> list[Encoded | None]:
    """Return the bytes of each row, or else its path (relative to the Parquet file's folder), or else None."""
    if _is_binary(column.type):
        return list(column.to_pylist())
    fields = {column.type.field(i).name for i in range(column.type.num_fields)}
    contents, paths = (
        pc.struct_field(column, name).to_pylist() if name in fields else [None] * len(column)
        for name in ("bytes", "path")
    )
    return [
        content if content is not None else path.parent / name if name else None
        for content, name in zip(contents, paths, strict=True)
    ]


def _read_labels(path: Path, file: Any, column: str) -> NDArray[np.int64]:
    kind = file.schema_arrow.field(column).type
    if not pa.types.is_integer(kind):
        raise UserError(f"column {column} of {path} must hold integers, the class numbers, got {kind}")
    values = file.read(columns=[column]).column(0)
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy())[0])
        raise UserError(f"{path}, row {row} (from 0): a label must be an integer, got null")
    return np.asarray(values.to_numpy()).astype(np.int64)


def _class_names(metadata: dict[bytes, bytes], label: str) -> list[str] | None:
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) and names else None


# --- Folders of images by class: ROOT/train/CLASS/*.jpg, ROOT/validation/CLASS/*.jpg, ... or ROOT/CLASS/*.jpg ---------
# Class numbers follow the sorted folder names of the training split. Hidden files and folders are ignored.

#: File name suffixes of images.
IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
)  # fmt: skip


def find_folder(root: Path) -> Source | None:
    """Find the class folders under a folder, by split; return None if there are none.

    Raises:
        UserError: a class without images, a class that the training split lacks, or no training split among splits.
    """
    folders = {}
    for split, names in SPLIT_NAMES.items():
        present = [root / name for name in names if (root / name).is_dir()]
        if present:
            folders[split] = present[0]
    if not folders:
        folders = {"train": root}
    if "train" not in folders:
        raise UserError(f"{root} needs a folder train beside {', '.join(sorted(f.name for f in folders.values()))}")
    classes = _class_folders(folders["train"])
    if not classes:
        if folders["train"] == root:
            return None
        raise UserError(f"{folders['train']} needs a folder of images for each class, and there is no folder in it")
    files: dict[str, list[Path]] = {}
    labels: dict[str, list[int]] = {}
    for split, folder in folders.items():
        files[split], labels[split] = [], []
        for name in _class_folders(folder):
            if name not in classes:
                raise UserError(f"{folder / name} is a class that {folders['train']} lacks: {', '.join(classes)}")
            images = list(_images(folder / name))
            if not images and split == "train":
                raise UserError(f"{folder / name} must hold images, for each folder there is a class: it has none")
            files[split] += images
            labels[split] += [classes.index(name)] * len(images)
    return FolderSource(root, files, labels, classes)


def _class_folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield Path(here, name)


class FolderSource(Source):
    """Image files by split, with their class numbers."""

    def __init__(
        self, root: Path, files: dict[str, list[Path]], labels: dict[str, list[int]], classes: list[str]
    ) -> None:
        self.root, self.files = root, files
        self._labels, self._classes = labels, classes

    def open(self) -> dict[str, ImageSplit]:
        return {split: FolderSplit(files, self._labels[split]) for split, files in self.files.items()}

    def class_names(self) -> list[str]:
        return list(self._classes)


class FolderSplit(ImageSplit):
    """Image files, class by class."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self._files = files
        self.labels = np.array(labels, dtype=np.int64)

    def place(self, index: int) -> str:
        return str(self._files[index])

    def encoded(self, indices: Sequence[int]) -> list[Encoded]:
        return [self._files[index] for index in indices]

    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        for first in range(0, len(self._files), size):
            yield first, list(self._files[first : first + size])


# --- Detects the kind of image data at a path -------------------------------------------------------------------------


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


# --- Opens image data at a path as images and labels in memory maps, decoded at first use -----------------------------

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

        Exact up to `store.STATISTICS_IMAGES` images, else over that many of them.
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
        data: a Parquet file or a folder, see `dataset.find_source`.
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
