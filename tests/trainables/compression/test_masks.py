"""Masks against a training loop in plain Python, and what happens to them besides a step."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainables.compression.masks import Masks, parameters_as_built
from trainables.errors import UserError

START = [0.9, -0.4, 0.3, 1.5]
INPUTS = [[1.0, 2.0, -1.0, 0.5], [0.3, -0.7, 1.1, 2.0], [-1.2, 0.4, 0.9, 0.1]]
TARGETS = [0.7, -0.2, 1.3]
RATE, MOMENTUM = 0.1, 0.9


def line(values: list[float] = START) -> nn.Linear:
    """y = w x with these w, shape (1, n), in double precision."""
    model = nn.Linear(len(values), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values], dtype=torch.float64))
    return model


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def weights_of(model: nn.Module) -> list[float]:
    return [float(value) for p in model.parameters() for value in p.detach().flatten()]


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


def step(model: nn.Module, masks: Masks, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    """One step as a scheduler does it; the weights that the forward saw."""
    masks.apply(forward=True)
    used = weights_of(model)
    (model(row(*INPUTS[number])) - TARGETS[number]).square().sum().backward()
    masks.restore()
    optimizer.step()
    optimizer.zero_grad()
    masks.apply(forward=False)
    return used


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


def test_two_forwards_before_one_step_mask_the_same_weights() -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True, mask_on_forward_only=True)
    masks.set("weight", row(2, 0, 2, 0))
    masks.apply(forward=True)
    masks.apply(forward=True)
    assert weights_of(model) == [1.8, 0.0, 0.6, 0.0]
    assert masks.dense("weight").flatten().tolist() == START
    masks.restore()
    assert weights_of(model) == START


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


def test_without_double_copies_what_was_masked_stays_zero_when_discarded() -> None:
    model = line()
    masks = Masks(model)
    masks.set("weight", row(1, 0, 1, 0))
    masks.apply(forward=True)
    masks.discard(["weight"])
    assert weights_of(model) == [0.9, 0.0, 0.3, 0.0]


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


def test_turning_double_copies_off_puts_the_copy_back() -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True)
    masks.set("weight", row(1, 0, 1, 0))
    masks.apply(forward=True)
    masks.configure("weight")
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


def test_gradients_are_masked_once_however_often_it_is_asked_for_and_untouched_without_a_mask() -> None:
    model = line()
    masks = Masks(model)
    masks.mask_gradients("weight", True)
    masks.mask_gradients("weight", True)
    model(row(1, 2, 3, 4)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.flatten().tolist() == [1, 2, 3, 4]
    model.weight.grad = None
    masks.set("weight", row(2, 0, 2, 0))
    model(row(1, 2, 3, 4)).sum().backward()
    assert model.weight.grad.flatten().tolist() == [2, 0, 6, 0]


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


def test_masks_of_zeros_and_ones_are_saved_as_truth_values_and_others_as_they_are() -> None:
    masks = Masks(line())
    masks.set("weight", row(1, 0, 1, 0))
    assert masks.state_dict()["masks"]["weight"].dtype == torch.bool
    masks.set("weight", row(4 / 3, 0, 4 / 3, 4 / 3))
    assert torch.equal(masks.state_dict()["masks"]["weight"], row(4 / 3, 0, 4 / 3, 4 / 3))


def test_a_pending_regularization_mask_is_in_the_state() -> None:
    masks = Masks(line())
    masks.set("weight", row(0, 1, 1, 1), is_regularization_mask=True)
    model = line()
    other = Masks(model)
    other.load_state_dict(round_trip(masks.state_dict()))
    other.apply(forward=False)
    assert weights_of(model) == [0.0, -0.4, 0.3, 1.5]


def test_loading_a_state_without_a_mask_removes_the_mask_that_was_there() -> None:
    masks = Masks(line())
    masks.set("weight", row(0, 1, 1, 1))
    masks.mask_gradients("weight", True)
    masks.load_state_dict(Masks(line()).state_dict())
    assert masks.names() == ()
    assert masks.state_dict() == Masks(line()).state_dict()


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


def test_the_name_of_a_parallel_wrapper_is_left_out() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(line())

    assert list(parameters_as_built(Wrapped())) == ["0.weight"]


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


def test_rebound_to_a_thinned_model_a_copy_that_no_longer_fits_is_not_put_back() -> None:
    masks = Masks(line())
    masks.configure("weight", use_double_copies=True)
    masks.set("weight", row(1, 0, 1, 0))
    masks.apply(forward=True)
    thinned = line([3.0, 4.0])
    masks.rebind(thinned)
    masks.restore()
    assert weights_of(thinned) == [3, 4]
    assert masks.dense("weight").tolist() == [[3, 4]]


def test_a_saved_state_is_not_changed_by_going_on() -> None:
    model = line()
    masks = Masks(model)
    masks.configure("weight", use_double_copies=True)
    masks.set("weight", row(2, 0, 2, 0))
    masks.apply(forward=True)
    state = masks.state_dict()
    saved = round_trip(state)
    masks.set("weight", row(0, 0, 3, 0))
    masks.set("weight", row(0, 1, 1, 1), is_regularization_mask=True)
    masks.apply(forward=True)
    masks.restore()
    masks.release("weight")
    assert repr(state) == repr(saved)


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


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float16])
def test_a_mask_of_any_type_is_taken(kind: torch.dtype) -> None:
    model = line()
    masks = Masks(model)
    masks.set("weight", torch.tensor([[1, 0, 1, 0]]).to(kind))
    masks.apply(forward=True)
    assert weights_of(model) == [0.9, 0.0, 0.3, 0.0]


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


def test_two_models_share_nothing() -> None:
    first = line()
    second = copy.deepcopy(first)
    masks = Masks(first)
    masks.set("weight", row(0, 0, 0, 0))
    masks.apply(forward=True)
    assert weights_of(second) == START


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
