"""Models, data and losses for the tests of methods that choose or weigh samples; all in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
CLASSES = 3


class Shared(nn.Module):
    """A layer that is called twice, with a side branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.layer(x))
        return self.head(torch.tanh(self.layer(first)) + first)


class Mean(nn.Module):
    """The mean over the places of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, CLASSES))
    model[2].requires_grad_(False)
    return model


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Return models without batch norm, and the shape of a sample."""
    found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "linear": (table_net(), (5,)),
        "images": (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.GroupNorm(2, 4),
                nn.Conv2d(4, 4, 2, bias=False), nn.Flatten(), nn.Linear(4, CLASSES),
            ),
            (2, 8, 8),
        ),
        "grouped": (
            nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Tanh(), nn.Conv2d(8, 8, 2, groups=8, dilation=2), nn.ReLU(),
                          nn.Flatten(), nn.Linear(8 * 4, CLASSES)),
            (4, 6, 6),
        ),
        "conv1d": (
            nn.Sequential(nn.Conv1d(2, 4, 3, padding=(2,)), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, CLASSES)),
            (2, 7),
        ),
        "conv3d": (
            nn.Sequential(nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), nn.Tanh(), nn.Conv3d(2, 1, (2, 1, 1)), nn.Flatten(),
                          nn.Linear(8, CLASSES)),
            (1, 4, 4, 3),
        ),
        "sequences": (
            nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Linear(6, 4), nn.GELU(), Mean(),
                          nn.Linear(4, CLASSES)),
            (5, 3),
        ),
        "attention": (
            nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), Mean(),
                          nn.Linear(4, CLASSES)),
            (5, 4),
        ),
        "same": (
            nn.Sequential(nn.Conv2d(2, 3, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(48, CLASSES)),
            (2, 4, 4),
        ),
        "shared": (Shared(), (5,)),
        "frozen": (frozen(), (5,)),
    }  # fmt: skip
    return {name: (model.double(), shape) for name, (model, shape) in found.items()}


MODEL_NAMES = ("linear", "images", "grouped", "conv1d", "conv3d", "sequences", "attention", "same", "shared", "frozen")


def table_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, CLASSES)).double()


def noisy_net() -> nn.Sequential:
    """Return a model with dropout and batch norm."""
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(6, CLASSES)
    ).double()


def table(count: int = 12, shape: tuple[int, ...] = (5,)) -> Batch:
    return torch.randn(count, *shape, dtype=torch.float64), torch.randint(CLASSES, (count,))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients_of(value: Tensor, model: nn.Module) -> dict[str, Tensor]:
    places = trained(model)
    return dict(zip(places, torch.autograd.grad(value, list(places.values())), strict=True))


def each_gradient(model: nn.Module, batch: Batch) -> list[dict[str, Tensor]]:
    """Return the gradient of each sample's own loss, by a loop over the samples."""
    return [
        gradients_of(cross_entropy(model, tuple(part[i : i + 1] for part in batch)), model)
        for i in range(len(batch[0]))
    ]


def mean_of(gradients: list[dict[str, Tensor]], weights: list[float] | None = None) -> dict[str, Tensor]:
    """Return sum_i w_i g_i, where w_i is 1 / count if no weights are given."""
    given = weights or [1 / len(gradients)] * len(gradients)
    return {n: torch.stack([w * g[n] for w, g in zip(given, gradients, strict=True)]).sum(0) for n in gradients[0]}


def squared_norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([g.square().sum() for g in gradients.values()]).sum())


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one[name] - other[name] for name in one}
