"""A small ResNet on some thousand images of CIFAR-10, for `search_quality.py` (`cifar_subset:make`), and ResNet-20.

`--option data=FOLDER` holds the Hugging Face Parquet files (`train-*.parquet`, `test-*.parquet`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from PIL import Image
from stopped_steps import Block
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainables.workloads.models import resnet


def pictures_of(folder: str, split: str, first: int, count: int) -> tuple[list[Image.Image], Tensor]:
    """Return pictures of 32x32 and their labels."""
    table = pq.read_table(next(Path(folder).glob(f"{split}-*.parquet"))).slice(first, count).to_pylist()
    name = next(name for name in table[0] if isinstance(table[0][name], dict))
    return [Image.open(io.BytesIO(row[name]["bytes"])) for row in table], torch.tensor([row["label"] for row in table])


def pixels_of(pictures: Sequence[Image.Image]) -> Tensor:
    """Return pixels (N, 3, H, W), float32 from 0 to 255, of pictures of one size."""
    pixels = [torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8) for picture in pictures]
    width, height = pictures[0].size
    return torch.stack(pixels).view(-1, height, width, 3).permute(0, 3, 1, 2).float().contiguous()


def images_of(folder: str, split: str, first: int, count: int) -> TensorDataset:
    """Return images (N, 3, 32, 32), normalised to [-1, 1], and their labels."""
    pictures, labels = pictures_of(folder, split, first, count)
    return TensorDataset(pixels_of(pictures) / 127.5 - 1, labels)


def make(data: str, images: int = 4000, width: int = 8) -> dict[str, Any]:
    """Return stem and four blocks, 10 epochs; validation and test are 2,000 images each of the test file."""

    def model() -> nn.Module:
        stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
                  Block(4 * width, 4 * width, 1)]  # fmt: skip
        return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))

    train = images_of(data, "train", 0, images)
    return {
        "model": model,
        "train": DataLoader(train, batch_size=64, shuffle=True),
        "validation": DataLoader(images_of(data, "test", 0, 2000), batch_size=500),
        "test": DataLoader(images_of(data, "test", 2000, 2000), batch_size=500),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4),
        "epochs": 15,
    }


def resnet20(data: str) -> dict[str, Any]:
    """Return ResNet-20 on 10,000 images for 10 epochs, without augmentation."""
    return {**make(data, images=10_000), "model": lambda: resnet.resnet20(10), "epochs": 10}
