"""Samples without loss gradient: the gradient of the rest, the unbiased form, and what is spared."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from sampled_nets import (
    MODEL_NAMES,
    cross_entropy,
    gradients_of,
    models,
    noisy_net,
    table,
    table_net,
)
from torch import Tensor, nn

from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.importance_sampling import ImportanceSampling
from trainables.gradients.zero_gradients import SkippingRows, ZeroGradients
from trainables.runtime.flops import flop_counter

COUNT = 8


def norms_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the distances between probabilities and labels."""
    logits = model(batch[0]).detach()
    return (logits.softmax(1) - F.one_hot(batch[1], logits.shape[1])).norm(dim=1)


def method(model: nn.Module, data: tuple[Tensor, ...], **more: object) -> ZeroGradients:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ZeroGradients(model, cross_entropy, data, optimizer, batch_size=COUNT, **more)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_gradient_and_step_are_those_of_the_samples_above_the_threshold(name: str) -> None:
    model, shape = models()[name]
    data = table(COUNT, shape)
    norms = norms_of(model, data)
    threshold = float(norms.median()) + 1e-9
    found = method(model, data, threshold=threshold)
    losses = F.cross_entropy(model(data[0]), data[1], reduction="none")
    with flop_counter() as plain:
        expected = gradients_of(((norms >= threshold) * losses).mean(), model)
    torch.testing.assert_close(found.gradient(found.draw(found.generator())), expected)
    found.meter.take()
    with flop_counter() as counter:
        loss = found.step()
    with flop_counter() as forwards, torch.no_grad():
        model(data[0])
    forward = forwards.get_total_flops()
    torch.testing.assert_close(loss, losses.mean().detach())
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, expected)
    spared = -found.meter.take().backward_flops
    assert counter.get_total_flops() - forward == plain.get_total_flops() - spared
    assert spared > 0


def test_unbiased_form_has_the_mean_gradient_and_the_expected_share() -> None:
    """Over 1000 seeds; five standard errors of the mean, found from the seeds themselves."""
    model, data = table_net(), table(COUNT)
    norms, threshold, seeds = norms_of(model, data), 0.9, 1000
    places = list(model.parameters())
    loss = cross_entropy(model, data)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, places)])
    found, kept = [], []
    for seed in range(seeds):
        with SkippingRows(model, COUNT, threshold, seed) as rows:
            gradients = torch.autograd.grad(cross_entropy(model, data), places)
        found.append(torch.cat([g.flatten() for g in gradients]))
        kept.append(rows.kept)
    samples = torch.stack(found)
    errors = samples.std(0) / seeds**0.5
    assert bool(((samples.mean(0) - expected).abs() <= 5 * errors + 1e-12).all())
    probabilities = (norms / threshold).clamp(max=1)
    deviation = float((probabilities * (1 - probabilities)).sum()) ** 0.5 / seeds**0.5
    assert abs(sum(kept) / seeds - float(probabilities.sum())) < 5 * deviation


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_tiny_threshold_is_plain_training_bit_for_bit(unbiased: bool) -> None:
    data = table(3 * COUNT)
    ends = []
    for kind in (GradientMethod, ZeroGradients):
        torch.manual_seed(3)
        model = noisy_net()
        options = {"threshold": 1e-12, "unbiased": unbiased} if kind is ZeroGradients else {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trained = kind(model, cross_entropy, data, optimizer, batch_size=COUNT, **options)
        for _ in range(10):
            trained.step()
        ends.append(model.state_dict())
        assert trained.meter.take().backward_flops == 0
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.slow
def test_no_graph_outlives_its_step() -> None:
    """A hook that holds its own tensor is a circle that Python cannot see; a training would grow step by step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    data = (torch.randn(12, 4), torch.randint(0, 3, (12,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for kind in (ZeroGradients, ImportanceSampling):
        method = kind(model, cross_entropy, data, optimizer, batch_size=6)
        counts = []
        for _ in range(3):
            for _ in range(20):
                method.step()
            gc.collect()
            counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
        assert counts[2] - counts[1] < 20, kind
