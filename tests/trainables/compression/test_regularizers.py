"""Regularizers against slow loops over single elements in plain Python, and closed forms of their gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.regularizers import Regularizer, build_regularizer
from trainables.compression.schedule.configs import REGULARIZERS
from trainables.errors import UserError


class Model(nn.Module):
    """Weights of all the shapes that groups are of; nobody runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2, bias=False)
        self.line = nn.Conv1d(3, 4, 5, bias=False)
        self.fc = nn.Linear(5, 4)


@pytest.fixture
def model() -> nn.Module:
    model = Model()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def build(class_name: str, model: nn.Module, **arguments: Any) -> Regularizer:
    return build_regularizer("mine", REGULARIZERS[class_name](**arguments), model)


#: What an element's index says of its group, for each kind.
GROUP_OF: dict[str, Callable[[tuple[int, ...]], Hashable]] = {
    "2D": lambda index: index[:2],
    "3D": lambda index: index[0],
    "Filters": lambda index: index[0],
    "Channels": lambda index: index[1],
    "4D": lambda index: "all",
    "Rows": lambda index: index[0],
    "Cols": lambda index: index[1],
}


def groups_by_hand(weight: Tensor, kind: str) -> dict[Hashable, list[float]]:
    """Every group's elements, found one element at a time."""
    groups = defaultdict(list)
    for index in product(*(range(size) for size in weight.shape)):
        groups[GROUP_OF[kind](index)].append(weight[index].item())
    return groups


def norms_by_hand(weight: Tensor, kind: str) -> dict[Hashable, float]:
    return {key: math.sqrt(sum(w * w for w in group)) for key, group in groups_by_hand(weight, kind).items()}


LASSO = [
    ("conv.weight", "2D"), ("conv.weight", "3D"), ("conv.weight", "Filters"), ("conv.weight", "Channels"),
    ("conv.weight", "4D"), ("conv.weight", "Channels+4D"), ("conv.weight", "4D+Channels"), ("line.weight", "3D"),
    ("line.weight", "Channels"), ("line.weight", "4D"), ("fc.weight", "Rows"), ("fc.weight", "Cols"),
    ("fc.weight", "Rows+Cols"), ("fc.weight", "Cols+Rows"),
]  # fmt: skip


def test_a_parametrized_weight_goes_by_its_name(model: nn.Module) -> None:
    nn.utils.parametrizations.orthogonal(model.fc)
    assert build("L1Regularizer", model, reg_regims={"fc.weight": 2.0}).targets == ("fc.weight",)


def test_l1_is_the_sum_of_absolute_values_and_its_gradient_the_sign(model: nn.Module) -> None:
    regularizer = build("L1Regularizer", model, reg_regims={"conv.weight": 0.25, "fc.*": 2.0})
    assert regularizer.targets == ("conv.weight", "fc.weight", "fc.bias")
    loss = regularizer.loss(weights_of(model))
    expected = sum(
        strength * abs(w)
        for name, strength in (("conv.weight", 0.25), ("fc.weight", 2.0), ("fc.bias", 2.0))
        for w in weights_of(model)[name].flatten().tolist()
    )
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    assert torch.equal(model.conv.weight.grad, 0.25 * model.conv.weight.detach().sign())
    assert model.line.weight.grad is None


@pytest.mark.parametrize(("name", "group"), LASSO)
def test_group_lasso_is_the_sum_of_the_groups_norms_and_its_gradient_their_unit_vector(
    model: nn.Module, name: str, group: str
) -> None:
    weight = weights_of(model)[name]
    loss = build("GroupLassoRegularizer", model, reg_regims={name: [0.3, group]}).loss(weights_of(model))
    norms = {kind: norms_by_hand(weight, kind) for kind in group.split("+")}
    assert loss.item() == pytest.approx(0.3 * sum(n for kind in norms for n in norms[kind].values()), rel=1e-12)
    loss.backward()
    for index in product(*(range(size) for size in weight.shape)):
        expected = sum(0.3 * weight[index].item() / norms[kind][GROUP_OF[kind](index)] for kind in norms)
        assert weight.grad is not None
        assert weight.grad[index].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("group", ["3D", "Filters", "Channels"])
def test_group_variance_is_lambda_over_the_unbiased_variance_of_the_norms(model: nn.Module, group: str) -> None:
    loss = build("GroupVarianceRegularizer", model, reg_regims={"conv.weight": [0.5, group]}).loss(weights_of(model))
    norms = list(norms_by_hand(model.conv.weight, group).values())
    mean = sum(norms) / len(norms)
    variance = sum((norm - mean) ** 2 for norm in norms) / (len(norms) - 1)
    assert loss.item() == pytest.approx(0.5 / variance, rel=1e-12)


@pytest.mark.parametrize("criterion", ["Max", "Mean_Abs"])
@pytest.mark.parametrize(("name", "group"), LASSO)
def test_group_masks_zero_what_is_at_most_lambda(model: nn.Module, name: str, group: str, criterion: str) -> None:
    weight = weights_of(model)[name]
    kinds = group.split("+")
    sizes: dict[str, dict[Hashable, float]] = {}
    for kind in kinds:
        absolutes = {key: [abs(w) for w in values] for key, values in groups_by_hand(weight, kind).items()}
        if criterion == "Max":
            sizes[kind] = {key: max(values) for key, values in absolutes.items()}
        else:
            sizes[kind] = {key: sum(values) / len(values) for key, values in absolutes.items()}
    # Halfway between two groups of the first kind, or above the only one.
    ordered = sorted(sizes[kinds[0]].values())
    middle = len(ordered) // 2
    threshold = (ordered[middle - 1] + ordered[middle]) / 2 if len(ordered) > 1 else 1.1 * ordered[0]
    regularizer = build(
        "GroupLassoRegularizer", model, reg_regims={name: [threshold, group]}, threshold_criteria=criterion
    )
    (mask,) = regularizer.masks(weights_of(model)).values()
    assert mask.shape == weight.shape
    assert mask.dtype == weight.dtype
    assert not mask.requires_grad
    for index in product(*(range(size) for size in weight.shape)):
        assert mask[index].item() == all(sizes[kind][GROUP_OF[kind](index)] > threshold for kind in kinds)
    assert mask.mean() < 1


def test_half_precision_is_summed_in_single() -> None:
    layer = nn.Linear(400, 400, bias=False).half()
    layer.weight.data.fill_(1.0)
    l1 = build("L1Regularizer", layer, reg_regims={"weight": 1.0}).loss(weights_of(layer))
    assert l1.item() == 160_000  # above the greatest number of half precision
    lasso = build("GroupLassoRegularizer", layer, reg_regims={"weight": [1.0, "Rows"]}).loss(weights_of(layer))
    assert lasso.item() == pytest.approx(400 * 20)


def test_a_weight_that_has_no_such_groups(model: nn.Module) -> None:
    for name, group, message in (
        ("fc.weight", "3D", "3D of fc.weight need a convolution's weight, 3 or 4 dimensions, got shape 4x5"),
        ("conv.weight", "Cols+Rows", r"Cols\+Rows of conv.weight need a matrix, 2 dimensions"),
    ):
        with pytest.raises(UserError, match=f"^regularizer mine: {message}"):
            build("GroupLassoRegularizer", model, reg_regims={name: [0.1, group]})


def test_one_group_has_no_variance() -> None:
    with pytest.raises(UserError) as raised:
        build("GroupVarianceRegularizer", nn.Conv2d(1, 4, 3), reg_regims={"weight": [0.1, "Channels"]})
    assert str(raised.value) == (
        "regularizer mine: the variance of group Channels needs at least two groups, but weight of shape "
        "[4, 1, 3, 3] has one"
    )
