"""Number of classes, checks of labels, and the choice of validation images.

Shapes: N training images; labels (N,) int64; K classes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.workloads.images.dataset import ImageData

#: Seed of the choice of validation images; not a hyperparameter, so that every study has the same split.
SPLIT_SEED = 0


def count_classes(data: ImageData, asked: int | None) -> int:
    """Return K: as requested, or the number of class names in the data, or else the greatest training label plus one.

    Raises:
        UserError: a label outside 0..K-1, a class without a training image, or K < 2.
    """
    train = data.labels["train"]
    count = asked or (len(data.class_names) if data.class_names else int(train.max()) + 1)
    for split, labels in data.labels.items():
        wrong = np.flatnonzero((labels < 0) | (labels >= count))
        if len(wrong):
            row = int(wrong[0])
            raise UserError(
                f"{data.place(split, row)}: a label must be in 0..{count - 1} for {count} classes, got {labels[row]}"
            )
    present = np.unique(train)
    if len(present) < count:
        without_gaps = len(present) == int(present[-1]) + 1
        missing = np.setdiff1d(np.arange(count), present)
        listed = ", ".join(str(label) for label in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise UserError(
            f"{data.source.root} has training images of {len(present)} classes, fewer than the model's {count} outputs "
            f"(none has label {listed}): "
            + (f"say classes={len(present)}" if without_gaps else "number the classes from 0 without gaps")
        )
    if count < 2:
        raise UserError(f"{data.source.root} must have images of at least 2 classes, it has 1")
    return count


def hold_out(labels: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split training images into training and validation images, class by class.

    Of each class with n >= 2 images, ``share`` * n are for validation (rounded, at least 1, at most n - 1), chosen by
    one permutation with a fixed seed.

    Args:
        labels: (N,).
        share: in (0, 1).

    Returns:
        Numbers of the training images and of the validation images, each ascending.

    Raises:
        UserError: no class has two images.
    """
    # RandomState is numpy's generator whose numbers never change from version to version (NEP 19).
    order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
    validates = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        if len(members) >= 2:
            validates[members[: min(max(1, round(share * len(members))), len(members) - 1)]] = True
    if not validates.any():
        raise UserError("the validation split is empty: no class has two training images, one of which could validate")
    return np.flatnonzero(~validates), np.flatnonzero(validates)
