"""Backward passes through some rows against the gradient of the masked loss, and FLOPs against torch's counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sampled_nets import CLASSES, MODEL_NAMES, gradients_of, models, table, table_net, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainables.gradients.zero_gradients import SlicedBackward
from trainables.runtime.flops import flop_counter

COUNT = 7
KEEPS = [[0, 2, 5], [6], [], list(range(COUNT))]


def masked(model: nn.Module, x: Tensor, y: Tensor, keep: list[int]) -> Tensor:
    """Return the mean loss of all samples to which only those of `keep` contribute."""
    mask = torch.zeros(len(x), dtype=torch.float64)
    mask[keep] = 1
    losses = F.cross_entropy(model(x), y, reduction="none")
    return (mask.to(losses) * losses).mean()


def sliced(
    model: nn.Module, x: Tensor, y: Tensor, keep: list[int] | None, value: Callable[..., Tensor] = masked
) -> tuple[dict[str, Tensor], int]:
    """Return gradients of the masked loss by a sliced backward pass, and the FLOPs spared."""
    with SlicedBackward(len(x)) as mode:
        loss = value(model, x, y, list(range(len(x))) if keep is None else keep)
        mode.keep = None if keep is None else torch.tensor(keep, dtype=torch.int64)
        return gradients_of(loss, model), mode.spared_flops


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_gradient_is_that_of_the_masked_loss_and_spared_flops_are_counted(name: str, keep: list[int]) -> None:
    model, shape = models()[name]
    x, y = table(COUNT, shape)
    with flop_counter() as plain:
        expected = gradients_of(masked(model, x, y, keep), model)
    with flop_counter() as counted:
        found, spared = sliced(model, x, y, keep)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert plain.get_total_flops() - counted.get_total_flops() == spared
    assert (spared > 0) == (len(keep) < COUNT)


def test_gradients_of_inputs_are_sliced_too() -> None:
    model, (x, y) = table_net().requires_grad_(False), table(COUNT)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(masked(model, x, y, [1, 3]), x)
    with SlicedBackward(COUNT) as mode:
        loss = masked(model, x, y, [1, 3])
        mode.keep = torch.tensor([1, 3])
        (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, expected)
    assert mode.spared_flops == (COUNT - 2) * 2 * (5 * 6 + 6 * CLASSES)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_through_all_rows_gradients_are_the_plain_ones(name: str) -> None:
    """To rounding: products of sequences are of other matrices than autograd's. Images are bitwise the same."""
    model, shape = models()[name]
    x, y = table(COUNT, shape)
    expected = gradients_of(masked(model, x, y, list(range(COUNT))), model)
    found, spared = sliced(model, x, y, None)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert spared == 0
    if name in ("linear", "images", "grouped", "conv1d", "conv3d", "shared", "frozen"):
        assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_as_always(reentrant: bool) -> None:
    model, (x, y) = table_net(), table(COUNT)
    x.requires_grad_(reentrant)  # which the reentrant form needs

    def value(model: nn.Module, x: Tensor, y: Tensor, keep: list[int]) -> Tensor:
        assert isinstance(model, nn.Sequential)
        whole = [lambda x: checkpoint(model[:2], x, use_reentrant=reentrant), model[2]]
        mask = torch.zeros(COUNT, dtype=torch.float64)
        mask[keep] = 1
        return (mask * F.cross_entropy(whole[1](whole[0](x)), y, reduction="none")).mean()

    expected = gradients_of(masked(model, x, y, [0, 3]), model)
    with SlicedBackward(COUNT) as mode:
        loss = value(model, x, y, [0, 3])
        mode.keep = torch.tensor([0, 3])
        loss.backward()
    for name, parameter in trained(model).items():
        torch.testing.assert_close(parameter.grad, expected[name])
    assert mode.spared_flops == (COUNT - 2) * 2 * 2 * 6 * CLASSES  # of the last layer alone


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_takes_the_kept_rows_for_its_batch(affine: bool) -> None:
    """Of a batch of equal halves the first one has its statistics: its gradient is that of training on it alone."""
    layers = (nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3, affine=affine), nn.Tanh(), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(12, CLASSES)).double()
    x, y = torch.randn(3, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 2, 1])
    found, _ = sliced(model, torch.cat([x, x]), torch.cat([y, y]), [0, 1, 2])
    alone = gradients_of(F.cross_entropy(model(x), y) / 2, model)  # the mean is over twice as many samples
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], gradient)


def test_batch_norm_of_any_kept_rows_is_orthogonal_to_shift_and_scale_of_their_gradients() -> None:
    """The closed form: g - mean(g) - x mean(g x) over the kept rows, x normalised by the whole batch."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    x, y = table(COUNT)
    keep = [0, 2, 5]
    expected = gradients_of(masked(model, x, y, keep), model)
    before = [buffer.clone() for buffer in model.buffers()]
    plain = model(x)  # updates the statistics once
    once = [buffer.clone() for buffer in model.buffers()]
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
    found, _ = sliced(model, x, y, keep)
    assert all(torch.equal(a, b) for a, b in zip(once, model.buffers(), strict=True))
    assert plain.shape == (COUNT, CLASSES)
    for name in ("1.weight", "1.bias", "3.weight", "3.bias"):
        torch.testing.assert_close(found[name], expected[name])
    inputs = model[0](x).detach()
    deviation = (inputs.var(0, correction=0) + 1e-5).sqrt()
    normalised = (inputs - inputs.mean(0)) / deviation
    after = (normalised * model[1].weight + model[1].bias).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(masked(model[2:], after, y, keep), after)
    g, n = gradient[keep], normalised[keep]
    of_inputs = (model[1].weight / deviation) * (g - g.mean(0) - n * (g * n).mean(0))
    torch.testing.assert_close(found["0.weight"], of_inputs.T @ x[keep])
    model.eval()
    torch.testing.assert_close(sliced(model, x, y, keep)[0], gradients_of(masked(model, x, y, keep), model))
    everything, _ = sliced(model.train(), x, y, [])
    assert not any(bool(gradient.any()) for gradient in everything.values())
