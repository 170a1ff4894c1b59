"""Batches of crops against one image at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_files import noise

from trainables.workloads.images.workload import (
    center_crops,
    draw_boxes,
    generator_of,
    normalised,
    padded_crops,
    resized_crops,
)


def batch(count: int, height: int, width: int | None = None) -> torch.Tensor:
    return torch.from_numpy(noise(count, height, width).transpose(0, 3, 1, 2).copy())


def test_padded_crops_equal_slices() -> None:
    images = batch(40, 7, 9)
    generator = generator_of(0, 0, 0)
    offsets, flips = torch.randint(0, 9, (40, 2), generator=generator), torch.arange(40) % 2 == 1
    found = padded_crops(images, offsets, flips)
    assert found.dtype == torch.uint8
    for image, (top, left), mirrored, crop in zip(images.numpy(), offsets.tolist(), flips, found, strict=True):
        expected = np.pad(image, ((0, 0), (4, 4), (4, 4)))[:, top : top + 7, left : left + 9]
        assert np.array_equal(crop, expected[:, :, ::-1] if mirrored else expected)


def test_resized_crops_equal_interpolation_of_each_box() -> None:
    """Except near the edges of the box, where `F.interpolate` of the box alone repeats its pixels."""
    images = batch(40, 32)
    generator = generator_of(1, 2, 3)
    boxes, flips = draw_boxes(40, 32, generator), torch.arange(40) % 2 == 1
    boxes[0], boxes[1], boxes[2] = (torch.tensor(box) for box in ([0, 0, 32, 32], [31, 0, 1, 1], [4, 4, 28, 28]))
    found = resized_crops(images, boxes, flips, 28)
    assert found.dtype == torch.float32
    for image, (top, left, height, width), mirrored, crop in zip(images, boxes.tolist(), flips, found, strict=True):
        box = image[None, :, top : top + height, left : left + width].double()
        expected = F.interpolate(box, (28, 28), mode="bilinear", align_corners=False)[0]
        crop = crop.flip(2) if mirrored else crop
        rows, columns = (slice(edge, 28 - edge) for edge in (math.ceil(14 / height), math.ceil(14 / width)))
        if (height, width) == (32, 32):
            rows = columns = slice(None)
        torch.testing.assert_close(crop[:, rows, columns].double(), expected[:, rows, columns], atol=0.02, rtol=0)


def test_boxes_are_inside_and_distributed_as_published() -> None:
    side, count = 256, 20_000
    top, left, height, width = draw_boxes(count, side, generator_of(0, 0)).double().T
    assert bool((top >= 0).all() and (left >= 0).all())
    assert bool((top + height <= side).all() and (left + width <= side).all())
    area, aspect = height * width / side**2, width / height
    assert 0.078 < float(area.min()) < 0.09
    assert 0.95 < float(area.max()) <= 1
    assert 0.73 < float(aspect.min()) < 0.76
    assert 1.32 < float(aspect.max()) < 1.36
    # Boxes of at most 3/4 of the area always fit, so their areas are uniform in 0.08 .. 0.75: mean 0.415. The standard
    # error is 0.0016, four of them 0.0064; rounding to pixels adds less than 0.001.
    assert float(area[area < 0.75].mean()) == pytest.approx(0.415, abs=0.0075)
    assert float(aspect.log().mean()) == pytest.approx(0, abs=0.006)
    # Places are uniform among those possible.
    free = side - width > 20
    assert float((left / (side - width))[free].mean()) == pytest.approx(0.5, abs=0.012)


def test_center_and_normalisation() -> None:
    images = batch(3, 10)
    assert torch.equal(center_crops(images, 10), images)
    assert torch.equal(center_crops(images, 7), images[:, :, 1:8, 1:8])
    mean, deviation = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1), torch.tensor([4.0, 5.0, 6.0]).view(3, 1, 1)
    found = normalised(images, mean, deviation)
    assert found.is_contiguous()
    for channel in range(3):
        expected = (images[:, channel].numpy().astype(float) - (1 + channel)) / (4 + channel)
        assert np.allclose(found[:, channel], expected, atol=1e-5)
    floats = images.float()
    normalised(floats, mean, deviation)
    assert torch.equal(floats, images.float())  # the input stays
