"""Masks against a training loop in plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from masked_lines import INPUTS, MOMENTUM, RATE, START, TARGETS, line, row, step, weights_of
from torch import nn

from trainables.compression.masks import Masks
from trainables.errors import UserError


def slow_training(
    masks: list[list[float]], *, double: bool, forward_only: bool, gradients: bool
) -> list[tuple[list[float], list[float]]]:
    """Three steps of SGD with momentum on (w x - y)^2, element by element: the weights that each forward and the end
    of each step see."""
    kept, speed, seen = list(START), [0.0] * len(START), []
    for x, y, mask in zip(INPUTS, TARGETS, masks, strict=True):
        used = [m * w for m, w in zip(mask, kept, strict=True)]
        error = sum(u * v for u, v in zip(used, x, strict=True)) - y
        slope = [2 * error * v for v in x]
        if gradients:
            slope = [m * g for m, g in zip(mask, slope, strict=True)]
        speed = [MOMENTUM * v + g for v, g in zip(speed, slope, strict=True)]
        base = kept if double else used
        kept = [w - RATE * v for w, v in zip(base, speed, strict=True)]
        left = kept if forward_only else [m * w for m, w in zip(mask, kept, strict=True)]
        if not double:
            kept = left
        seen.append((used, left))
    return seen


@pytest.mark.parametrize(("double", "forward_only", "gradients"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize(
    "values",
    [
        [[1.0, 0.0, 1.0, 0.0]] * 3,
        [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]],
        [[2.0, 0.0, 2.0, 0.0], [0.0, 4 / 3, 4 / 3, 4 / 3], [2.0, 2.0, 0.0, 0.0]],
    ],
    ids=["one mask", "changing", "scaled up"],
)
def test_three_steps_of_each_flag(values: list[list[float]], double: bool, forward_only: bool, gradients: bool) -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=double, mask_on_forward_only=forward_only)
    masks.mask_gradients("weight", gradients)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    seen = []
    for number in range(3):
        masks.set("weight", row(*values[number]))
        used = step(model, masks, optimizer, number)
        seen.append((used, weights_of(model)))
    expected = slow_training(values, double=double, forward_only=forward_only, gradients=gradients)
    for got, wanted in zip(seen, expected, strict=True):
        assert got[0] == pytest.approx(wanted[0], abs=1e-12)
        assert got[1] == pytest.approx(wanted[1], abs=1e-12)


def test_masks_outlive_the_epochs_in_which_forwards_are_masked() -> None:
    model = line()
    masks = Masks(model)
    masks.set("weight", row(1, 0, 1, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for number in range(3):
        (model(row(*INPUTS[number])) - TARGETS[number]).square().sum().backward()
        optimizer.step()
        masks.apply(forward=False)
        assert [w == 0 for w in weights_of(model)] == [False, True, False, True]


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


def test_what_a_regularization_mask_zeroes_is_zero_in_the_copy_too() -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True, mask_on_forward_only=True)
    masks.set("weight", row(1, 1, 0, 1))
    masks.apply(forward=True)
    masks.set("weight", row(0, 1, 1, 1), is_regularization_mask=True)
    masks.apply(forward=True)
    assert weights_of(model) == [0.0, -0.4, 0.0, 1.5]
    masks.restore()
    assert weights_of(model) == [0.0, -0.4, 0.3, 1.5]


def test_discarding_forgets_the_mask_and_puts_the_copy_back() -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True)
    masks.set("weight", row(1, 0, 1, 0))
    masks.apply(forward=False)
    assert weights_of(model) == [0.9, 0.0, 0.3, 0.0]
    masks.discard(["weight"])
    assert weights_of(model) == START
    assert masks.get("weight") is None
    assert masks.names() == ()
    masks.apply(forward=True)
    assert weights_of(model) == START


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


def test_a_released_parameter_without_a_mask_stays() -> None:
    model = line()
    masks = Masks(model)
    masks.release("weight")
    assert weights_of(model) == START


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
    assert masks.names() == ("weight",)


def test_messages() -> None:
    masks = Masks(nn.Sequential(line()))
    with pytest.raises(UserError, match=r"^unknown parameter '0.weigth': did you mean '0.weight'\? Valid: 0.weight$"):
        masks.set("0.weigth", row(1))
    with pytest.raises(UserError, match=r"^the mask of 0.weight must have its shape \(1, 4\), got \(1, 2\); a saved"):
        masks.set("0.weight", row(1, 0))
    for call in (masks.get, masks.dense, masks.configure, masks.release):
        with pytest.raises(UserError, match="unknown parameter 'x'"):
            call("x")
    with pytest.raises(UserError, match="unknown parameter 'x'"):
        masks.mask_gradients("x", True)
    with pytest.raises(UserError, match="unknown parameter 'x'"):
        masks.discard(["x"])
    with pytest.raises(UserError, match="unknown parameter 'weight'"):
        Masks(nn.Sequential(line())).load_state_dict(_state_with_a_mask())


def _state_with_a_mask() -> dict[str, Any]:
    masks = Masks(line())
    masks.set("weight", row(1, 0, 1, 0))
    return masks.state_dict()
