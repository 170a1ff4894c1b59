"""Per-sample gradients from layers' signals against a loop of backward passes over single samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.gradients import layer_signals
from trainables.gradients.layer_signals import LayerSignals, chunks, treatable_layers
from trainables.runtime.flops import flop_counter

COUNT = 4


class Twice(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


#: Models, and the shape of a sample.
MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3, bias=False)), (5,)),
    "sequences": (nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), (6, 3)),
    "images of vectors": (nn.Sequential(nn.Linear(2, 3), nn.Tanh()), (3, 2, 2)),
    "conv1d": (nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), nn.ReLU(inplace=True)), (2, 9)),
    "conv1d same": (nn.Conv1d(2, 3, 4, padding="same", padding_mode="reflect"), (2, 9)),
    "stride": (nn.Sequential(nn.Conv2d(2, 3, (3, 2), stride=(2, 1)), nn.ReLU(inplace=True)), (2, 7, 5)),
    "dilation": (nn.Conv2d(2, 3, (2, 3), padding=(1, 2), dilation=(2, 1), bias=False), (2, 6, 5)),
    "same": (nn.Conv2d(2, 3, (3, 4), padding="same"), (2, 6, 5)),
    "valid": (nn.Conv2d(2, 3, 3, padding="valid"), (2, 6, 5)),
    "circular": (nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="circular", stride=2), (2, 6, 5)),
    "two layers": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3, padding=1)), (2, 6, 6)),
    "twice": (Twice(), (3,)),
    "twice in sequences": (Twice(), (2, 3)),
}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return ((out * torch.arange(out[0].numel()).view(out[0].shape).cos()).sum() + out.square().sum()) / len(x)


@pytest.mark.parametrize("small_chunks", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_samples_and_their_norms(name: str, small_chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small_chunks:
        monkeypatch.setattr(layer_signals, "CHUNK_NUMBERS", 1)
    model, shape = MODELS[name]
    model.double()
    x = torch.randn(COUNT, *shape, dtype=torch.float64)
    layers = treatable_layers(model)
    assert layers
    plain = torch.autograd.grad(loss(model, x), list(model.parameters()))
    with LayerSignals(layers) as recorded:
        found = torch.autograd.grad(loss(model, x), list(model.parameters()))
    assert all(map(torch.equal, found, plain))  # recording changes nothing
    assert not recorded.edges
    assert set(recorded.signals) == set(layers)
    for layer, signal in recorded.signals.items():
        weight = layers[layer].weight
        single = torch.stack([torch.autograd.grad(loss(model, one[None]), weight)[0].flatten() for one in x]) / COUNT  # type: ignore[arg-type]
        torch.testing.assert_close(signal.sample_gradients().flatten(1), single)
        torch.testing.assert_close(signal.sample_gradients(slice(1, 3)).flatten(1), single[1:3])
        torch.testing.assert_close(signal.squared_norms(), single.square().sum(1))


@pytest.mark.parametrize(("places", "by_places"), [(1, True), (2, True), (9, False)])
def test_norms_cost_what_is_said_and_keep_within_the_memory(
    places: int, by_places: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 3)
    x = torch.randn(8, places, 4)
    with LayerSignals(treatable_layers(model) or {"": model}) as recorded:
        loss(model, x).backward()
    (signal,) = recorded.signals.values()
    monkeypatch.setattr(layer_signals, "CHUNK_NUMBERS", 3 * 4 * 3)
    sizes: list[int] = []
    plain = layer_signals.LayerSignal.sample_gradients

    def seen(self: layer_signals.LayerSignal, rows: slice = slice(None)) -> Tensor:
        found = plain(self, rows)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(layer_signals.LayerSignal, "sample_gradients", seen)
    with flop_counter() as counter:
        signal.squared_norms()
    assert counter.get_total_flops() == signal.squared_norms_flops
    assert sizes == ([] if by_places else [36, 36, 24])
    with flop_counter() as counter:
        plain(signal)
    assert places == 1 or counter.get_total_flops() == signal.per_sample_flops
    assert [len(range(100)[rows]) for rows in chunks(8, 1000)] == [1] * 8


def test_passes_without_a_gradient_are_not_recorded() -> None:
    model = nn.Linear(2, 2)
    with LayerSignals({"": model}) as recorded:
        with torch.no_grad():
            model(torch.zeros(3, 2))
        model(torch.zeros(3, 2))  # no backward pass
        F.mse_loss(model(torch.ones(3, 2)), torch.zeros(3, 2)).backward()
    assert len(recorded.calls("")) == 1
    assert torch.equal(recorded.signals[""].inputs, torch.ones(3, 1, 2))
