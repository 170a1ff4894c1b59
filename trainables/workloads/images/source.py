"""Image files at a path, with labels by split: Parquet files in the layout of Hugging Face, or folders by class.

In Parquet a row is an image (``img`` or ``image``: a struct with ``bytes`` and optionally ``path``) and a class number;
names of the classes are in the schema's metadata under ``huggingface`` (the feature type ClassLabel). Folders are
ROOT/train/CLASS/*.jpg, ROOT/validation/CLASS/*.jpg, ... or ROOT/CLASS/*.jpg; class numbers follow the sorted folder
names of the training split, hidden files and folders are ignored. Rows and row groups are counted from 0.
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
from trainables.storage import atomic_write

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
#: Up to this many bytes in all, files are read as a whole for the digest.
WHOLE_BYTES = 10**9
#: Above that, this many bytes of a file's beginning and of its end are read, and its modification time counts.
END_BYTES = 10**6

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
    names = _columns(files["train"][0], IMAGE_COLUMNS, LABEL_COLUMNS)
    splits: dict[str, ImageSplit] = {split: ParquetSplit(paths, *names) for split, paths in files.items()}
    test = splits.get("test")
    if test is not None and len(test) and bool(np.all(test.labels == -1)):
        del splits["test"]  # Hugging Face writes -1 where the labels are not public
    return splits


def _class_names(path: Path) -> list[str] | None:
    _, label = _columns(path, IMAGE_COLUMNS, LABEL_COLUMNS)
    with _opened(path) as file:
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
        self._image_column = image_column
        self._starts: list[tuple[int, Path]] = []  # number of its first row, file
        labels, first = [np.empty(0, dtype=np.int64)], 0
        for path in paths:
            _columns(path, (image_column,), (label_column,))
            self._starts.append((first, path))
            with _opened(path) as file:
                kind = file.schema_arrow.field(image_column).type
                fields = {kind.field(i).name for i in range(kind.num_fields)} if pa.types.is_struct(kind) else set()
                if not fields & {"bytes", "path"} and not _is_binary(kind):
                    raise UserError(
                        f"column {image_column} of {path} must be a struct with bytes or a path, or binary, got {kind}"
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
                for batch in file.iter_batches(batch_size=size, columns=[self._image_column]):
                    images = _encoded_images(path, batch.column(0))
                    yield first, [self._present(number, image) for number, image in enumerate(images, start=first)]
                    first += len(images)

    def _present(self, index: int, image: Encoded | None) -> Encoded:
        if image is None:
            raise UserError(
                f"{self.place(index)}: an image must have bytes or a path, and {self._image_column} has neither"
            )
        if isinstance(image, Path) and not image.exists():
            raise UserError(f"{self.place(index)}: the image has no bytes, and its path {str(image)!r} does not exist")
        return image


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not a Parquet file that can be read: {said}") from error


def _columns(path: Path, *choices: tuple[str, ...]) -> tuple[str, ...]:
    """Return, for each choice of names, the first that is a column of the file."""
    with _opened(path) as file:
        there = list(file.schema_arrow.names)
    found = []
    for names in choices:
        name = next((name for name in names if name in there), None)
        if name is None:
            raise UserError(f"{path} needs a column {' or '.join(names)}; its columns are {', '.join(there) or 'none'}")
        found.append(name)
    return tuple(found)


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


# --- Digest that distinguishes sets of image files --------------------------------------------------------------------


def content_digest(source: Source, cache: Path) -> str:
    """Return the SHA-256 of the splits, file names, sizes and contents of a source, in hexadecimal.

    Equal for a copy elsewhere if all files together have at most `WHOLE_BYTES`. Contents are read once for a set of
    sizes and modification times, and the digest is kept in ``cache``. Images outside the Parquet files that refer to
    them are not read.
    """
    listed, total_bytes = [], 0
    signature = hashlib.sha256(str(source.root.resolve()).encode(errors="surrogateescape"))
    for split in sorted(source.files):
        for path in source.files[split]:
            facts = path.stat()
            name = str(path.relative_to(source.root)) if path != source.root else path.name
            listed.append((split, name, facts.st_size, facts.st_mtime_ns, path))
            total_bytes += facts.st_size
            signature.update(repr((split, name, facts.st_size, facts.st_mtime_ns, facts.st_ino)).encode())

    def read() -> dict[str, str]:
        digest = hashlib.sha256()
        for split, name, size_bytes, written_ns, path in listed:
            digest.update(repr((split, name, size_bytes)).encode())
            if total_bytes > WHOLE_BYTES:
                digest.update(repr(written_ns).encode())
            digest.update(_file_digest(path, whole=total_bytes <= WHOLE_BYTES))
        return {"sha256": digest.hexdigest()}

    return str(cached_json(cache / "digests" / f"{signature.hexdigest()[:32]}.json", read)["sha256"])


def _file_digest(path: Path, *, whole: bool) -> bytes:
    """Return the SHA-256 of a file, or of its beginning and end."""
    with path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").digest()
        beginning = file.read(END_BYTES)
        file.seek(max(0, path.stat().st_size - END_BYTES))
        return hashlib.sha256(beginning + file.read(END_BYTES)).digest()


def cached_json(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the file, or else compute it and write it there.

    Two processes may do this at once: each computes the same, and the file is written atomically. A file that is no
    JSON object counts as missing.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict):
        return found
    facts = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(json.dumps(facts).encode())
    return facts
