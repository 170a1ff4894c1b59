"""Image classification with the user's data, the workload ``images``.

Shapes: B images of a batch, S side of the inputs, K classes; images (B, 3, S, S) float32, normalised by the mean and
standard deviation of each channel for which pretrained weights were made, or of training images; labels (B,) int64 in
0..K-1.

Small images of one size (up to 64x64) train as in He et al. 2016, section 4.2: padded by 4 zeros on each side, cropped,
mirrored half of the time, and are evaluated unchanged. Others train as in Szegedy et al. 2015, section 6: a random part
of 8 to 100 % of the area resized to S, mirrored half of the time, and are evaluated on the central square.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainables.errors import UserError, unknown_name
from trainables.workloads import models
from trainables.workloads.base import Batch, Samples, Workload, count_hits
from trainables.workloads.images.store import ImageData, default_cache, open_images
from trainables.workloads.models.custom import check_scores
from trainables.workloads.models.pretrained import LIBRARIES, find_origin, take_weights
from trainables.workloads.user_code import code_digest

# --- Training inputs from stored images, one batch at a time ----------------------------------------------------------
# Shapes: B images of a batch, C channels; images (B, C, T, T) uint8; outputs (B, C, S, S); T stored side, S input side.
# Boxes are (B, 4) int64: top, left, height, width in pixels of the stored image.
# Random draws are separate from pixel operations: the same draws give the same outputs.

#: Zeros around small images before cropping, in pixels (He et al. 2016, section 4.2).
PADDING = 4
#: Share of the image's area that a random resized crop covers, and its width / height (Szegedy et al. 2015, section 6).
AREAS = (0.08, 1.0)
ASPECTS = (3 / 4, 4 / 3)
#: Seed of the choice of validation images; not a hyperparameter, so that every study has the same split.
SPLIT_SEED = 0
#: Images resampled at a time: they fit a cache, and their sampling grids take little memory.
CHUNK_IMAGES = 16
#: Places in training images by which mean and deviation are measured, at most: 50 MB of numbers.
MEASURED_PLACES = 2**21


def generator_of(seed: int, epoch: int, step: int | None = None) -> torch.Generator:
    """Return the generator of an epoch's order, or of one of its steps; depends only on these numbers (>= 0)."""
    # A sequence ending in zeros equals the shorter one, so steps count from 1 here.
    entropy = (seed, epoch, 0 if step is None else step + 1)
    return torch.Generator().manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def padded_crops(images: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
    """Pad images by `PADDING` zeros on each side, crop them to their size, mirror some; (B, C, T, T) uint8.

    ``offsets`` are top and left of each crop in the padded image, (B, 2) int64 in 0..2 `PADDING`.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (PADDING,) * 4)
    crops = [
        image[:, top : top + height, left : left + width]
        for image, (top, left) in zip(padded, offsets.tolist(), strict=True)
    ]
    return torch.where(flips[:, None, None, None], torch.stack(crops).flip(3), torch.stack(crops))


def draw_boxes(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw boxes (B, 4) whose share of the area is uniform in `AREAS` and whose aspect is log-uniform in `ASPECTS`.

    What would reach beyond the image is cut off.

    Args:
        count: B.
        side: T in pixels.
        generator: source of the draws.
    """
    areas, aspects, tops, lefts = torch.rand(4, count, generator=generator, dtype=torch.float64)
    areas = (AREAS[0] + (AREAS[1] - AREAS[0]) * areas) * side * side
    low, high = math.log(ASPECTS[0]), math.log(ASPECTS[1])
    aspects = torch.exp(low + (high - low) * aspects)
    widths, heights = (area.sqrt().round().clamp(1, side) for area in (areas * aspects, areas / aspects))
    boxes = [(tops * (side - heights + 1)).floor(), (lefts * (side - widths + 1)).floor(), heights, widths]
    return torch.stack(boxes, dim=1).long()


def resized_crops(images: Tensor, boxes: Tensor, flips: Tensor, size: int) -> Tensor:
    """Crop the boxes, resize them to S and mirror some; (B, C, S, S) float32 in 0..255.

    Bilinear without antialias, pixel centers at halves; at the box's edges, pixels of the image beside it count, too.

    Args:
        images: (B, C, T, T) uint8.
        boxes: (B, 4).
        flips: (B,) bool.
        size: S in pixels.
    """
    top, left, height, width = (boxes.to(torch.float32) / images.shape[2]).T
    zero, mirrored = torch.zeros_like(top), torch.where(flips, -width, width)
    # From the box's coordinates in -1..1 to those of the image.
    maps = torch.stack([mirrored, zero, 2 * left + width - 1, zero, height, 2 * top + height - 1], dim=1).view(-1, 2, 3)
    out = torch.empty(len(images), images.shape[1], size, size)
    for part in torch.arange(len(images)).split(CHUNK_IMAGES):
        grid = F.affine_grid(maps[part], [len(part), images.shape[1], size, size], align_corners=False)
        out[part] = F.grid_sample(images[part].float(), grid, padding_mode="border", align_corners=False)
    return out


def center_crops(images: Tensor, size: int) -> Tensor:
    """Return the central square of side S of each image, (B, C, S, S)."""
    top = (images.shape[2] - size) // 2
    left = (images.shape[3] - size) // 2
    return images[:, :, top : top + size, left : left + size]


def normalised(images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Normalize images (B, C, S, S; 0..255, uint8 or float) by mean and deviation, each (C, 1, 1), to float32."""
    return images.to(torch.float32, memory_format=torch.contiguous_format).sub(mean).div_(deviation)


# --- Number of classes, checks of labels, and the choice of validation images -----------------------------------------


def count_classes(data: ImageData, asked: int | None) -> int:
    """Return K: as requested, or the greatest training label plus one.

    Raises:
        UserError: a label outside 0..K-1, a class without a training image, or K < 2.
    """
    train, root = data.labels["train"], data.source.root
    count = asked or int(train.max()) + 1
    for split, labels in data.labels.items():
        wrong = np.flatnonzero((labels < 0) | (labels >= count))
        if len(wrong):
            row = int(wrong[0])
            place = data.source.open()[split].place(row)
            raise UserError(f"{place}: a label must be in 0..{count - 1} for {count} classes, got {labels[row]}")
    missing = np.setdiff1d(np.arange(count), train)
    if len(missing):
        raise UserError(
            f"{root} must have training images of all {count} classes, and none has label "
            f"{', '.join(map(str, missing[:5]))}: number the classes from 0 without gaps, or say classes=K"
        )
    if count < 2:
        raise UserError(f"{root} must have images of at least 2 classes, it has 1")
    return count


def hold_out(labels: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split training images into training and validation images, each class as nearly in proportion as possible.

    Args:
        labels: (N,).
        share: of images for validation, in (0, 1), rounded; at least 1 and at most N - 1 images.

    Returns:
        Numbers of the training images and of the validation images, each ascending.

    Raises:
        UserError: there is one image.
    """
    if len(labels) < 2:
        raise UserError("the validation split is empty: there is one training image")
    # RandomState is numpy's generator whose numbers never change from version to version (NEP 19).
    order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    count = min(max(1, round(share * len(labels))), len(labels) - 1)
    chosen = order[((np.arange(count) + 0.5) * len(labels) / count).astype(int)]
    return np.setdiff1d(np.arange(len(labels)), chosen), np.sort(chosen)


# --- The workload ---------------------------------------------------------------------------------------------------

EVALUATION_BATCH_SIZE = 256
#: Learning rate and weight decay by optimizer, unless they are given.
DEFAULTS = {"sgd": (0.1, 5e-4), "adamw": (5e-4, 0.05)}
#: Length of the warm-up in epochs, and its upper bound as a share of the run.
WARM_UP_EPOCHS = 5
WARM_UP_SHARE = 0.05


@dataclass(kw_only=True, eq=False)
class Images(Workload):
    """Images at a path, a model, pretrained or not, SGD or AdamW, linear warm-up and cosine to 0.

    The first use decodes all images into ``cache``; later ones map that into memory.

    Raises:
        UserError: an option out of range, or data that cannot be trained on; see `open_images` and `count_classes`.
    """

    why_inputs_vary = "whose inputs do not repeat: give --option augment=no, or --option views=4"

    data: str
    """A Parquet file, a folder of Parquet files by split (train-*.parquet), folders of images by class, or digits."""
    model: str = "resnet20"
    """Name of a model for `models.build_model`, ``package.module:function``, or ``library:NAME`` of `pretrained`."""
    weights: str | None = None
    """File of weights for the model, see `pretrained.read_weights`. None: those that the model was published with."""
    image_size: int | None = None
    """S in pixels. None: as the weights of a library's model need it, or else the images' own side if most are equal
    squares up to 64x64, else 224."""
    optimizer: str | None = None
    """``sgd`` or ``adamw``. None: sgd, or adamw for a pretrained model."""
    batch_size: int = 128
    """Images per training step, >= 1; the last step of an epoch may have fewer."""
    learning_rate: float | None = None
    """Learning rate after the warm-up, > 0. None: 0.1, or 5e-4 with adamw."""
    weight_decay: float | None = None
    """Weight decay of all parameters, >= 0. None: 5e-4, or 0.05 with adamw."""
    momentum: float = 0.9
    """Momentum of SGD, in [0, 1)."""
    validation: float = 0.1
    """Share of each class's training images for validation where the data has no validation split, in (0, 1)."""
    augment: bool | None = None
    """True if training inputs are cropped and mirrored at random. None: unless the model is pretrained, so that what
    is frozen in it is computed once."""
    views: int | None = None
    """Versions of each augmented image, >= 1: epoch e trains on version e modulo ``views``. None: drawn anew."""
    cache: str | None = None
    """Folder for the decoded images. None: `store.default_cache`."""
    cache_limit_gb: float = 20.0
    """Limit for stored decoded images in 10^9 bytes, >= 0; larger data is refused."""
    classes: int | None = None
    """K. None: the greatest training label plus one."""

    name = "images"
    by_step = True

    def __post_init__(self) -> None:
        self._origin = find_origin(str(self.model), self.weights)
        is_pretrained = self._origin.load is not None
        self.optimizer = self.optimizer or ("adamw" if is_pretrained else "sgd")
        if self.optimizer not in DEFAULTS:
            raise unknown_name("optimizer of workload images", self.optimizer, DEFAULTS)
        learning_rate, weight_decay = DEFAULTS[self.optimizer]
        self.learning_rate = learning_rate if self.learning_rate is None else self.learning_rate
        self.weight_decay = weight_decay if self.weight_decay is None else self.weight_decay
        self.augment = not is_pretrained if self.augment is None else self.augment
        whole, number = "an integer >= {}", "a number >= 0"
        for option, holds, rule in (
            ("image_size", self.image_size is None or _is_int(self.image_size, 8), whole.format(8)),
            ("batch_size", _is_int(self.batch_size, 1), whole.format(1)),
            ("views", self.views is None or _is_int(self.views, 1), whole.format(1)),
            ("classes", self.classes is None or _is_int(self.classes, 2), whole.format(2)),
            ("learning_rate", 0 < self.learning_rate < math.inf, "a number > 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, number),
            ("momentum", 0 <= self.momentum < 1, "a number in [0, 1)"),
            ("validation", 0 < self.validation < 1, "a share in (0, 1)"),
            ("cache_limit_gb", self.cache_limit_gb >= 0, number),
        ):
            if not holds:
                raise UserError(f"{option} of workload images must be {rule}, got {getattr(self, option)!r}")
        cache = Path(self.cache).expanduser() if self.cache else default_cache()
        self._data = open_images(
            str(self.data), cache=cache, cache_limit_bytes=self.cache_limit_gb * 1e9,
            image_size=self.image_size or self._origin.image_size,
        )  # fmt: skip
        self._classes = count_classes(self._data, self.classes)
        self._size = self._data.layout.image_size
        self._last_order: tuple[tuple[int, int, int], tuple[Tensor, ...]] = ((-1, -1, -1), ())
        labels = self._data.labels
        parts = {split: np.arange(len(labels[split])) for split in labels}
        self._home = {split: split for split in labels}
        if "validation" not in parts:
            self._home["validation"] = "train"
            parts["train"], parts["validation"] = hold_out(labels["train"], self.validation)
        self._parts: dict[str, NDArray[np.int64]] = parts
        self.splits = tuple(split for split in ("train", "validation", "test") if split in parts)
        mean, deviation = self._origin.mean, self._origin.deviation
        if mean is None or deviation is None:
            pixels = self._data.pixels["train"]
            some = pixels[parts["train"][:: 1 + parts["train"].size * pixels[0, 0].size // MEASURED_PLACES]]
            mean, deviation = some.mean((0, 2, 3)), some.std((0, 2, 3))
            deviation[deviation == 0] = 1
        self._mean, self._deviation = (torch.tensor(x, dtype=torch.float32).view(3, 1, 1) for x in (mean, deviation))

    @property
    def key(self) -> Hashable:
        return (self.name, self.model, self._classes, self._size, self.optimizer, self.momentum > 0)

    def check(self, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            model = self._origin.build(self._classes, self._size)
            check_scores(self.model, model, self._classes, self._size)
            if self._origin.weights:
                print(take_weights(model, self._origin.weights), file=sys.stderr)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._parts["train"]) // self.batch_size)

    def make_model(self) -> nn.Module:
        model = self._origin.build(self._classes, self._size)
        if self._origin.weights:
            take_weights(model, self._origin.weights)
        return model

    def make_optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        rates: Any = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        if self.optimizer == "adamw":
            return AdamW(named_parameters, **rates)
        return SGD(named_parameters, momentum=self.momentum, **rates)

    def make_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        warm_up = min(WARM_UP_EPOCHS * self.steps_per_epoch, int(WARM_UP_SHARE * total_steps))

        def factor(step: int) -> float:
            if step < warm_up:
                return (step + 1) / (warm_up + 1)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (total_steps - warm_up))))

        return LambdaLR(optimizer, factor)

    def batch_at(self, epoch: int, seed: int, step: int) -> Batch:
        rows = self._order(epoch, seed)[step]
        if self.views is None:
            return self.inputs_of(rows, generator_of(seed, epoch, step))
        each = [self.inputs_of(row[None], generator_of(seed, epoch % self.views, int(row))) for row in rows]
        return tuple(torch.cat(parts) for parts in zip(*each, strict=True))

    def _order(self, epoch: int, seed: int) -> tuple[Tensor, ...]:
        """Return the rows of each batch; the last epoch's are kept, since batches are made one by one."""
        key = (epoch, seed, self.batch_size)
        if self._last_order[0] != key:
            order = torch.randperm(len(self._parts["train"]), generator=generator_of(seed, epoch))
            self._last_order = (key, order.split(self.batch_size))
        return self._last_order[1]

    def _take(self, split: str, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the stored images (B, 3, T, T) uint8 and labels (B,) of rows of a split."""
        home, numbers = self._home[split], self._parts[split][rows]
        images, labels = self._data.pixels[home][numbers], self._data.labels[home][numbers]
        return torch.from_numpy(images), torch.from_numpy(labels)

    def _augmented(self, images: Tensor, generator: torch.Generator) -> Tensor:
        flips = torch.rand(len(images), generator=generator) < 0.5
        if self._data.layout.as_they_are:
            offsets = torch.randint(0, 2 * PADDING + 1, (len(images), 2), generator=generator)
            return padded_crops(images, offsets, flips)
        boxes = draw_boxes(len(images), images.shape[2], generator)
        return resized_crops(images, boxes, flips, self._size)

    def fingerprint(self) -> str:
        told = (
            self.model, self._size, self.batch_size, self.optimizer, self.learning_rate, self.weight_decay,
            self.momentum, self.validation, self.augment, self.views, self._classes, self._origin.digest(),
        )  # fmt: skip
        digest = hashlib.sha256(repr((self._data.digest, told)).encode())
        for package in (__file__, models.__file__):
            for path in sorted(Path(package).parent.glob("*.py")):
                digest.update(path.name.encode() + path.read_bytes())
        if ":" in self.model and self.model.partition(":")[0] not in LIBRARIES:
            digest.update(code_digest(self.model.partition(":")[0]).encode())
        return digest.hexdigest()

    @property
    def train_samples(self) -> int | None:
        return None if self.augment else len(self._parts["train"])

    @property
    def different_inputs(self) -> int | None:
        return self.train_samples if self.views is None else self.views * len(self._parts["train"])

    def samples(self) -> Samples:
        return _ImageSamples(self)

    def inputs_of(self, rows: Tensor, generator: torch.Generator) -> Batch:
        """Return training images of these rows as training sees them, and their labels."""
        images, labels = self._take("train", rows.numpy())
        images = self._augmented(images, generator) if self.augment else center_crops(images, self._size)
        return normalised(images, self._mean, self._deviation), labels

    def evaluate_a_little(self, model: nn.Module, device: Any) -> float:
        """Evaluate one validation batch; enough to detect a random model, since the data are fixed."""
        count = min(EVALUATION_BATCH_SIZE, len(self._parts["validation"]))
        return count_hits(model, islice(self.evaluation_batches("validation"), 1), device) / count

    @property
    def little_part(self) -> float:
        """Return 0, since one batch always suffices (`Workload.little_part`)."""
        return 0.0

    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        rows = np.arange(len(self._parts[split]))
        for at in range(0, len(rows), EVALUATION_BATCH_SIZE):
            images, labels = self._take(split, rows[at : at + EVALUATION_BATCH_SIZE])
            images = center_crops(images, self._size)
            yield normalised(images, self._mean, self._deviation), labels


class _ImageSamples(Samples):
    def __init__(self, images: Images) -> None:
        self._images = images
        self.count = len(images._parts["train"])
        self.batch_size = min(images.batch_size, self.count)

    def batch(self, numbers: Tensor, generator: torch.Generator) -> Batch:
        return self._images.inputs_of(numbers, generator)


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
