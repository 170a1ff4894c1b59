"""Models and losses of which gradients are estimated: every kind of layer, tied and regularized weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tied(nn.Module):
    """A weight that embeds and decodes, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.twice = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 5, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.twice(torch.tanh(self.twice(self.embedding(tokens))))))


class Attention(nn.Module):
    """Normalisation, attention and an embedding that nothing else uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8, padding_idx=0)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.scale * self.attention(hidden, hidden, hidden, need_weights=False)[0].sum(-1)


def convolutions() -> nn.Sequential:
    """Every kind of convolution: strided, dilated, grouped, with other padding, in one to three dimensions."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, (2, 3), padding="same", groups=2, dilation=(1, 2)),
        nn.Sigmoid(),
        nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular", bias=False),
        nn.Flatten(2),
        nn.Conv1d(4, 3, 3, stride=3, padding="valid"),
        nn.Tanh(),
        nn.Unflatten(2, (1, 1, 5)),
        nn.Conv3d(3, 2, (1, 1, 2), dilation=(1, 1, 2), padding=(0, 0, 1)),
        nn.Flatten(),
        nn.Linear(10, 3),
    )


def cases() -> dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    torch.manual_seed(0)
    images, labels = torch.randn(3, 2, 8, 8, dtype=torch.float64), torch.tensor([0, 2, 1])
    tokens = torch.tensor([[0, 1, 4], [3, 3, 2]])
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)

    def regularized(model: nn.Module) -> Tensor:
        return F.mse_loss(model(x), y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())

    return {
        "convolutions": (convolutions().double(), lambda m: F.cross_entropy(m(images), labels)),
        "regularized": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), regularized),
        "batch norm": (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double(),
            lambda m: F.mse_loss(m(x), y),
        ),
        "tied": (Tied().double(), lambda m: m(tokens).logsumexp(-1).square().mean()),
        "attention": (Attention().double(), lambda m: m(tokens).square().mean()),
        "recurrent": (nn.LSTM(3, 2).double(), lambda m: m(x[:, None])[0].square().mean()),
        "dropout": (
            nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).double(),
            lambda m: F.mse_loss(m(x), y),
        ),
    }


CASES = cases()
