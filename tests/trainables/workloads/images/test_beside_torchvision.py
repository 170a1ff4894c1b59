"""A folder of images as torchvision's ImageFolder reads it: the same images, labels and classes, in the same order.

A model of torchvision has its names, its normalisation and its size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from image_files import noise, write_folder

SCRIPT = """
import sys
import torch
from torchvision_here import import_torchvision
from trainables.workloads.images.workload import Images

vision = import_torchvision()
folder, cache = sys.argv[1:]
theirs = vision.datasets.ImageFolder(folder, transform=vision.transforms.PILToTensor())
ours = Images(data=folder, cache=cache, validation=0.3, augment=False)
assert ours._data.labels["train"].tolist() == theirs.targets
pixels = torch.from_numpy(ours._data.pixels["train"][:])
assert torch.equal(pixels, torch.stack([image for image, _ in theirs]))
seen = torch.cat([images for images, _ in ours.train_batches(0, 0)])
rows = torch.from_numpy(ours._parts["train"])[torch.cat(ours._order(0, 0))]
expected = torch.stack([theirs[int(row)][0] for row in rows]).float()
mean, deviation = (expected.mean((0, 2, 3), keepdim=True), expected.std((0, 2, 3), keepdim=True, unbiased=False))
torch.testing.assert_close(seen, (expected - mean) / deviation, atol=2e-3, rtol=1e-3)

network = vision.models.resnet18()
torch.save(network.state_dict(), cache + "/own.pt")
tuned = Images(data=folder, cache=cache, model="torchvision:resnet18", weights=cache + "/own.pt")
mine, theirs = tuned.make_model().state_dict(), network.state_dict()
new = [name for name, value in theirs.items() if not torch.equal(mine[name], value)]
assert new == ["fc.weight", "fc.bias"], new
torch.testing.assert_close(tuned._mean.flatten() / 255, torch.tensor([0.485, 0.456, 0.406]))
assert tuned._size == 224
print("equal")
"""


@pytest.mark.slow
def test_images_and_models_are_those_of_torchvision(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", list(noise(40, 12)), [f"class {'badc'[number % 4]}" for number in range(40)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "data"), str(tmp_path / "cache")],
        capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )  # fmt: skip
    assert done.stdout == "equal\n", done.stderr
