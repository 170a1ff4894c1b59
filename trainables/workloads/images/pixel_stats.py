"""Exact mean and standard deviation of pixels, for any subset of images.

Shapes: N images; pixels (N, C=3, T, T) uint8; moments (N, 2, C) int64, sums of the pixels and of their squares.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: Most images from which the normalisation is computed; of more images, this many at equal distances are used.
STATISTICS_IMAGES = 50_000


def image_moments(pixels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Compute moments (N, 2, C) of pixels (N, C, T, T)."""
    flat = pixels.reshape(*pixels.shape[:2], -1)
    squares = np.square(flat, dtype=np.uint16)  # 255 squared fits
    return np.stack([flat.sum(axis=2, dtype=np.int64), squares.sum(axis=2, dtype=np.int64)], axis=1)


def statistics_indices(indices: NDArray[np.int64], limit: int = STATISTICS_IMAGES) -> NDArray[np.int64]:
    """Return all indices, or ``limit`` of them at equal distances."""
    if len(indices) <= limit:
        return indices
    return indices[np.arange(limit) * len(indices) // limit]


def mean_and_deviation(moments: NDArray[np.int64], image_pixels: int) -> tuple[list[float], list[float]]:
    """Return mean and (population) standard deviation of each channel, in 0..255.

    Args:
        moments: (N, 2, C), N >= 1.
        image_pixels: T * T.
    """
    count = len(moments) * image_pixels
    means, deviations = [], []
    for total, squares in moments.sum(axis=0).T.tolist():
        means.append(total / count)
        # In integers: no cancellation. A constant channel gets deviation 1, so it is only shifted.
        deviations.append(math.sqrt(count * squares - total * total) / count or 1.0)
    return means, deviations
