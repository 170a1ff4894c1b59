"""Masks that are saved, loaded, or rebound to a model that changed."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from masked_lines import MOMENTUM, RATE, START, line, row, step, weights_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainables.compression.masks import Masks, parameters_as_built
from trainables.errors import UserError


def round_trip(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("mask", [row(1, 0, 1, 0), row(2, 0, 2, 0)], ids=["zeros and ones", "scaled up"])
def test_a_resumed_run_goes_on_bit_for_bit(mask: Tensor, forward_only: bool) -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True, mask_on_forward_only=forward_only)
    masks.mask_gradients("weight", True)
    masks.set("weight", mask)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    step(model, masks, optimizer, 0)
    saved = round_trip({"masks": masks.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()})

    other = line()
    resumed = Masks(other)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["masks"])
    second = torch.optim.SGD(other.parameters(), lr=RATE, momentum=MOMENTUM)
    second.load_state_dict(saved["optimizer"])
    for number in (1, 2):
        assert step(other, resumed, second, number) == step(model, masks, optimizer, number)
        assert weights_of(other) == weights_of(model)


def test_a_pending_regularization_mask_is_in_the_state() -> None:
    masks = Masks(line())
    masks.set("weight", row(0, 1, 1, 1), is_regularization_mask=True)
    model = line()
    other = Masks(model)
    other.load_state_dict(round_trip(masks.state_dict()))
    other.apply(forward=False)
    assert weights_of(model) == [0.0, -0.4, 0.3, 1.5]


class Doubled(nn.Module):
    """A parametrization: twice the weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_weight_parametrized_before_or_after_has_the_name_and_mask_as_built() -> None:
    model = nn.Sequential(line())
    before = Masks(model)
    parametrize.register_parametrization(model[0], "weight", Doubled())
    assert list(parameters_as_built(model)) == ["0.weight"]
    after = Masks(model)
    before.set("0.weight", row(0, 1, 1, 1))
    after.set("0.weight", row(1, 0, 1, 1))
    before.apply(forward=True)
    after.apply(forward=True)
    assert model(row(1, 10, 100, 1000)).item() == pytest.approx(2 * (0.3 * 100 + 1.5 * 1000))


def test_rebound_to_a_thinned_model_masks_that_no_longer_fit_are_dropped() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    masks = Masks(model)
    for name in ("0.weight", "1.weight", "1.bias"):
        masks.set(name, torch.zeros_like(model.get_parameter(name)))
        masks.mask_gradients(name, True)
    thinned = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    masks.rebind(thinned)
    assert masks.names() == ("1.bias",)
    masks.apply(forward=True)
    assert thinned[1].bias.tolist() == [0, 0]
    assert bool((thinned[1].weight != 0).all())
    thinned(torch.ones(1, 3)).sum().backward()
    assert thinned[1].bias.grad.tolist() == [0, 0]
    assert bool((thinned[1].weight.grad != 0).all())
    # The model that was left has no hook any more.
    model(torch.ones(1, 3)).sum().backward()
    assert model[1].bias.grad.tolist() == [1, 1]


def test_rebound_where_a_parameter_is_gone() -> None:
    masks = Masks(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    masks.set("1.bias", torch.zeros(2))
    masks.mask_gradients("1.bias", True)
    masks.rebind(nn.Sequential(nn.Linear(3, 4)))
    assert masks.names() == ()
    with pytest.raises(UserError, match=r"unknown parameter '1\.bias'"):
        masks.get("1.bias")


def test_rebound_to_the_moved_model_masks_have_its_type() -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True)
    masks.set("weight", row(1, 0, 1, 0))
    masks.apply(forward=True)
    model.to(torch.bfloat16)
    masks.rebind(model)
    masks.apply(forward=True)
    assert masks.names() == ("weight",)
    assert model.weight.dtype == torch.bfloat16
    masks.restore()
    assert weights_of(model) == pytest.approx(START, rel=0.01)
