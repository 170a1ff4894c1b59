"""Models with zero filters, and a thinning that is checked against its record."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.thinning import Thinned, thin, thin_again

GENERATOR = torch.Generator()


def filled(model: nn.Module) -> nn.Module:
    """Weights, norms and running statistics of all kinds, in double precision and eval mode."""
    GENERATOR.manual_seed(3)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(0.2 + torch.rand(tensor.shape, generator=GENERATOR))
                if tensor.dim() > 1:
                    tensor.sub_(0.7)
    return model.double().eval()


def zero_filters(layers: Iterable[nn.Module], filters: list[int]) -> None:
    """Zero them in each layer, and what norms make of them."""
    with torch.no_grad():
        for layer in layers:
            for tensor in (layer.weight, layer.bias):
                if tensor is not None:
                    tensor[filters] = 0


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def thinned_alike(model: nn.Module, x: Tensor, **how: Any) -> Thinned:
    """Thin, and check that the outputs stay, that nothing else of the model changes, and the record."""
    fresh, before = copy.deepcopy(model), model(x).detach()
    found = thin(model, (x,), **how)
    assert torch.allclose(model(x), before, rtol=0, atol=1e-5)
    assert found.exact
    assert found.difference < 1e-9 * max(1.0, float(before.abs().max()))
    removed = thin_again(fresh, found.record)
    assert removed == found.removed
    assert torch.equal(fresh(x), model(x))
    return found


def widths(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """(outputs, inputs, groups) of convolutions, (outputs, inputs) of linear layers, (channels,) of norms."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            found[name] = (module.out_channels, module.in_channels, module.groups)
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels // module.groups)
        elif isinstance(module, nn.Linear):
            found[name] = (module.out_features, module.in_features)
            assert module.weight.shape == found[name]
        elif isinstance(module, nn.BatchNorm2d):
            found[name] = (module.num_features,)
            assert len(module.weight) == len(module.running_mean) == module.num_features
    return found


def stack() -> nn.Sequential:
    """Images (N, 3, 8, 8) to scores (N, 5): convolutions, a flattening, a linear layer."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
    )
    filled(model)
    return model


def with_norms() -> nn.Sequential:
    """The same with batch norms, and no biases before them."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip
    filled(model)
    return model
