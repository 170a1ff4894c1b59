"""Sizes against loops over single elements, MACs against torch's own count of FLOPs, and what a latency times."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainables.compression.measures import latency, layer_macs, size_columns
from trainables.runtime.operator_flops import flop_counter
from trainables.workloads.base import Batch
from trainables.workloads.digits import CONVOLUTIONS, IMAGE_SIZE, Digits


class Last(nn.Module):
    """Returns the outputs of a recurrent layer without its state."""

    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0]


def call(model: nn.Module, batch: Batch) -> object:
    return model(*batch)


def by_loop(weight: Tensor) -> tuple[int, int]:
    """Count nonzero elements, and elements in no zero filter or channel, one by one."""
    nonzero = outside = 0
    for index in product(*map(range, weight.shape)):
        nonzero += weight[index].item() != 0
        filter_lives = any(v != 0 for v in weight[index[0]].flatten().tolist())
        channel_lives = any(v != 0 for v in weight[:, index[1]].flatten().tolist())
        outside += filter_lives and channel_lives
    return nonzero, outside


def columns_of(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return the columns of a model that was not thinned."""
    macs = layer_macs(model, call, (x,))
    return size_columns(model, macs, sum(macs.values()))


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
def test_a_layer(layer: Any, x: Tensor) -> None:
    with torch.no_grad():  # scattered zeros, zero filters and zero channels
        layer.weight[torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(1)) < 0.4] = 0
        layer.weight[0] = 0
        layer.weight[:, -1] = 0
    model = nn.Sequential(layer)
    nonzero, outside = by_loop(layer.weight)
    with flop_counter() as counter:
        model(x)
    macs = counter.get_total_flops() / 2 / len(x)
    elements = layer.weight.numel()
    found = columns_of(model, x)
    assert json.loads(found.pop("layer_sparsity")) == {"0.weight": round(1 - nonzero / elements, 6)}
    assert found == pytest.approx(
        {
            "sparsity": 1 - nonzero / elements,
            "structured_sparsity": 1 - outside / elements,
            "dense_macs": macs,
            "effective_macs": round(macs * nonzero / elements),
            "inference_saved": 0,
            "sparse_inference_saved": 1 - nonzero / elements,
            "parameters": sum(p.numel() for p in layer.parameters()),
        }
    )


def test_the_digits_in_closed_form() -> None:
    workload = Digits()
    macs = layer_macs(workload.make_model(), workload.loss, next(iter(workload.train_batches(0, 0))))
    channels, size = 1, IMAGE_SIZE
    expected = []
    for width, stride in CONVOLUTIONS:
        size //= stride
        expected.append(9 * channels * width * size * size)
        channels = width
    assert list(macs.values()) == [*expected, 32 * 10]
    assert list(macs) == [*(f"conv{i}.weight" for i in range(1, 7)), "classifier.weight"]


def test_shared_weights_count_once_with_the_macs_of_all_uses() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    found = columns_of(nn.Sequential(model, model[0]), torch.zeros(2, 5))
    assert found["layer_sparsity"] == '{"0.0.weight": 0.0}'
    assert found["dense_macs"] == 75


@pytest.mark.parametrize(
    ("layer", "macs", "others"),
    [
        # Projections; queries with keys, and values weighted; output; two linear layers.
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 5 * (3 * 64 + 64 + 2 * 128) + 2 * 200, 5 * 256 + 400),
        (nn.Sequential(nn.LSTM(8, 6, batch_first=True), Last()), 5 * 4 * 6 * (8 + 6), 5 * 4 * 6 * (8 + 6)),
        (
            nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 4, bidirectional=True, batch_first=True), Last()),
            5 * 64 + 5 * 288,
            5 * 288,
        ),
    ],
)
def test_what_is_no_weight_layer_is_counted_and_never_sparse(layer: nn.Module, macs: int, others: int) -> None:
    """Attention and recurrent layers over 5 tokens of 8 features, in closed form."""
    found = layer_macs(layer, call, (torch.zeros(3, 5, 8),))
    assert sum(found.values()) == macs
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert size_columns(layer, found, macs)["effective_macs"] == others


class Tenfold(nn.Module):
    """Hides zeros."""

    def forward(self, weight: Tensor) -> Tensor:
        return 10 * weight + 1


def test_quantized_weights_count_as_the_float_weights_behind_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1)[0] = 0
    before = columns_of(model, torch.zeros(2, 4))
    parametrize.register_parametrization(model[0], "weight", Tenfold())
    assert columns_of(model, torch.zeros(2, 4)) == before
    assert before["sparsity"] == 0.25


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


# --- latency; no test depends on how long anything took ---------------------------------------------------------------


class Watched(nn.Module):
    """Notes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.dropout = nn.Dropout()
        self.calls: list[tuple[int, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((len(x), self.training, torch.is_grad_enabled()))
        torch.rand(1)
        result: Tensor = self.dropout(self.norm(self.layer(x)))
        return result


def test_passes_of_one_sample() -> None:
    model = Watched()
    assert 0 < latency(model, call, (torch.zeros(6, 3),)) < 60
    assert set(model.calls) == {(1, False, False)}


def test_modes_gradients_buffers_and_generators_are_as_before() -> None:
    model = Watched()
    model.norm.eval()
    model.layer.weight.grad = torch.ones(2, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    latency(model, call, (torch.randn(6, 3, generator=torch.Generator()),))
    with pytest.raises(RuntimeError, match="shapes"):
        latency(model, call, (torch.zeros(6, 4),))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [m.training for m in (model, model.layer, model.norm, model.dropout)] == [True, True, False, True]
    assert torch.equal(model.layer.weight.grad, torch.ones(2, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.is_grad_enabled()
