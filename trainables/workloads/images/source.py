"""Image files at a path, with labels by split: Parquet files in the layout of Hugging Face, or folders by class.

In Parquet a row is an image (``img`` or ``image``: the encoded bytes, or a struct with ``bytes``) and a class number;
names of the classes are in the schema's metadata under ``huggingface`` (the feature type ClassLabel). Folders are
ROOT/train/CLASS/*.jpg, ROOT/validation/CLASS/*.jpg, ... or ROOT/CLASS/*.jpg; class numbers follow the sorted folder
names of the training split, hidden files and folders are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainables.errors import UserError

#: The names of splits, and their names on disk in data sets. The first found is used.
SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "valid"),
    "test": ("test",),
}
#: Accepted column names; the first that exists is used.
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "labels", "fine_label")
#: File name suffixes of images.
IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
)  # fmt: skip

#: An image file's bytes, or its path.
Encoded = bytes | Path


class ImageSplit:
    """One split's images, still encoded, in a fixed order: files, unless a subclass says otherwise.

    Args:
        files: of the images.
        labels: (N,) class numbers, not yet compared with the number of classes.
    """

    def __init__(self, files: Sequence[Path], labels: Sequence[int]) -> None:
        self._files = files
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def place(self, index: int) -> str:
        """Return the location of an image for messages: the file, and its row there."""
        return str(self._files[index])

    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        """Yield all images in order, at most ``size`` at a time, with the first one's number.

        Raises:
            UserError: there is no image in a row.
        """
        for first in range(0, len(self._files), size):
            yield first, list(self._files[first : first + size])


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files that hold images and labels."""

    root: Path
    files: dict[str, list[Path]]
    """Files by split, in the order of their images."""
    open: Callable[[], dict[str, ImageSplit]]
    """Returns the splits with their labels; UserError for a file, a column or a label that cannot be read."""
    class_names: Callable[[], list[str] | None]
    """Returns the names of the classes, by class number; None where the files have none."""

    def digest(self, *, contents: bool) -> str:
        """Return a SHA-256, in hexadecimal, of splits, file names and sizes.

        Args:
            contents: True to read all files, too; else the place and the times of writing count instead.
        """
        found = hashlib.sha256(b"" if contents else str(self.root.resolve()).encode(errors="surrogateescape"))
        try:
            for split in sorted(self.files):
                for path in self.files[split]:
                    facts = path.stat()
                    found.update(repr((split, str(path.relative_to(self.root)), facts.st_size)).encode())
                    if contents:
                        with path.open("rb") as file:
                            found.update(hashlib.file_digest(file, "sha256").digest())
                    else:
                        found.update(repr((facts.st_mtime_ns, facts.st_ino)).encode())
        except OSError as error:
            raise UserError(f"the image data in {self.root} cannot be read: {error}") from error
        return found.hexdigest()


def find_source(data: str) -> Source:
    """Find the image source at a path: a Parquet file, a folder of Parquet files, or folders of images by class.

    Raises:
        UserError: the path does not exist or holds none of them, files that belong to no split, or none for training.
    """
    root = Path(data).expanduser()
    if not root.exists():
        raise UserError(f"image data must be a Parquet file or a folder, and {str(root)!r} does not exist")
    source = _find_parquet(root) or (_find_folders(root) if root.is_dir() else None)
    if source is None:
        raise UserError(
            f"{root} holds neither Parquet files (train-*.parquet) nor folders of images by class "
            "(train/CLASS/*.jpg or CLASS/*.jpg)"
        )
    return source


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _find_parquet(root: Path) -> Source | None:
    files: dict[str, list[Path]] = {"train": [root]} if root.is_file() else {}
    for folder in () if files else (root, root / "data"):
        patterns = ("{}-*.parquet", "{}.parquet", "{}/*.parquet")
        for split, names in SPLIT_NAMES.items():
            found = (sorted(folder.glob(pattern.format(name))) for name in names for pattern in patterns)
            files[split] = next(filter(None, found), [])
        if files["train"]:
            break
        others = sorted(path.name for path in folder.glob("*.parquet"))
        if others:
            raise UserError(f"{folder} needs Parquet files named train-*.parquet for training, got {', '.join(others)}")
    if not files["train"]:
        return None
    files = {split: paths for split, paths in files.items() if paths}
    return Source(
        root=root, files=files, open=partial(_open_parquet, files), class_names=partial(_class_names, files["train"][0])
    )


def _open_parquet(files: dict[str, list[Path]]) -> dict[str, ImageSplit]:
    # Columns may differ in order from file to file, but their names are those of the first.
    with _opened(files["train"][0]) as file:
        names = _columns(files["train"][0], file, IMAGE_COLUMNS, LABEL_COLUMNS)
    splits: dict[str, ImageSplit] = {split: ParquetSplit(paths, *names) for split, paths in files.items()}
    test = splits.get("test")
    if test is not None and len(test) and bool(np.all(test.labels == -1)):
        del splits["test"]  # Hugging Face writes -1 where the labels are not public
    return splits


def _class_names(path: Path) -> list[str] | None:
    with _opened(path) as file:
        [label] = _columns(path, file, LABEL_COLUMNS)
        metadata = file.schema_arrow.metadata or {}
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) and names else None


class ParquetSplit(ImageSplit):
    """The rows of Parquet files, one file after the other.

    Raises:
        UserError: a file that cannot be read, a missing column, a column of another type, a label that is null.
    """

    def __init__(self, paths: Sequence[Path], image_column: str, label_column: str) -> None:
        self._column = image_column
        self._starts: list[tuple[int, Path]] = []  # number of its first row, file
        labels, first = [np.empty(0, dtype=np.int64)], 0
        for path in paths:
            self._starts.append((first, path))
            with _opened(path) as file:
                _columns(path, file, (image_column,), (label_column,))
                kind = file.schema_arrow.field(image_column).type
                if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
                    kind = kind.field("bytes").type
                if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
                    raise UserError(
                        f"column {image_column} of {path} must be binary or a struct with bytes, got {kind}"
                    )
                labels.append(_read_labels(path, file, label_column))
            first += len(labels[-1])
        self.labels = np.concatenate(labels)

    def place(self, index: int) -> str:
        first, path = self._starts[bisect_right(self._starts, index, key=lambda start: start[0]) - 1]
        return f"{path}, row {index - first} (from 0)"

    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        for first, path in self._starts:
            with _opened(path) as file:
                for batch in file.iter_batches(batch_size=size, columns=[self._column]):
                    column = batch.column(0)
                    images = (
                        pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column
                    ).to_pylist()
                    if None in images:
                        place = self.place(first + images.index(None))
                        raise UserError(f"{place}: an image must have bytes, and {self._column} has none")
                    yield first, images
                    first += len(images)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a Parquet file that can be read: {said}") from error


def _columns(path: Path, file: Any, *choices: tuple[str, ...]) -> list[str]:
    """Return, for each choice of names, the first that is a column of the file."""
    there, found = file.schema_arrow.names, []
    for names in choices:
        name = next((name for name in names if name in there), None)
        if name is None:
            raise UserError(f"{path} needs a column {' or '.join(names)}; its columns are {', '.join(there) or 'none'}")
        found.append(name)
    return found


def _read_labels(path: Path, file: Any, column: str) -> NDArray[np.int64]:
    kind = file.schema_arrow.field(column).type
    if not pa.types.is_integer(kind):
        raise UserError(f"column {column} of {path} must hold integers, the class numbers, got {kind}")
    values = file.read(columns=[column]).column(0)
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy())[0])
        raise UserError(f"{path}, row {row} (from 0): a label must be an integer, got null")
    return np.asarray(values.to_numpy()).astype(np.int64)


# --- Folders of images by class ---------------------------------------------------------------------------------------


def _find_folders(root: Path) -> Source | None:
    folders = {
        split: next(root / name for name in names if (root / name).is_dir())
        for split, names in SPLIT_NAMES.items()
        if any((root / name).is_dir() for name in names)
    } or {"train": root}
    if "train" not in folders:
        raise UserError(f"{root} needs a folder train beside {', '.join(sorted(f.name for f in folders.values()))}")
    classes = _class_folders(folders["train"])
    if not classes:
        if folders["train"] == root:
            return None
        raise UserError(f"{folders['train']} needs a folder of images for each class, and there is no folder in it")
    files: dict[str, list[Path]] = {split: [] for split in folders}
    labels: dict[str, list[int]] = {split: [] for split in folders}
    for split, folder in folders.items():
        for name in _class_folders(folder):
            if name not in classes:
                raise UserError(f"{folder / name} is a class that {folders['train']} lacks: {', '.join(classes)}")
            images = list(_images(folder / name))
            if not images and split == "train":
                raise UserError(f"{folder / name} must hold images, for each folder there is a class: it has none")
            files[split] += images
            labels[split] += [classes.index(name)] * len(images)
    splits = {split: ImageSplit(files[split], labels[split]) for split in folders}
    return Source(root=root, files=files, open=lambda: splits, class_names=lambda: classes)


def _class_folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield Path(here, name)
