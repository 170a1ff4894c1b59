"""What every kind of image source offers: encoded images and labels, by split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: The names of splits, and the names under which data sets have them on disk. The first found is taken.
SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "valid"),
    "test": ("test",),
}

#: An image file's bytes, or where it is.
Encoded = bytes | Path


class ImageSplit(ABC):
    """One split's images, still encoded, in a fixed order."""

    labels: NDArray[np.int64]
    """(N,) class numbers, not yet compared with the number of classes."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def place(self, index: int) -> str:
        """Where image number ``index`` is, for messages: the file, and its row there."""

    @abstractmethod
    def encoded(self, indices: Sequence[int]) -> list[Encoded]:
        """The images of these numbers.

        Raises:
            UserError: there is no image in a row.
        """

    @abstractmethod
    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        """All images in order, at most ``size`` at a time, with the number of the first; reads no more than it gives.

        Raises:
            UserError: there is no image in a row.
        """


class Source(ABC):
    """Files that hold images and labels."""

    root: Path
    """What the user gave."""
    files: dict[str, list[Path]]
    """By split, in the order of their images."""

    @abstractmethod
    def open(self) -> dict[str, ImageSplit]:
        """The splits, labels read.

        Raises:
            UserError: a file that cannot be read, a missing column, a label that is none.
        """

    @abstractmethod
    def class_names(self) -> list[str] | None:
        """Names of the classes, by class number; None where the files do not say."""
