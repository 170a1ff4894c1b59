"""Small pictures of samples: what they show, and that nothing of a user's runs for them."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from trainables.workloads.base import Batch, Samples
from trainables.workloads.digits import Digits
from tune_cac.study.decoded_images import cluster_images


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


def test_pictures_are_the_samples_with_their_labels() -> None:
    found = cluster_images("digits", ["activations=binary"], [5, 3, 5])
    assert sorted(found) == [3, 5]
    samples = Digits().samples()
    assert samples is not None
    images, labels = samples.batch(torch.tensor([3, 5]), torch.Generator())
    for number, image, label in zip((3, 5), images[:, 0].numpy(), labels.tolist(), strict=True):
        low, high = image.min(), image.max()
        assert found[number].label == str(label)
        assert (found[number].width, found[number].height) == (16, 16)
        assert np.abs(pixels(found[number].png) - 255 * (image - low) / (high - low)).max() <= 0.5001


class Drawn(Samples):
    """Samples of any shape."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors, self.count = tensors, len(tensors[0])

    def batch(self, numbers: torch.Tensor, generator: torch.Generator) -> Batch:
        return tuple(tensor[numbers] for tensor in self.tensors)


def test_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*tensors: torch.Tensor, numbers: tuple[int, ...] = (0,)) -> dict:
        monkeypatch.setattr(Digits, "samples", lambda self: Drawn(*tensors))
        return cluster_images("digits", [], numbers)

    wide = found(torch.linspace(-3, 3, 3 * 60 * 120).reshape(1, 3, 60, 120))[0]
    assert (wide.width, wide.height, wide.label) == (48, 24, "")
    assert pixels(wide.png).shape == (24, 48, 3)
    flat = found(torch.full((1, 1, 4, 4), 7.0), torch.tensor([2]))[0]
    assert (pixels(flat.png) == 0).all()
    assert list(found(torch.zeros(2, 1, 4, 4), numbers=(1, 2, 99))) == [1]
    for tensor in (torch.zeros(1, 4), torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4)):
        assert found(tensor) == {}


def test_what_cannot_be_had_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "users_own.py").write_text("raise SystemExit('a user\\'s code ran')")
    monkeypatch.syspath_prepend(tmp_path)
    for workload, options in (
        ("users_own:factory", ()), ("script", ("command=touch made",)), ("rosenbrock", ()), ("text", ()),
        ("images", (f"data={tmp_path}", "model=users_own:net")), ("images", ()), ("digits", ("activations=none",)),
    ):  # fmt: skip
        assert cluster_images(workload, options, [0]) == {}, workload
    assert "users_own" not in sys.modules
    assert not Path("made").exists()
    monkeypatch.setattr(Digits, "samples", lambda self: 1 / 0)
    assert cluster_images("digits", [], [0]) == {}
