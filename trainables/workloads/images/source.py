"""Interface of all image sources: encoded images and labels, by split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: The names of splits, and their names on disk in data sets. The first found is used.
SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val", "valid"),
    "test": ("test",),
}

#: An image file's bytes, or its path.
Encoded = bytes | Path


class ImageSplit(ABC):
    """One split's images, still encoded, in a fixed order."""

    labels: NDArray[np.int64]
    """(N,) class numbers, not yet compared with the number of classes."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def place(self, index: int) -> str:
        """Return the location of image number ``index`` for messages: the file, and its row there."""

    @abstractmethod
    def encoded(self, indices: Sequence[int]) -> list[Encoded]:
        """Return the images with these numbers.

        Raises:
            UserError: there is no image in a row.
        """

    @abstractmethod
    def chunks(self, size: int) -> Iterator[tuple[int, list[Encoded]]]:
        """Yield all images in order, at most ``size`` at a time, with the number of the first; read only these.

        Raises:
            UserError: there is no image in a row.
        """


class Source(ABC):
    """Files that hold images and labels."""

    root: Path
    """The path given by the user."""
    files: dict[str, list[Path]]
    """Files by split, in the order of their images."""

    @abstractmethod
    def open(self) -> dict[str, ImageSplit]:
        """Open the splits and read their labels.

        Raises:
            UserError: a file that cannot be read, a missing column, an invalid label.
        """

    @abstractmethod
    def class_names(self) -> list[str] | None:
        """Return the names of the classes, by class number; None where the files have none."""
