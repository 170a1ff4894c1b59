"""Folders of images by class: ROOT/train/CLASS/*.jpg, ROOT/validation/CLASS/*.jpg, ... or ROOT/CLASS/*.jpg.

Class numbers follow the sorted folder names of the training split. Hidden files and folders are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from trainables.errors import UserError
from trainables.workloads.images.source import SPLIT_NAMES, Encoded, ImageSplit, Source

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
