"""Filters ranked by activations and gradients: who goes, what is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.pruners import build_pruner
from trainables.compression.pruners.pruner import Pruner
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.errors import UserError

NOW = Moment(epoch=0, timing=Timing())
SEEN = ["ActivationAPoZRankedFilterPruner", "ActivationMeanRankedFilterPruner", "GradientRankedFilterPruner"]


def model_of(filters: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, filters, 3), nn.ReLU(), nn.Conv2d(filters, filters, 3), nn.ReLU())


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(count)]


def pruner_of(class_: str, model: nn.Module, share: float = 0.5, **arguments: Any) -> Pruner:
    given = {"weights": ["0.weight"], "group_type": "Filters", "desired_sparsity": share, **arguments}
    return build_pruner("p", PRUNERS[class_](**given), model, seed=0)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gone(mask: Tensor) -> list[int]:
    rows = mask.flatten(1)
    assert bool(((rows == rows[:, :1]).all(dim=1)).all())
    return [i for i, row in enumerate(rows.tolist()) if row[0] == 0]


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.2, 1), (0.5, 3), (0.99, 5), (1.0, 6)])
@pytest.mark.parametrize(("class_", "largest_first"), [(SEEN[0], True), (SEEN[1], False)])
def test_most_zeros_or_smallest_mean_first(class_: str, largest_first: bool, share: float, count: int) -> None:
    model = model_of()
    pruner = pruner_of(class_, model, share)
    pruner.start(model)
    outputs = []
    for batch in batches(3):
        model(batch)
        outputs.append(model[0](batch).relu().detach())
    values = torch.cat(outputs).transpose(0, 1).flatten(1)
    scores = [sum(v == 0 for v in row) if largest_first else sum(row) for row in values.tolist()]
    assert len(set(scores)) == 6
    order = sorted(range(6), key=lambda i: scores[i], reverse=largest_first)
    assert gone(pruner.masks(weights_of(model), {}, NOW)["0.weight"]) == sorted(order[:count])


@pytest.mark.parametrize(("share", "count"), [(0.2, 1), (0.5, 3)])
def test_smallest_first_order_change_of_the_loss_first(share: float, count: int) -> None:
    model = model_of()
    pruner = pruner_of("GradientRankedFilterPruner", model, share)
    pruner.start(model)
    sums = [0.0] * 6
    direction = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(7))
    for batch in batches(3):
        model.zero_grad()
        (model(batch) * direction).sum().backward()
        gradient = model[0].weight.grad
        for i in range(6):
            pairs = zip(gradient[i].flatten().tolist(), model[0].weight[i].flatten().tolist(), strict=True)
            sums[i] += sum(g * w for g, w in pairs)
        with torch.no_grad():
            model[0].weight.sub_(0.001 * gradient)
    order = sorted(range(6), key=lambda i: abs(sums[i]))
    # Some sums are negative, so that the absolute value matters.
    signed = sorted(range(6), key=lambda i: sums[i])
    assert sorted(order[:count]) == gone(pruner.masks(weights_of(model), {}, NOW)["0.weight"])
    assert sorted(signed[:count]) != sorted(order[:count])


def test_gradients_that_accumulate_over_two_backwards_count_once() -> None:
    halves = {}
    for split in (False, True):
        model = model_of()
        pruner = pruner_of("GradientRankedFilterPruner", model)
        pruner.start(model)
        batch = batches(1)[0]
        for part in batch.chunk(2) if split else [batch]:
            model(part).square().sum().backward()
        halves[split] = pruner.state_dict()["sums"]["0.weight"]
    torch.testing.assert_close(halves[True], halves[False], rtol=1e-5, atol=1e-6)


def train(model: nn.Module, count: int = 1) -> None:
    for batch in batches(count):
        model.zero_grad()
        model(batch).square().sum().backward()


@pytest.mark.parametrize("class_", SEEN)
def test_nothing_seen_nothing_decided_and_what_was_seen_is_forgotten(class_: str) -> None:
    model = model_of()
    pruner = pruner_of(class_, model)
    assert pruner.epochs_before == 1
    assert pruner.masks(weights_of(model), {}, NOW) == {}
    pruner.start(model)
    assert pruner.masks(weights_of(model), {}, NOW) == {}
    train(model)
    assert len(gone(pruner.masks(weights_of(model), {}, NOW)["0.weight"])) == 3
    assert pruner.masks(weights_of(model), {}, NOW) == {}


@pytest.mark.parametrize("class_", SEEN)
def test_stopped_it_sees_nothing(class_: str) -> None:
    model = model_of()
    pruner = pruner_of(class_, model)
    pruner.start(model)
    pruner.stop()
    train(model)
    assert pruner.masks(weights_of(model), {}, NOW) == {}


@pytest.mark.parametrize("class_", SEEN)
def test_the_leader_alone_is_looked_at(class_: str) -> None:
    model = model_of()
    alone = pruner_of(class_, model)
    leading = pruner_of(class_, model, weights=["0.weight", "2.weight"], group_dependency="Leader")
    alone.start(model)
    leading.start(model)
    train(model)
    found = leading.masks(weights_of(model), {}, NOW)
    assert gone(found["0.weight"]) == gone(found["2.weight"])
    assert gone(found["0.weight"]) == gone(alone.masks(weights_of(model), {}, NOW)["0.weight"])


@pytest.mark.parametrize("class_", SEEN)
def test_thinned_after_it_was_seen_a_weight_waits(class_: str) -> None:
    model = model_of()
    pruner = pruner_of(class_, model)
    pruner.start(model)
    train(model)
    assert pruner.masks(weights_of(model_of(4)), {}, NOW) == {}


def test_a_weight_that_is_frozen_first_is_seen_once_it_trains() -> None:
    model = model_of()
    model[0].weight.requires_grad_(False)
    pruner = pruner_of("GradientRankedFilterPruner", model)
    pruner.start(model)
    assert not model[0].weight.requires_grad
    train(model)
    assert pruner.masks(weights_of(model), {}, NOW) == {}
    model[0].weight.requires_grad_(True)
    train(model)
    assert len(gone(pruner.masks(weights_of(model), {}, NOW)["0.weight"])) == 3


@pytest.mark.parametrize("class_", SEEN[:2])
def test_a_weight_that_is_no_convolutions_is_refused_at_once(class_: str) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3))
    with pytest.raises(UserError, match=r"needs weights of convolutions, got 0\.weight of ConvTranspose2d"):
        pruner_of(class_, model)
