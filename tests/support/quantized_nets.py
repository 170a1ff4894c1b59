"""A small network with every kind of layer that is quantized, and its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from trainables.compression.quantizers import Quantizer, build_quantizer
from trainables.compression.schedule.configs import QUANTIZERS, ComponentConfig

LOW_BITS: dict[str, dict[str, Any]] = {
    "DorefaQuantizer": {"bits_weights": 3, "bits_bias": 6, "bits_activations": 4},
    "WRPNQuantizer": {"bits_weights": 4, "bits_bias": 6, "bits_activations": 4},
    "PACTQuantizer": {"bits_weights": 3, "bits_bias": 6, "bits_activations": 4, "act_clip_init_val": 1.5},
    "QuantAwareTrainRangeLinearQuantizer": {
        "bits_weights": 4, "bits_bias": 6, "bits_activations": 4, "ema_decay": 0.9, "per_channel_wts": True,
    },
    "NCFQuantAwareTrainQuantizer": {"bits_weights": 4, "bits_bias": 6, "bits_activations": 4, "ema_decay": 0.9},
    "PostTrainLinearQuantizer": {
        "bits_parameters": 4, "bits_activations": 5, "bits_accum": 12, "clip_acts": "N_STD", "clip_n_stds": 2.0,
        "per_channel_wts": True, "mode": "ASYMMETRIC_UNSIGNED",
    },
}  # fmt: skip


NAMES = sorted(LOW_BITS)


class Net(nn.Module):
    """Every kind of layer that is quantized in two dimensions, a rectifier that is used twice, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.up = nn.ConvTranspose2d(4, 4, 2, groups=2)
        self.last = nn.ReLU6()
        self.same = self.last
        self.fc = nn.Linear(4 * 25, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.same(self.last(self.relu(self.up(x))))
        scores: Tensor = self.fc(x.flatten(1))
        return scores


def make_model(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def settings_of(name: str, **changes: Any) -> ComponentConfig:
    return QUANTIZERS[name].model_validate({**LOW_BITS[name], **changes})


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(6, 1, 4, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(count)
    ]


def prepared(name: str, **changes: Any) -> tuple[Net, SGD, Quantizer]:
    model = make_model()
    optimizer = SGD(model.named_parameters(), lr=0.05, momentum=0.9)
    quantizer = build_quantizer("q", settings_of(name, **changes), model)
    quantizer.prepare(model, optimizer)
    return model, optimizer, quantizer


def step(model: nn.Module, optimizer: SGD, batch: tuple[Tensor, Tensor]) -> float:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """Root mean square of the difference, over that of what is expected."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
