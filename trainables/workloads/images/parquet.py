"""Image-classification data in Parquet, in the layout of Hugging Face `datasets`.

A row is an image (``img`` or ``image``: a struct with ``bytes`` and optionally ``path``) and a class number. Names of
the classes are in the schema's metadata under ``huggingface`` (the feature type ClassLabel).
Rows and row groups are counted from 0.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.workloads.images.source import SPLIT_NAMES, Encoded, ImageSplit, Source

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
