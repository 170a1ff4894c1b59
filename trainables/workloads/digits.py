"""The default workload: real handwritten digits that ship with scikit-learn, and a small convolutional network.

Shapes: N samples; images (N, 1, 16, 16) float32 in [0, 1], enlarged from 8x8; labels (N,) int64 in 0..9.
599 samples are for training, 599 for validation (used by the search) and 599 for test (only in reports): one sample is
0.17 percentage points.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from trainables.errors import unknown_name
from trainables.gradients.straight_through import BinaryActivation
from trainables.workloads.base import Batch, Workload, digest_of
from trainables.workloads.sample_access import TensorSamples
from trainables.workloads.seeded_loader import shuffled_batches

BATCH_SIZE = 64
EVALUATION_BATCH_SIZE = 128  # fits a core's cache: twice as fast as the whole split at once
IMAGE_SIZE = 16
#: Output channels and stride of each convolution.
CONVOLUTIONS = ((8, 1), (8, 1), (16, 2), (16, 1), (32, 2), (32, 1))
#: Modules between convolutions, by the value of the option ``activations``.
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "binary": BinaryActivation}
LEARNING_RATE = 0.2
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
#: Seed of the split of the 1,797 images; not a hyperparameter, so that every study has the same split.
SPLIT_SEED = 0
#: Path of the data in scikit-learn's package.
_DATA_FILE = ("datasets", "data", "digits.csv.gz")


def read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read scikit-learn's digits: images (1797, 8, 8) in 0..16 and labels (1797,).

    If the data file is in its usual place, it is read without importing scikit-learn: the import takes two seconds in
    every process, reading the data 30 ms.
    """
    package = importlib.util.find_spec("sklearn")
    file = None if package is None or package.origin is None else Path(package.origin).parent.joinpath(*_DATA_FILE)
    if file is None or not file.is_file():
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images, digits.target
    with gzip.open(file) as content:
        table = np.loadtxt(content, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


@lru_cache(maxsize=1)
def digit_splits() -> dict[str, tuple[Tensor, Tensor]]:
    """Return images and labels of each split; cached in the process, so the tensors must not be modified."""
    digits, target = read_digits()
    images = torch.tensor(digits, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear")
    labels = torch.tensor(target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    parts = zip(("train", "validation", "test"), order.chunk(3), strict=True)
    return {name: (images[part], labels[part]) for name, part in parts}


class Digits(Workload):
    """Six 3x3 convolutions with batch norm, SGD with momentum and weight decay, cosine schedule.

    Args:
        activations: ``relu``, or ``binary`` for the sign with a straight-through gradient.

    Raises:
        UserError: no such activations.
    """

    name = "digits"
    by_step = True

    def __init__(self, *, activations: str = "relu") -> None:
        if activations not in ACTIVATIONS:
            raise unknown_name("activations of workload digits", activations, ACTIVATIONS)
        self._activations = activations
        self.batch_size: int = BATCH_SIZE

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(digit_splits()["train"][1]) // self.batch_size)

    def make_model(self) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = 1
        for number, (width, stride) in enumerate(CONVOLUTIONS, start=1):
            layers[f"conv{number}"] = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
            layers[f"norm{number}"] = nn.BatchNorm2d(width)
            layers[f"{self._activations}{number}"] = ACTIVATIONS[self._activations]()
            channels = width
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["classifier"] = nn.Linear(channels, 10)
        return nn.Sequential(layers)

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        return SGD(named_parameters, lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)

    def batch_at(self, epoch: int, seed: int, step: int) -> Batch:
        images, labels = digit_splits()["train"]
        part = shuffled_batches(self.train_samples, self.batch_size, epoch, seed)[step]
        return images[part], labels[part]

    def fingerprint(self) -> str:
        return digest_of(super().fingerprint(), self._activations, *chain(*digit_splits().values()))

    @property
    def train_samples(self) -> int:
        return len(digit_splits()["train"][1])

    @property
    def different_inputs(self) -> int:
        return self.train_samples

    def samples(self) -> TensorSamples:
        return TensorSamples(digit_splits()["train"], self.batch_size)

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        images, labels = digit_splits()[split]
        yield from zip(images.split(EVALUATION_BATCH_SIZE), labels.split(EVALUATION_BATCH_SIZE), strict=True)
