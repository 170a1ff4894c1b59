"""K-FAC: its direction against dense solves, what it leaves alone, its cost, and its use."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kfac_nets import cross_entropy, fixed_net, image_net, images, method, table
from torch import Tensor, nn

from trainables.errors import TrainingDiverged, UserError
from trainables.gradients.kfac import KFAC


@pytest.mark.parametrize("damping", [1e-3, 0.3])
def test_direction_solves_the_damped_system(damping: float) -> None:
    """(A (x) G + damping) vec V = vec dW, dense, with columns one below the other."""
    model, data = image_net(), images()
    found = method(model, data, damping=damping)
    found.step()
    draw = found.draw(found.generator())
    plain, direction = found.plain_gradient(draw), found.gradient(draw)
    for name, layer in found.layers.items():
        names = [f"{name}.weight"] + ([f"{name}.bias"] if layer.bias is not None else [])
        gradient, solved = (
            torch.cat([of[n].reshape(len(layer.weight), -1) for n in names], 1) for of in (plain, direction)
        )
        a, g = found.factors[name]
        system = torch.kron(a, g) + damping * torch.eye(gradient.numel(), dtype=torch.float64)
        expected = torch.linalg.solve(system, gradient.T.flatten())
        torch.testing.assert_close(solved.T.flatten(), expected, rtol=1e-8, atol=1e-10)


def test_before_the_first_step_gradients_are_plain() -> None:
    found = method(fixed_net(), table())
    draw = found.draw(found.generator())
    plain = found.plain_gradient(draw)
    torch.testing.assert_close(found.gradient(draw), plain, rtol=0, atol=0)
    torch.testing.assert_close(found.grad(), plain)
    found.step()
    assert not any(torch.allclose(part, plain[name], rtol=0.1) for name, part in found.gradient(draw).items())


def test_factors_are_moving_averages_and_bases_are_renewed_more_seldom() -> None:
    found = method(fixed_net(), table(), factor_every=2, inverse_every=3, decay=0.75, fisher="empirical")
    twin = method(fixed_net(), found.data.batch(torch.arange(12), torch.Generator()), decay=0.0, fisher="empirical")
    average = None
    bases = []
    for iteration in range(7):
        twin.model.load_state_dict(found.model.state_dict())
        twin._measure(twin.draw(twin.generator()))
        if iteration % 2 == 0:
            new = twin.factors["2"]
            average = new if average is None else [0.75 * a + 0.25 * b for a, b in zip(average, new, strict=True)]
        found.step()
        torch.testing.assert_close(list(found.factors["2"]), list(average))
        bases.append(found.bases["2"])
    assert [one is other for one, other in pairwise(bases)] == [True, True, False] * 2
    basis = bases[-1]
    rebuilt = basis.inputs @ basis.input_values.diag() @ basis.inputs.T
    torch.testing.assert_close(rebuilt, found.factors["2"].inputs)


def test_kl_clip_scales_all_treated_layers_together() -> None:
    """nu = min(1, sqrt(clip / sum lr^2 V dW)), with each group's learning rate."""
    model, data = image_net(norm=True), images()
    model.double()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": chain(*map(nn.Module.parameters, model[1:]))}]
    found = KFAC(model, cross_entropy, data, torch.optim.SGD(groups, lr=0.2), batch_size=6, kl_clip=1e-3)
    found.step()
    draw = found.draw(found.generator())
    plain, clipped = found.plain_gradient(draw), found.gradient(draw)
    found.kl_clip = None
    free = found.gradient(draw)
    treated = [name for name in plain if not name.startswith("1.")]
    moved = sum((0.5 if n.startswith("0.") else 0.2) ** 2 * float((free[n] * plain[n]).sum()) for n in treated)
    nu = min(1.0, (1e-3 / moved) ** 0.5)
    assert 0 < nu < 0.9
    for name in plain:
        expected = nu * free[name] if name in treated else plain[name]
        torch.testing.assert_close(clipped[name], expected)
    for found.kl_clip in (2 * moved, 1e30):  # below the bound nothing is scaled
        assert all(torch.equal(value, free[name]) for name, value in found.gradient(draw).items())
    found.kl_clip, found.optimizer = 1e-3, None  # without an optimizer there is no step to clip
    assert all(torch.equal(value, free[name]) for name, value in found.gradient(draw).items())


def test_under_autocast_the_direction_is_computed_in_float32() -> None:
    data = table(dtype=torch.float32)
    found = method(fixed_net(), data, fisher="empirical", lr=0.0)
    found.step()
    draw = found.draw(found.generator())
    plain = found.plain_gradient(draw)
    expected = found.adjust(plain, draw)
    with torch.autocast("cpu", torch.bfloat16):
        under = found.adjust(plain, draw)
        found.step()
    assert all(torch.equal(under[name], expected[name]) for name in plain)
    assert found.factors["0"].inputs.dtype == torch.float32


def test_flops_are_those_of_the_passes_and_products() -> None:
    """12 samples, layers 5-4-3: a forward pass, gradients of the second layer's inputs alone, and the algebra."""
    found = method(fixed_net(), table(), factor_every=2, inverse_every=4)
    forward, backward = 2 * 12 * (5 * 4 + 4 * 3), 2 * 12 * 4 * 3
    covariances = 2 * 12 * (6**2 + 4**2 + 5**2 + 3**2)
    decompositions = 9 * (6**3 + 4**3 + 5**3 + 3**3)
    products = 4 * (4 * 6 * (4 + 6) + 3 * 5 * (3 + 5))
    for step in range(5):
        found.step()
        taken = found.meter.take()
        due = step % 2 == 0
        assert taken.forward_flops == due * forward
        assert taken.backward_flops == due * (backward + covariances) + (step % 4 == 0) * decompositions + products


def test_unknown_distributions_say_to_use_the_empirical_fisher() -> None:
    x = torch.randn(8, 5, dtype=torch.float64)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x), self.layer(-x)

    wrong: list[tuple[nn.Module, Tensor, Callable[..., Tensor], str]] = [
        (
            nn.Linear(5, 3),
            torch.randint(2, (8, 3)),
            lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1].to(b[0])),
            r"fisher='sampled' needs integer targets .* got targets int64 \(8, 3\) and an output \(8, 3\): use f",
        ),
        (
            Pair(),
            torch.randint(3, (8,)),
            lambda m, b: F.cross_entropy(sum(m(b[0])), b[1]),
            "fisher='sampled' needs a model that returns one tensor .* got tuple: use fisher='empirical'",
        ),
    ]
    for model, targets, loss, message in wrong:
        with pytest.raises(UserError, match=message):
            method(model, (x, targets), loss).step()
        found = method(model, (x, targets), loss, fisher="empirical")
        found.step()
        assert found.bases


def test_factors_that_are_not_finite_end_the_training() -> None:
    x, y = table()
    x[0, 0] = float("inf")
    with pytest.raises(TrainingDiverged, match="K-FAC's factors of layer '0' are not finite in step 0"):
        method(fixed_net(), (x, y)).step()
