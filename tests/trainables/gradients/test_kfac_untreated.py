"""What K-FAC leaves its plain gradient: parameters of other layers, norms, and layers that have stopped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kfac_nets import method, table
from torch import Tensor, nn

from trainables.gradients.kfac import KFAC


class Mixed(nn.Module):
    """One treatable layer among others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.depthwise = nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose1d(4, 4, 1)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.gain = nn.Parameter(torch.ones(4))
        self.mixing = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).transpose(1, 2)
        x = self.norm(self.up(self.depthwise(x)).transpose(1, 2))
        x = self.recurrent(self.attention(x, x, x)[0])[0] * self.gain
        return self.head(self.mixing(x))


def test_untreated_parameters_pass_with_one_warning_that_names_them() -> None:
    tokens = torch.randint(7, (5, 3))
    model = Mixed()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    with pytest.warns(UserWarning, match="plain gradients are taken of gain, words.weight, depthwise.weight") as seen:
        found = KFAC(model, loss, (tokens, tokens), torch.optim.SGD(model.parameters(), lr=0.1), batch_size=5)
    assert len(seen) == 1
    assert "norm" not in str(seen[0].message)
    assert "and 10 more" in str(seen[0].message)
    assert seen[0].filename == __file__
    assert list(found.layers) == ["mixing"]
    for _ in range(2):
        found.step()
    draw = found.draw(found.generator())
    plain, direction = found.plain_gradient(draw), found.gradient(draw)
    for name in plain:
        assert torch.equal(plain[name], direction[name]) == (not name.startswith("mixing")), name


def test_layers_that_stop_are_left_out() -> None:
    """A layer whose parameters stop, a bias that stops alone, and all layers."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    found = method(model, table(), factor_every=1, inverse_every=1, kl_clip=1e-2)
    found.step()
    kept = found.factors["0"], found.bases["0"]
    for stopped in (*model[0].parameters(), model[2].bias):
        stopped.requires_grad_(False)
        stopped.grad = None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found.step()
    assert found.factors["0"] is kept[0]
    assert found.bases["0"] is kept[1]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not p.requires_grad)
        before[name] = p.detach().clone()
    found.factor_every = found.inverse_every = 100  # `grad` does not measure, so that it says what a step without does
    asked = found.grad()
    found.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - 0.1 * asked.get(name, torch.zeros_like(p)), p.detach())
    found.factors.clear()
    draw = found.draw(found.generator())
    model.requires_grad_(False)
    found.observe(draw, None)
    assert not found.factors
