"""Importance sampling: unbiased, its scores against loops over samples, its weights, its variance, and its use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampled_nets import (
    cross_entropy,
    difference,
    each_gradient,
    mean_of,
    squared_norm,
    table,
    table_net,
)
from torch import Tensor, nn

from trainables.gradients.importance_sampling import ImportanceSampling

COUNT, SIZE = 20, 5
SCORES = ("loss", "output_gradient")


def method(model: nn.Module, data: Any, **more: Any) -> ImportanceSampling:
    optimizer = torch.optim.SGD(model.parameters(), lr=more.pop("lr", 0.1))
    return ImportanceSampling(model, cross_entropy, data, optimizer, **{"batch_size": SIZE, **more})


def scored(model: nn.Module, data: Any, **more: Any) -> ImportanceSampling:
    """Return a method with a score for some samples."""
    found = method(model, data, **more)
    found.scores = torch.where(torch.arange(COUNT) % 5 > 0, torch.rand(COUNT, dtype=torch.float64) ** 3, torch.nan)
    return found


def expected_scores(by: str, model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    logits = model(data[0]).detach()
    if by == "loss":
        return F.cross_entropy(logits, data[1], reduction="none")
    return (logits.softmax(1) - F.one_hot(data[1], 3)).norm(dim=1)


def test_the_expected_gradient_is_the_mean() -> None:
    """sum_i p_i w_i g_i, with the method's own weighted gradients of draws of one sample."""
    model, data = table_net(), table(COUNT)
    found = scored(model, data, batch_size=1, uniform=0.2)
    p = found.probabilities()
    assert float(p.sum()) == pytest.approx(1)
    assert p.max() > 3 * p.min()
    source = torch.Generator().manual_seed(0)
    single = [found.gradient(found.drawn(torch.tensor([i]), source, 1 / (COUNT * p[[i]]))) for i in range(COUNT)]
    torch.testing.assert_close(mean_of(single, p.tolist()), mean_of(each_gradient(model, data)), rtol=1e-12, atol=1e-14)


def test_draws_have_these_probabilities_and_weights() -> None:
    """Chi-square of 19 degrees of freedom below its quantile of 1 - 1e-4, 50.8; effective size to 2 %."""
    found = scored(table_net(), table(COUNT), batch_size=20, uniform=0.3)
    p = found.probabilities()
    source = torch.Generator().manual_seed(0)
    draws = [found.draw(source) for _ in range(1500)]
    numbers = torch.cat([draw.numbers for draw in draws])  # type: ignore[misc]
    weights = torch.cat([draw.weights for draw in draws])  # type: ignore[misc]
    expected = p * len(numbers)
    assert float(((numbers.bincount(minlength=COUNT) - expected) ** 2 / expected).sum()) < 50.8
    torch.testing.assert_close(weights, 1 / (COUNT * p[numbers]))
    assert float(weights.max()) <= 1 / 0.3 + 1e-12
    share = float(weights.sum() ** 2 / weights.square().sum()) / len(weights)
    assert found.effective_share() == pytest.approx(share, rel=0.02)
    assert method(table_net(), table(COUNT)).effective_share() == pytest.approx(1)
    unseen = found.scores.isnan()
    torch.testing.assert_close(p[unseen], (0.7 * found.scores[~unseen].mean() / filled(found) + 0.3 / COUNT).expand(4))


def filled(found: ImportanceSampling) -> Tensor:
    """Return the sum of scores, with the mean for unseen samples."""
    return found.scores.nanmean() * COUNT


@pytest.mark.parametrize("by", SCORES)
def test_scores_of_weighted_steps_are_those_of_each_sample(by: str) -> None:
    model, data = table_net(), table(COUNT)
    found = scored(model, data, by=by, update_every=1, uniform=0.1)
    draw = found.draw(found.generator())
    assert draw.numbers is not None
    assert draw.weights is not None
    assert len(draw.weights.unique()) > 1
    expected = expected_scores(by, model, data)
    before = found.scores.clone()
    found.step()
    assert torch.equal(found.scores.nan_to_num(-1), before.nan_to_num(-1))  # not before the next step
    found.refresh()
    torch.testing.assert_close(found.scores[draw.numbers], expected[draw.numbers])
    others = torch.ones(COUNT, dtype=torch.bool).index_fill(0, draw.numbers, False)
    assert torch.equal(found.scores[others].nan_to_num(-1), before[others].nan_to_num(-1))


@pytest.mark.parametrize("by", SCORES)
def test_where_few_samples_have_loss_the_variance_is_below_that_of_sgd(by: str) -> None:
    """Trained on all samples but three; variance of single draws, exact over all samples."""
    model, (x, y) = table_net(), table(COUNT)
    y = model(x).argmax(1)
    with torch.no_grad():
        model[2].weight *= 30
    y[:3] = (y[:3] + 1) % 3
    found = method(model, (x, y), by=by, batch_size=COUNT, uniform=0.2, update_every=1, lr=0.0)
    for _ in range(8):
        found.step()
    single = each_gradient(model, (x, y))
    mean = mean_of(single)

    def variance(p: Tensor) -> float:
        parts = [{n: t / (COUNT * q) for n, t in g.items()} for g, q in zip(single, p.tolist(), strict=True)]
        return sum(q * squared_norm(difference(g, mean)) for g, q in zip(parts, p.tolist(), strict=True))

    assert found.scores.isfinite().all()
    assert variance(found.probabilities()) < 0.6 * variance(torch.full((COUNT,), 1 / COUNT, dtype=torch.float64))
