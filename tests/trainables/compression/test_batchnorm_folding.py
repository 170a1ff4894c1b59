"""Folding batch norm into convolutions: which belong together, and the function stays the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.compression.policies import batchnorms_after, folded


class Crossed(nn.Module):
    """Modules in another order than that of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_b, self.norm_a = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.a, self.b, self.alone = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)
        self.late = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_a(self.a(x)).relu()
        x = self.norm_b(self.b(x))
        return self.late(self.alone(x).relu())


def trained(model: nn.Module) -> nn.Module:
    """With statistics and scales that are not those of the beginning."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                if tensor is not None:
                    nn.init.uniform_(tensor, 0.2, 2, generator=generator)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.dim() > 1}


def test_pairs_follow_the_data_and_nothing_between() -> None:
    model = Crossed()
    assert batchnorms_after(model, lambda m: m(torch.ones(1, 3, 8, 8))) == {"a": "norm_a", "b": "norm_b"}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("model", "batch"),
    [
        ([nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d], (4, 3, 6, 6)),
        ([nn.Conv1d(3, 5, 3, bias=False), nn.BatchNorm1d], (4, 3, 6)),
    ],
    ids=["2d", "1d"],
)
def test_the_folded_convolution_computes_what_both_did(
    model: list[nn.Module], batch: tuple[int, ...], affine: bool
) -> None:
    pair = trained(nn.Sequential(model[0], model[1](5, eps=0.1, affine=affine))).eval()  # type: ignore[operator]
    x = torch.randn(batch, generator=torch.Generator().manual_seed(1))
    convolve = F.conv2d if len(batch) == 4 else F.conv1d
    weight = folded(weights_of(pair), pair, batchnorms_after(pair, lambda m: m(x)))["0.weight"]
    norm = pair[1]
    scale = (norm.weight if affine else 1) / (norm.running_var + norm.eps).sqrt()
    bias = (norm.bias if affine else 0) - norm.running_mean * scale
    torch.testing.assert_close(convolve(x, weight, bias), pair(x))
