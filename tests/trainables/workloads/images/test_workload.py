"""The workload `images`: batches, splits, evaluation, schedule, and a model that learns from files."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import noise, write_folder, write_parquet
from torch import Tensor, nn

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.run import TrainingRun
from trainables.workloads.base import Batch
from trainables.workloads.images.workload import Images, hold_out

COUNT, SIDE = 50, 9
LABELS = [number % 3 for number in range(COUNT)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_parquet(tmp_path / "data" / "train-0.parquet", noise(COUNT, SIDE), LABELS)
    write_parquet(tmp_path / "data" / "test-0.parquet", noise(20, SIDE, seed=1), LABELS[:20])
    return tmp_path / "data"


def images_of(data: Path, **options: Any) -> Images:
    return Images(data=str(data), cache=str(data.parent / "cache"), **{"batch_size": 8, **options})


def equal(some: list[Batch], others: list[Batch]) -> bool:
    pairs = list(itertools.zip_longest(some, others))
    return all(a is not None and b is not None and all(map(torch.equal, a, b)) for a, b in pairs)


def plain(pixels: np.ndarray, training: np.ndarray) -> np.ndarray:
    """(N, 3, H, W) float64, normalised by numpy's mean and deviation of the training pixels."""
    mean, deviation = training.mean(axis=(0, 1, 2)), training.std(axis=(0, 1, 2))
    return ((pixels - mean) / deviation).transpose(0, 3, 1, 2)


def test_without_augmentation_batches_are_the_images_themselves(data: Path) -> None:
    images = images_of(data, augment=False)
    train, validation = hold_out(np.array(LABELS), 0.1)
    assert images.train_samples == images.different_inputs == len(train) == 45
    assert images.steps_per_epoch == 6
    expected = plain(noise(COUNT, SIDE)[train], noise(COUNT, SIDE)[train])
    batches = list(images.train_batches(2, 7))
    indices = images._order(2, 7)
    assert [len(labels) for _, labels in batches] == [8, 8, 8, 8, 8, 5]
    assert sorted(torch.cat(indices).tolist()) == list(range(45))
    for (inputs, labels), rows in zip(batches, indices, strict=True):
        assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
        np.testing.assert_allclose(inputs, expected[rows], atol=1e-5)
        assert labels.tolist() == [LABELS[train[row]] for row in rows]
    assert len(validation) == 5


def test_views_of_augmented_images_repeat(data: Path) -> None:
    images, plain_views = images_of(data, views=2), images_of(data, views=1)
    assert (images.different_inputs, plain_views.different_inputs) == (90, 45)
    each = [torch.cat([inputs for inputs, _ in images.train_batches(epoch, 7)]) for epoch in range(3)]
    first, second, third = ({row.numpy().tobytes() for row in rows} for rows in each)
    assert first == third
    assert len(first & second) < 10
    assert len(first) == 45


def test_augmented_small_images_are_crops_of_the_images(data: Path) -> None:
    images = images_of(data)
    train, _ = hold_out(np.array(LABELS), 0.1)
    assert images.different_inputs is None
    padded = plain(np.pad(noise(COUNT, SIDE)[train], ((0, 0), (4, 4), (4, 4), (0, 0))), noise(COUNT, SIDE)[train])
    crops = np.lib.stride_tricks.sliding_window_view(padded, (SIDE, SIDE), axis=(2, 3))  # (44, 3, 9, 9, 9, 9)
    crops = np.stack([crops, crops[..., ::-1]], axis=2).transpose(0, 2, 3, 4, 1, 5, 6)
    every = crops.reshape(-1, 3 * SIDE * SIDE)  # by image, mirrored or not, top, left
    found = []
    for inputs, labels in images.train_batches(0, 0):
        for image, label in zip(inputs.numpy().reshape(len(inputs), -1), labels.tolist(), strict=True):
            distances = np.abs(every - image).max(axis=1)
            nearest = int(distances.argmin())
            assert distances[nearest] < 1e-5
            number, mirrored, top, left = np.unravel_index(nearest, crops.shape[:4])
            assert LABELS[train[number]] == label
            found.append((int(number), int(mirrored), int(top), int(left)))
    assert sorted(number for number, *_ in found) == list(range(45))
    assert len({draw[1:] for draw in found}) > 30  # places of their own


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("image_size", [None, 8])
def test_batches_are_a_function_of_epoch_and_seed(data: Path, augment: bool, image_size: int | None) -> None:
    images = images_of(data, augment=augment, image_size=image_size)
    state = torch.get_rng_state()
    batches = list(images.train_batches(1, 5))
    assert all(inputs.shape[1:] == (3, image_size or SIDE, image_size or SIDE) for inputs, _ in batches)
    assert equal(batches, list(images_of(data, augment=augment, image_size=image_size).train_batches(1, 5)))
    for start in (0, 1, 4, 6):
        assert equal(batches[start:], list(images.train_batches_from(1, 5, start)))
    assert not equal(batches, list(images.train_batches(2, 5)))
    assert not equal(batches, list(images.train_batches(1, 6)))
    assert torch.equal(state, torch.get_rng_state())


def test_splits(data: Path) -> None:
    assert images_of(data).splits == ("train", "validation", "test")
    (data / "test-0.parquet").unlink()
    held_out = images_of(data)
    assert held_out.splits == ("train", "validation")
    write_parquet(data / "validation-0.parquet", noise(7, SIDE, seed=2), LABELS[:7])
    given = images_of(data, augment=False)
    assert given.train_samples == COUNT
    assert (given.splits, held_out.steps_per_epoch, given.steps_per_epoch) == (("train", "validation"), 6, 7)
    with pytest.raises(UserError, match=r"unknown split 'test'.*Valid: train, validation"):
        given.evaluate(nn.Identity(), "test", "cpu")


class Bright(nn.Module):
    """Says 1 where the first pixel is brighter than the mean."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([torch.zeros(len(inputs)), inputs[:, 0, 0, 0]], dim=1)


def test_accuracy_is_the_share_of_right_answers(tmp_path: Path) -> None:
    pixels = noise(600, 4)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 600)
    write_parquet(tmp_path / "data" / "train-0.parquet", pixels[:300], labels[:300])
    write_parquet(tmp_path / "data" / "test-0.parquet", pixels[300:], labels[300:])  # more than a batch
    images = images_of(tmp_path / "data")
    train, validation = hold_out(labels[:300], 0.1)
    mean = pixels[train][..., 0].mean()
    bright = pixels[:, 0, 0, 0] > mean
    assert images.evaluate(Bright(), "test", "cpu") == np.mean(bright[300:] == labels[300:])
    assert images.evaluate(Bright(), "validation", "cpu") == np.mean(bright[validation] == labels[validation])


def test_larger_images_are_evaluated_on_the_square_in_the_middle(tmp_path: Path) -> None:
    pixels = noise(12, 64)
    write_folder(tmp_path / "data" / "train", pixels, ["a", "b"] * 6)
    write_folder(tmp_path / "data" / "val", pixels, ["a", "b"] * 6)
    images = images_of(tmp_path / "data", image_size=56)  # kept at 64, so nothing is resized

    class Seen(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            self.inputs = inputs
            return inputs[:, :2, 0, 0]

    model = Seen()
    images.evaluate(model, "validation", "cpu")
    order = [*range(0, 12, 2), *range(1, 12, 2)]
    np.testing.assert_allclose(model.inputs, plain(pixels[order], pixels)[:, :, 4:60, 4:60], atol=1e-5)
    assert [tuple(inputs.shape) for inputs, _ in images.train_batches(0, 0)] == [(8, 3, 56, 56), (4, 3, 56, 56)]


def test_optimizer_and_schedule(data: Path) -> None:
    images = images_of(data, learning_rate=0.4, momentum=0.8, weight_decay=0.01)
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = images.make_optimizer([("weight", parameter)])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.4, 0.8, 0.01)
    assert group["param_names"] == ["weight"]
    for epochs, warm_up in ((20, 6), (110, 30)):  # 5 % of 120 steps; 5 epochs of 6 steps
        optimizer = images.make_optimizer([("weight", parameter)])
        scheduler = images.make_scheduler(optimizer, 6 * epochs)
        rates = []
        for _ in range(6 * epochs):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
        assert rates[warm_up] == max(rates) == pytest.approx(0.4)
        assert np.diff(rates[: warm_up + 1]) == pytest.approx(0.4 / (warm_up + 1))
        middle = (warm_up + 6 * epochs) // 2
        assert rates[middle] == pytest.approx(0.2)
        quarter = warm_up + (6 * epochs - warm_up) // 3
        assert rates[quarter] == pytest.approx(0.4 * 0.75)
    scheduler = images.make_scheduler(images.make_optimizer([("weight", parameter)]), 3)  # too short to warm up
    assert scheduler.get_last_lr() == [0.4]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"batch_size": 0}, "batch_size of workload images must be an integer >= 1, got 0"),
        ({"image_size": 4}, "image_size of workload images must be an integer >= 8, got 4"),
        ({"classes": 1}, "classes of workload images must be an integer >= 2, got 1"),
        ({"learning_rate": math.nan}, "learning_rate of workload images must be a number > 0, got nan"),
        ({"weight_decay": -1}, "weight_decay of workload images must be a number >= 0, got -1"),
        ({"momentum": 1}, r"momentum of workload images must be a number in \[0, 1\), got 1"),
        ({"validation": 0}, r"validation of workload images must be a share in \(0, 1\), got 0"),
        ({"cache_limit_gb": -1}, "cache_limit_gb of workload images must be a number >= 0, got -1"),
        ({"optimizer": "adam"}, "unknown optimizer of workload images 'adam': did you mean"),
        ({"model": "resnet19"}, "unknown model 'resnet19': did you mean"),
        ({"classes": 10}, "must have training images of all 10 classes, and none has label 3, 4, 5, 6, 7: number"),
    ],
)
def test_options_out_of_range(data: Path, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        images_of(data, **options).check(0)


def test_fingerprint_and_key(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text("from torch import nn\ndef net(num_classes): return nn.Linear(1, 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    same = images_of(data)
    assert images_of(data).fingerprint() == same.fingerprint()
    elsewhere = Images(data=str(data), cache=str(tmp_path / "elsewhere"), batch_size=8, cache_limit_gb=1.0)
    assert elsewhere.fingerprint() == same.fingerprint()
    others = [
        images_of(data, **option)
        for option in (
            {"batch_size": 9}, {"augment": False}, {"learning_rate": 0.2}, {"momentum": 0.0}, {"weight_decay": 0.0},
            {"validation": 0.2}, {"image_size": 8}, {"model": "resnet56"}, {"model": "my_models:net"},
        )
    ]  # fmt: skip
    own = others[-1]
    prints = [one.fingerprint() for one in others]
    (tmp_path / "my_models.py").write_text("from torch import nn\ndef net(num_classes): return nn.Linear(2, 1)\n")
    prints.append(own.fingerprint())
    write_parquet(data / "train-0.parquet", noise(COUNT, SIDE, seed=3), LABELS)
    prints.append(images_of(data).fingerprint())
    assert len({same.fingerprint(), *prints}) == len(prints) + 1
    assert images_of(data, learning_rate=0.2).key == same.key
    assert len({same.key, *(one.key for one in others)}) == 1 + 4  # size, models, and whether there is momentum
    hash(same.key)


def test_a_model_learns_from_files(tmp_path: Path) -> None:
    """Through the command line's door: a name and texts."""
    pixels = noise(96, 12) // 2
    for number in range(96):
        pixels[number, :, :, number % 2] += 60  # red or green
    write_parquet(tmp_path / "data" / "train-0.parquet", pixels, [n % 2 for n in range(96)])
    options = (
        f"data={tmp_path / 'data'}", f"cache={tmp_path / 'cache'}", "batch_size=16", "validation=0.25", "classes=2",
        "image_size=none", "augment=yes", "learning_rate=0.02",
    )  # fmt: skip
    config = TrialConfig(workload="images", method="none", epochs=4, workload_options=options)
    with TrainingRun(config) as run:
        images = run.workload
        assert isinstance(images, Images)
        assert (images.batch_size, images.image_size, images.augment, images.classes) == (16, None, True, 2)
        rows = [run.train_epoch() for _ in range(4)]
    assert rows[-1]["quality"] > 0.9
