"""Image files at a path, with labels by split: Parquet files in the layout of Hugging Face, or folders by class.

In Parquet a row is an image (``img`` or ``image``: the encoded bytes, or a struct with ``bytes``) and a class number.
Folders are ROOT/train/CLASS/*.jpg, ROOT/validation/CLASS/*.jpg, ... or ROOT/CLASS/*.jpg; class numbers follow the
sorted folder names of the training split, hidden files and folders are ignored. ``digits`` are those of scikit-learn.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pd
import pyarrow.parquet as pq

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

#: Data that are there without a file: the splits of the workload ``digits``, enlarged to this side in pixels.
DIGITS, DIGITS_SIDE = "digits", 32

#: An image file's bytes, or its path.
Encoded = bytes | Path


class ImageSplit:
    """One split's images, still encoded, in a fixed order: files, unless a subclass says otherwise.

    Args:
        files: of the images.
        labels: (N,) class numbers, not yet compared with the number of classes.
    """

    def __init__(self, files: Sequence[Encoded], labels: Sequence[int]) -> None:
        self._files = files
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def place(self, index: int) -> str:
        """Return the location of an image for messages: the file, and its row there."""
        return str(self._files[index])

    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        """Yield all images in order, at most ``size`` at a time, with the first one's number.

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
    """Find the image source at a path, a Parquet file, a folder of them or folders of images by class; or `DIGITS`.

    UserError: the path does not exist or holds none of them, files that belong to no split, or none for training.
    """
    root = Path(data).expanduser()
    if not root.exists():
        if data == DIGITS:
            return Source(root=root, files={}, open=_open_digits)
        raise UserError(f"image data must be a Parquet file, a folder or {DIGITS}, and {str(root)!r} does not exist")
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
    return Source(root=root, files=files, open=partial(_open_parquet, files))


def _open_parquet(files: dict[str, list[Path]]) -> dict[str, ImageSplit]:
    splits: dict[str, ImageSplit] = {split: ParquetSplit(paths) for split, paths in files.items()}
    test = splits.get("test")
    if test is not None and len(test) and bool(np.all(test.labels == -1)):
        del splits["test"]  # Hugging Face writes -1 where the labels are not public
    return splits


class ParquetSplit(ImageSplit):
    """The rows of Parquet files, one file after the other.

    Raises:
        UserError: a file that cannot be read, a missing column, a column of another type, a label that is null.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        first = paths[0]
        with self._opened() as data:
            image, label = (_column(first, data.schema.names, names) for names in (IMAGE_COLUMNS, LABEL_COLUMNS))
            kind, labels = data.schema.field(image).type, data.to_table(columns=[label]).column(0)
        in_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        kind = kind.field("bytes").type if in_struct else kind
        self._bytes = {image: pc.field(image, "bytes") if in_struct else pc.field(image)}
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise UserError(f"column {image} of {first} must be binary or a struct with bytes, got {kind}")
        if not pa.types.is_integer(labels.type):
            raise UserError(f"column {label} of {first} must hold integers, the class numbers, got {labels.type}")
        if labels.null_count:
            place = self.place(labels.is_null().index(True).as_py())
            raise UserError(f"{place}: a label must be an integer, got null")
        self.labels = np.asarray(labels.to_numpy()).astype(np.int64)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            yield pd.dataset(list(map(str, self._paths)), format="parquet")
        except (pa.ArrowException, OSError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{self._paths[0].parent} has a Parquet file that cannot be read: {said}") from error

    def place(self, index: int) -> str:
        for path in self._paths:
            rows = pq.read_metadata(path).num_rows
            if index < rows:
                break
            index -= rows
        return f"{path}, row {index} (from 0)"

    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        first = 0
        with self._opened() as data:
            for batch in data.to_batches(columns=self._bytes, batch_size=size, batch_readahead=1, fragment_readahead=1):
                images = batch.column(0).to_pylist()
                if None in images:
                    raise UserError(f"{self.place(first + images.index(None))}: an image must have bytes, and has none")
                yield first, images
                first += len(images)


def _column(path: Path, there: Sequence[str], names: Sequence[str]) -> str:
    """Return the first of these names that is a column of the file."""
    for name in names:
        if name in there:
            return name
    raise UserError(f"{path} needs a column {' or '.join(names)}; its columns are {', '.join(there) or 'none'}")


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
    return Source(root=root, files=files, open=lambda: splits)


def _class_folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield Path(here, name)


# --- scikit-learn's digits --------------------------------------------------------------------------------------------


def _open_digits() -> dict[str, ImageSplit]:
    from torch.nn.functional import interpolate

    from trainables.workloads.digits import digit_splits

    header = f"P5 {DIGITS_SIDE} {DIGITS_SIDE} 255 ".encode()  # of a portable graymap
    splits = {}
    for split, (images, labels) in digit_splits().items():
        pixels = interpolate(255 * images, size=(DIGITS_SIDE, DIGITS_SIDE), mode="bilinear").byte().numpy()
        splits[split] = ImageSplit([header + image.tobytes() for image in pixels], labels.tolist())
    return splits
