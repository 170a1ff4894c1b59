"""Per-sample gradients from layers' signals against a loop of backward passes over single samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.gradients.layer_signals import LayerSignals, rows_of_inputs, rows_of_outputs, treatable_layers

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


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_samples(name: str) -> None:
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
    for layer, module in layers.items():
        gradients = sum(
            rows_of_outputs(module, gradient).transpose(1, 2) @ rows_of_inputs(module, inputs)
            for inputs, gradient in recorded.calls(layer)
        )
        single = torch.stack([torch.autograd.grad(loss(model, one[None]), module.weight)[0].flatten() for one in x])  # type: ignore[arg-type]
        torch.testing.assert_close(gradients.flatten(1), single / COUNT)


def test_passes_without_a_gradient_are_not_recorded() -> None:
    model = nn.Linear(2, 2)
    with LayerSignals({"": model}) as recorded:
        with torch.no_grad():
            model(torch.zeros(3, 2))
        model(torch.zeros(3, 2))  # no backward pass
        F.mse_loss(model(torch.ones(3, 2)), torch.zeros(3, 2)).backward()
    ((inputs, _),) = recorded.calls("")
    assert torch.equal(inputs, torch.ones(3, 2))
