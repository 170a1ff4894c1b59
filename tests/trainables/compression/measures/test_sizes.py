"""Sizes against loops over single elements, and MACs against torch's own count of FLOPs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainables.compression.measures.sizes import Sizes, layer_macs, sparsity_now
from trainables.runtime.flops import flop_counter
from trainables.workloads.base import Batch
from trainables.workloads.digits import CONVOLUTIONS, IMAGE_SIZE, Digits
from trainables.workloads.models import build_model


def call(model: nn.Module, batch: Batch) -> object:
    return model(*batch)


def by_loop(weight: Tensor) -> tuple[int, int]:
    """(nonzero elements, elements in no zero filter or channel) of a weight, element by element."""
    nonzero = outside = 0
    for index in product(*map(range, weight.shape)):
        nonzero += weight[index].item() != 0
        filter_lives = any(v != 0 for v in weight[index[0]].flatten().tolist())
        channel_lives = any(v != 0 for v in weight[:, index[1]].flatten().tolist())
        outside += filter_lives and channel_lives
    return nonzero, outside


def sizes_of(model: nn.Module, x: Tensor) -> Sizes:
    """Sizes of a model that was not thinned."""
    macs = layer_macs(model, call, (x,))
    return sparsity_now(model, macs, sum(macs.values()))


def some_zero(weight: Tensor) -> None:
    """Scattered zeros, zero filters and zero channels."""
    with torch.no_grad():
        weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.4] = 0
        weight[0] = 0
        weight[:, -1] = 0


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv1d(4, 6, 3, stride=2), torch.randn(5, 4, 11)),
        (nn.Conv2d(4, 6, (3, 2), padding=1, groups=2), torch.randn(5, 4, 7, 8)),
        (nn.Conv3d(2, 3, 2), torch.randn(2, 2, 4, 5, 6)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), torch.randn(5, 4, 7, 7)),
        (nn.Linear(7, 3), torch.randn(5, 7)),
        (nn.Linear(7, 3, bias=False), torch.randn(5, 9, 7)),
    ],
)
def test_a_layer(layer: nn.Module, x: Tensor) -> None:
    assert isinstance(layer.weight, Tensor)
    some_zero(layer.weight)
    model = nn.Sequential(layer)
    sizes = sizes_of(model, x)
    (found,) = sizes.layers
    nonzero, outside = by_loop(layer.weight)
    with flop_counter() as counter:
        model(x)
    macs = counter.get_total_flops() / 2 / len(x)
    elements = layer.weight.numel()
    assert found.name == "0.weight"
    assert (found.elements, found.nonzero, found.outside_zero_structures) == (elements, nonzero, outside)
    assert found.dense_macs == sizes.dense_macs == macs
    assert found.effective_macs == sizes.effective_macs == pytest.approx(macs * nonzero / elements)
    assert sizes.sparsity == pytest.approx(1 - nonzero / elements)
    assert sizes.structured_sparsity == pytest.approx(1 - outside / elements)


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_macs_of_whole_models_are_half_the_flops_that_torch_counts(name: str) -> None:
    model = build_model(name, classes=10, image_size=32)
    x = torch.randn(2, 3, 32, 32)
    with flop_counter() as counter:
        model.eval()(x)
    assert sum(layer_macs(model, call, (x,)).values()) == counter.get_total_flops() / 2 / len(x)


def test_the_digits_in_closed_form() -> None:
    workload = Digits()
    model = workload.make_model()
    batch = next(iter(workload.train_batches(0, 0)))
    macs = layer_macs(model, workload.loss, batch)
    channels, size = 1, IMAGE_SIZE
    expected = []
    for width, stride in CONVOLUTIONS:
        size //= stride
        expected.append(9 * channels * width * size * size)
        channels = width
    assert list(macs.values()) == [*expected, 32 * 10]
    assert list(macs) == [*(f"conv{i}.weight" for i in range(1, 7)), "classifier.weight"]


def test_a_model_without_weight_layers() -> None:
    sizes = sizes_of(nn.Sequential(nn.BatchNorm1d(3)), torch.zeros(2, 3))
    assert (sizes.sparsity, sizes.structured_sparsity, sizes.inference_saved, sizes.dense_macs) == (0, 0, 0, 0)
    assert sizes.parameters == 6
    assert sparsity_now(nn.ReLU(), {}, 0) == Sizes(layers=(), parameters=0, reference_macs=0)


def test_shared_weights_count_once_with_the_macs_of_all_uses() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    sizes = sizes_of(nn.Sequential(model, model[0]), torch.zeros(2, 5))
    assert [(layer.name, layer.elements, layer.dense_macs) for layer in sizes.layers] == [("0.0.weight", 25, 75)]


class Tenfold(nn.Module):
    """Hides zeros."""

    def forward(self, weight: Tensor) -> Tensor:
        return 10 * weight + 1


def test_quantized_weights_count_as_the_float_weights_behind_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1)[0] = 0
    before = sizes_of(model, torch.zeros(2, 4))
    parametrize.register_parametrization(model[0], "weight", Tenfold())
    assert sizes_of(model, torch.zeros(2, 4)) == before
    assert before.sparsity == 0.25


class Looks(nn.Module):
    """Cannot run on the meta device: it makes a decision on a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.sum() > 1e9 else y + torch.ones(2)


def test_a_model_that_needs_numbers() -> None:
    assert layer_macs(Looks(), call, (torch.zeros(4, 3),)) == {"layer.weight": 6}
