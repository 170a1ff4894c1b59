"""K-FAC: its direction against dense solves, what it leaves alone, its cost, and its use."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kfac_nets import cross_entropy, fixed_net, image_net, images, method, squares, table
from torch import Tensor, nn

from trainables.errors import TrainingDiverged, UserError
from trainables.gradients.gradient_method import GradientMethod
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


def test_before_the_first_step_gradients_are_plain_and_the_first_step_is_not() -> None:
    model, data = fixed_net(), table()
    found = method(model, data)
    draw = found.draw(found.generator())
    plain, asked = found.plain_gradient(draw), found.gradient(draw)
    assert all(torch.equal(asked[name], plain[name]) for name in plain)
    torch.testing.assert_close(found.grad(), plain)
    before = {name: p.detach().clone() for name, p in found.parameters.items()}
    found.step()
    found.iteration = 0  # the same samples again
    with torch.no_grad():
        moved = {name: (before[name] - p) / 0.1 for name, p in found.parameters.items()}
        for name, parameter in found.parameters.items():
            parameter.copy_(before[name])
    expected = found.gradient(found.draw(found.generator()))
    for name in plain:
        torch.testing.assert_close(moved[name], expected[name])
        assert not torch.allclose(moved[name], plain[name], rtol=0.1)


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


def test_rounding_makes_no_curvature_negative() -> None:
    """3 samples of 20 large features have a factor of rank 4, whose other eigenvalues rounding puts on both sides."""
    data = (100 * torch.randn(3, 20), torch.randint(3, (3,)))
    found = method(nn.Linear(20, 3), data, damping=1e-6)
    found.step()
    assert torch.linalg.eigvalsh(found.factors[""].inputs).min() < -1e-5
    assert found.bases[""].input_values.min() >= 0
    draw = found.draw(found.generator())
    plain, direction = found.plain_gradient(draw), found.gradient(draw)
    assert sum(float((plain[name] * direction[name]).sum()) for name in plain) > 0


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


def test_half_precision_has_factors_in_float32() -> None:
    model, data = image_net(norm=True), images(dtype=torch.bfloat16)
    found = method(model, data, kl_clip=1e-2)
    for _ in range(2):
        found.step()
    assert {t.dtype for parts in chain(found.factors.values(), found.bases.values()) for t in parts} == {torch.float32}
    assert {value.dtype for value in found.grad().values()} == {torch.bfloat16}
    assert all(p.isfinite().all() for p in model.parameters())


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


# ------------------------------------------------------------------ no side effects


def generator_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


def test_grad_and_measurements_change_nothing() -> None:
    """Bit for bit: weights, buffers, p.grad and generators by `grad`; the process's own by a step."""
    model, data = image_net(norm=True), images(count=16)
    found = method(model, data, batch_size=8, factor_every=1)
    found.step()
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    kept, own = generator_states(), copy.deepcopy(found.state_dict())
    found.grad()
    found.grad(torch.Generator().manual_seed(3))
    found._measure(found.draw(found.generator()))
    assert generator_states() == kept
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    found.load_state_dict(own)
    found.step()
    assert generator_states() == kept


def test_a_step_leaves_the_buffers_that_plain_training_leaves() -> None:
    """The measuring pass does not count in batch norms, and has the dropout of the step."""
    data, buffers = images(count=8), []
    for kind in (GradientMethod, KFAC):
        torch.manual_seed(1)
        model = image_net(norm=True).double()
        kind(model, cross_entropy, data, torch.optim.SGD(model.parameters(), lr=0.0), batch_size=8).step()
        buffers.append([b.clone() for b in model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))


def test_models_compiled_before_are_measured() -> None:
    model = fixed_net()
    compiled = torch.compile(model, backend="eager")
    data = table()
    cross_entropy(compiled, data).backward()
    options = {"fisher": "empirical", "factor_every": 1, "decay": 0.0}
    found, plain = method(compiled, data, **options), method(fixed_net(), data, **options)
    for _ in range(3):  # the first pass of a kind is counted, and runs uncompiled for that
        found.step()
        plain.step()
    torch.testing.assert_close(found.factors["_orig_mod.2"].outputs, plain.factors["2"].outputs)
    torch._dynamo.reset()


# ------------------------------------------------------------------ cost, state, errors, use


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


def test_a_resumed_run_is_the_same_bit_for_bit() -> None:
    def build() -> KFAC:
        torch.manual_seed(5)
        model = image_net(norm=True)
        return method(model, data, batch_size=8, factor_every=2, inverse_every=3, kl_clip=1e-2)

    data = images(count=24, dtype=torch.float32)
    whole, stored = build(), io.BytesIO()
    for step in range(9):
        if step == 4:
            torch.save([whole.model.state_dict(), whole.optimizer.state_dict(), whole.state_dict()], stored)
        whole.step()
    resumed = build()
    stored.seek(0)
    for part, state in zip(
        (resumed.model, resumed.optimizer, resumed), torch.load(stored, weights_only=True), strict=True
    ):
        part.load_state_dict(state)
    for _ in range(5):
        resumed.step()
    for a, b in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for name, parts in whole.bases.items():
        assert all(torch.equal(a, b) for a, b in zip(parts, resumed.bases[name], strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "damping must be a number > 0, got 0.0"),
        ({"damping": float("nan")}, "damping must be a number > 0, got nan"),
        ({"kl_clip": 0.0}, "kl_clip must be a number > 0, or None for no clip, got 0.0"),
        ({"decay": 1.0}, r"decay must be in \[0, 1\), got 1.0"),
        ({"factor_every": 0}, "factor_every must be an integer >= 1, got 0"),
        ({"inverse_every": 2.5}, "inverse_every must be an integer >= 1, got 2.5"),
        ({"fisher": "emprical"}, "unknown fisher 'emprical': did you mean 'empirical'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        method(fixed_net(), table(), **options)


def test_a_model_without_a_layer_to_treat() -> None:
    with pytest.raises(UserError, match="K-FAC needs linear or ungrouped convolution layers"):
        method(nn.Embedding(4, 3), (torch.randint(4, (8,)), torch.randint(3, (8,))))


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


@pytest.mark.parametrize("kind", ["quadratic", "logistic"])
def test_fewer_steps_than_sgd_at_its_best_rate_on_an_ill_conditioned_problem(kind: str) -> None:
    """Features of scales 1 to 30: SGD's rate is bound by the largest, its progress by the smallest."""
    scales = torch.logspace(0, 1.5, 6, dtype=torch.float64)
    x = torch.randn(64, 6, dtype=torch.float64) * scales
    scores = (x / scales) @ torch.randn(6, 3, dtype=torch.float64)
    labels = scores.softmax(1).multinomial(1)[:, 0]  # noisy, so that the optimum is inside
    data, loss = ((x, scores), squares) if kind == "quadratic" else ((x, labels), cross_entropy)

    def start() -> nn.Linear:
        model = nn.Linear(6, 3).double()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    best = start()
    solver = torch.optim.LBFGS(best.parameters(), max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        value = loss(best, data)
        value.backward()
        return value

    solver.step(closure)
    share = 0.01 if kind == "quadratic" else 0.1  # A (x) G is the quadratic's own curvature alone
    goal = (1 - share) * float(loss(best, data)) + share * float(loss(start(), data))

    def steps(make: Callable[[nn.Module, float], GradientMethod], rate: float) -> int:
        made = make(start(), rate)
        return next((step for step in range(300) if float(made.step()) < goal), 300)

    def sgd(model: nn.Module, rate: float) -> GradientMethod:
        return GradientMethod(model, loss, data, torch.optim.SGD(model.parameters(), lr=rate), batch_size=64)

    def kfac(model: nn.Module, rate: float) -> GradientMethod:
        return method(model, data, loss, lr=rate)

    sgd_steps = min(steps(sgd, rate) for rate in (1e-3, 2e-3, 4e-3, 1e-2, 3e-2, 0.1))
    assert steps(kfac, 0.5) < sgd_steps / 4
