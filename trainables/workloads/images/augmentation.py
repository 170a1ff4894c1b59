"""Training inputs from stored images, one batch at a time.

Shapes: B images of a batch, C channels; images (B, C, T, T) uint8; outputs (B, C, S, S); T stored side, S input side.
Boxes are (B, 4) int64: top, left, height, width in pixels of the stored image.
Random draws are separate from pixel operations: the same draws give the same outputs.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

#: Zeros around small images before cropping, in pixels (He et al. 2016, section 4.2).
PADDING = 4
#: Share of the image's area that a random resized crop covers, and its width / height (Szegedy et al. 2015, section 6).
AREAS = (0.08, 1.0)
ASPECTS = (3 / 4, 4 / 3)
#: Boxes drawn for each image; the first that lies inside is used, or the whole image if none does.
TRIES = 10
#: Images resampled at a time: they fit a cache, and their sampling grids take little memory.
CHUNK_IMAGES = 16


def generator_of(seed: int, epoch: int, step: int | None = None) -> torch.Generator:
    """Return the generator of an epoch's order, or of one of its steps; depends only on these numbers (>= 0)."""
    # A sequence ending in zeros equals the shorter one, so steps count from 1 here.
    entropy = (seed, epoch, 0 if step is None else step + 1)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def draw_flips(count: int, generator: torch.Generator) -> Tensor:
    """Draw which images are mirrored, each with probability 1/2: (B,) bool."""
    return torch.rand(count, generator=generator, dtype=torch.float64) < 0.5


def draw_offsets(count: int, generator: torch.Generator) -> Tensor:
    """Draw top and left of each crop from the padded image: (B, 2) int64 in 0..2 `PADDING`."""
    return torch.randint(0, 2 * PADDING + 1, (count, 2), generator=generator)


def padded_crops(images: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
    """Pad images by `PADDING` zeros on each side, crop them to their size, mirror some; (B, C, T, T) uint8."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (PADDING,) * 4)
    rows = torch.arange(height) + offsets[:, :1]
    columns = torch.arange(width) + offsets[:, 1:]
    columns = torch.where(flips[:, None], columns.flip(1), columns)
    places = rows[:, :, None] * padded.shape[3] + columns[:, None, :]  # (B, T, T), in a padded channel
    places = places.view(count, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, places).view(count, channels, height, width)


def draw_boxes(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw boxes (B, 4) whose share of the area is uniform in `AREAS` and whose aspect is log-uniform in `ASPECTS`.

    Args:
        count: B.
        side: T in pixels.
        generator: source of the draws.
    """
    areas, aspects, tops, lefts = torch.rand(4, count, TRIES, generator=generator, dtype=torch.float64)
    areas = (AREAS[0] + (AREAS[1] - AREAS[0]) * areas) * side * side
    low, high = math.log(ASPECTS[0]), math.log(ASPECTS[1])
    aspects = torch.exp(low + (high - low) * aspects)
    widths = (areas * aspects).sqrt().round()
    heights = (areas / aspects).sqrt().round()
    inside = (widths >= 1) & (widths <= side) & (heights >= 1) & (heights <= side)
    boxes = torch.stack(
        [(tops * (side - heights + 1)).floor(), (lefts * (side - widths + 1)).floor(), heights, widths], dim=2
    ).long()
    first = inside.int().argmax(dim=1)
    chosen = boxes[torch.arange(count), first]
    return torch.where(inside.any(dim=1)[:, None], chosen, torch.tensor([0, 0, side, side]))


def resized_crops(images: Tensor, boxes: Tensor, flips: Tensor, size: int) -> Tensor:
    """Crop the boxes, resize them to S and mirror some; (B, C, S, S) float32 in 0..255.

    Bilinear without antialias, pixel centers at halves, edges of the box repeated: equal to `F.interpolate` of the box
    alone (``align_corners=False``).

    Args:
        images: (B, C, T, T) uint8.
        boxes: (B, 4).
        flips: (B,) bool.
        size: S in pixels.
    """
    out = torch.empty(len(images), images.shape[1], size, size, dtype=torch.float32)
    for at in range(0, len(images), CHUNK_IMAGES):
        part = slice(at, at + CHUNK_IMAGES)
        top, left, height, width = boxes[part].to(torch.float32).T
        rows = _sample_places(top, height, size)
        columns = _sample_places(left, width, size)
        columns = torch.where(flips[part, None], columns.flip(1), columns)
        # grid_sample expects -1 at the center of the first pixel and 1 at that of the last (align_corners=True).
        rows, columns = (2 * places / (images.shape[2] - 1) - 1 for places in (rows, columns))
        grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), dim=3)
        out[part] = F.grid_sample(images[part].to(torch.float32), grid, mode="bilinear", align_corners=True)
    return out


def _sample_places(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Return where along one axis each output pixel samples, in pixels of the stored image: (B, S) float32."""
    inside = (torch.arange(size, dtype=torch.float32) + 0.5) * (length[:, None] / size) - 0.5
    return start[:, None] + inside.clamp(min=0).minimum(length[:, None] - 1)


def center_crops(images: Tensor, size: int) -> Tensor:
    """Return the central square of side S of each image, (B, C, S, S)."""
    top = (images.shape[2] - size) // 2
    left = (images.shape[3] - size) // 2
    return images[:, :, top : top + size, left : left + size]


def normalised(images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Normalize images (B, C, S, S; 0..255, uint8 or float) by mean and deviation, each (C, 1, 1), to float32."""
    return images.to(torch.float32, memory_format=torch.contiguous_format).sub(mean).div_(deviation)
