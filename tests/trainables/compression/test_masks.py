"""Masks: how they act on weights, copies and gradients; saved, loaded, or rebound to a model that changed."""

from __future__ import annotations

import pytest
import torch
from masked_lines import line, row, weights_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainables.compression.masks import Masks, parameters_as_built


def test_a_regularization_mask_lives_for_one_application_and_leaves_the_other_mask() -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", mask_on_forward_only=True)
    masks.set("weight", row(1, 1, 0, 1))
    masks.set("weight", row(0, 1, 1, 1), is_regularization_mask=True)
    masks.apply(forward=False)
    assert weights_of(model) == [0.0, -0.4, 0.3, 1.5]
    with torch.no_grad():
        model.weight.fill_(1)
    masks.apply(forward=True)
    assert weights_of(model) == [1, 1, 0, 1]


def test_released_the_mask_acts_after_each_step_and_on_no_gradient() -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True, mask_on_forward_only=True)
    masks.mask_gradients("weight", True)
    masks.set("weight", row(1, 0, 1, 0))
    masks.apply(forward=True)
    masks.restore()
    masks.release("weight")
    assert weights_of(model) == [0.9, 0.0, 0.3, 0.0]
    model(row(1, 2, 3, 4)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.flatten().tolist() == [1, 2, 3, 4]
    with torch.no_grad():
        model.weight.fill_(1)
    masks.apply(forward=False)
    assert weights_of(model) == [1, 0, 1, 0]
    masks.restore()
    assert weights_of(model) == [1, 0, 1, 0]


def test_gradients_of_a_parameter_that_is_frozen_first_are_masked_once_it_trains() -> None:
    model = line()
    model.weight.requires_grad_(False)
    masks = Masks(model)
    masks.mask_gradients("weight", True)
    assert not model.weight.requires_grad
    masks.set("weight", row(1, 0, 1, 0))
    model.weight.requires_grad_(True)
    model(row(1, 2, 3, 4)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.flatten().tolist() == [1, 0, 3, 0]


def test_nothing_waits_for_the_device() -> None:
    # A tensor on the meta device has no values: whoever asks for one gets an error.
    model = nn.Linear(3, 2, device="meta")
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True)
    for name in ("weight", "bias"):
        masks.set(name, torch.ones_like(model.get_parameter(name)))
        masks.mask_gradients(name, True)
    masks.set("weight", torch.ones(2, 3, device="meta"), is_regularization_mask=True)
    masks.apply(forward=True)
    model(torch.ones(1, 3, device="meta")).sum().backward()
    masks.restore()
    masks.apply(forward=False)
    masks.discard(["bias"])
    masks.release("weight")
    assert masks.get("weight") is not None
    assert masks.get("bias") is None


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
    assert [name for name in ("0.weight", "1.weight", "1.bias") if masks.get(name) is not None] == ["1.bias"]
    masks.apply(forward=True)
    assert thinned[1].bias.tolist() == [0, 0]
    assert bool((thinned[1].weight != 0).all())
    thinned(torch.ones(1, 3)).sum().backward()
    assert thinned[1].bias.grad.tolist() == [0, 0]
    assert bool((thinned[1].weight.grad != 0).all())
    # The model that was left has no hook any more.
    model(torch.ones(1, 3)).sum().backward()
    assert model[1].bias.grad.tolist() == [1, 1]
