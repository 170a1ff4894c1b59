"""K-FAC: its direction against dense solves, what it leaves alone, its cost, and its use."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kfac_nets import Data, Tokens, cross_entropy, fixed_net, image_net, images, method, squares, table, table_net
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
            "fisher='sampled' needs integer targets .* and an output tuple: use fisher='empirical'",
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


def curvlinops_factors(model: nn.Module, data: Data, loss: nn.Module, fisher: str) -> Any:
    curvlinops = pytest.importorskip("curvlinops", reason="curvlinops-for-pytorch is not installed")
    operator = curvlinops.KFACLinearOperator(
        model,
        loss,
        [p for p in model.parameters() if p.requires_grad],
        [data],
        fisher_type=fisher,
        kfac_approx="expand",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    return operator


@pytest.mark.parametrize("kind", ["images", "table", "sequences"])
def test_empirical_factors_are_those_of_curvlinops(kind: str) -> None:
    if kind == "images":
        model, data = image_net(), images()
    elif kind == "table":
        model, data = table_net(), table()
    else:
        model = Tokens(classes_first=True)
        data = (torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(3, (4, 6)))
    found = method(model, data, fisher="empirical", lr=0.0)
    found.step()
    oracle = curvlinops_factors(model, data, nn.CrossEntropyLoss(), "empirical")
    assert set(found.factors) == set(oracle._input_covariances) == set(found.layers)
    for name, factors in found.factors.items():
        torch.testing.assert_close(factors.inputs, oracle._input_covariances[name])
        torch.testing.assert_close(factors.outputs, oracle._gradient_covariances[name])


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
def test_ignored_labels_count_for_nothing(fisher: str) -> None:
    """G of sequences whose tails are ignored is the mean over the labels that are left, by hand."""
    x, y = torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(3, (4, 6))
    y[1:, 2:] = -100
    model = Tokens(classes_first=True)
    found = method(model, (x, y), fisher=fisher, lr=0.0)
    found.step()
    scores = model(x).transpose(1, 2)[y >= 0]
    signed = scores.softmax(1) - F.one_hot(y[y >= 0], 3)
    if fisher == "empirical":
        torch.testing.assert_close(found.factors["layers.2"].outputs, signed.T @ signed / len(signed))
    else:
        # d = p - e_label: p^T d + d^T d / 2 + ... has no label in it; what is left is that rows d sum to 0.
        assert found.factors["layers.2"].outputs.sum(1).abs().max() < 1e-12
        trace = found.factors["layers.2"].outputs.trace()
        squared = scores.softmax(1).square().sum(1, keepdim=True)
        choices = squared - 2 * scores.softmax(1) + 1  # |p - e_k|^2 of each label k
        assert choices.min(1).values.mean() <= trace <= choices.max(1).values.mean()


def test_a_layer_that_is_called_twice_has_the_places_of_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    model, data = Twice().double(), table(features=4, outputs=4)
    found = method(model, data, fisher="empirical", lr=0.0)
    found.step()
    weight = model.layer.weight.detach()
    middle = data[0] @ weight.T
    at_output = (middle @ weight.T).softmax(1) - F.one_hot(data[1], 4)
    at_middle = at_output @ weight
    n = len(data[0])
    torch.testing.assert_close(found.factors["layer"].inputs, (data[0].T @ data[0] + middle.T @ middle) / (2 * n))
    torch.testing.assert_close(found.factors["layer"].outputs, (at_output.T @ at_output + at_middle.T @ at_middle) / n)


def mean_of_sampled(found: KFAC, name: str, draws: int) -> Tensor:
    """Mean of a layer's G over draws of labels."""
    found.decay = 0.0
    total = torch.zeros_like(found.factors[name].outputs) if found.factors else torch.zeros(())
    draw = found.draw(found.generator())
    for found.iteration in range(draws):
        found._measure(draw)
        total = total + found.factors[name].outputs / draws
    return total


def test_sampled_fisher_of_a_softmax_regression_is_the_exact_one() -> None:
    """64 copies of one sample: there A (x) G is exact, and the Hessian of the loss in the weights is the Fisher.

    An entry of G is a mean of 64 x 200 draws in [-1, 1], so its standard error is below 0.009; 0.03 is over 3 of them.
    """
    x = torch.randn(1, 3, dtype=torch.float64)
    data = (x.expand(64, 3).clone(), torch.zeros(64, dtype=torch.int64))
    model = nn.Linear(3, 4).double()
    found = method(model, data)
    g = mean_of_sampled(found, "", 200)

    def loss(joint: Tensor) -> Tensor:
        return F.cross_entropy(x @ joint[:, :3].T + joint[:, 3], data[1][:1])

    joint = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    hessian = torch.func.hessian(loss)(joint).reshape(16, 16)
    a = found.factors[""].inputs
    assert (torch.kron(g, a) - hessian).abs().max() < 0.03 * a.abs().max()
    assert hessian.abs().max() > 0.1 * a.abs().max()


@pytest.mark.slow
@pytest.mark.thorough
def test_sampled_fisher_of_a_gaussian_is_that_of_curvlinops() -> None:
    """Its mean squared error has the Fisher (2 / C) J^T J of C outputs, ours (variance 1) J^T J.

    400 draws of 12 samples: standard errors are about sqrt(2 / 4800) = 0.02 of the largest entry; 0.1 are allowed.
    """
    model = table_net().double()
    data = (torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64))
    found = method(model, data, squares)
    oracle = curvlinops_factors(model, data, nn.MSELoss(), "type-2")
    for name in ("0", "2"):
        exact = oracle._gradient_covariances[name] * 3 / 2
        assert (mean_of_sampled(found, name, 400) - exact).abs().max() < 0.1 * exact.abs().max()
        torch.testing.assert_close(found.factors[name].inputs, oracle._input_covariances[name])


class Mixed(nn.Module):
    """One treatable layer among others."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.depthwise = nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose1d(4, 4, 1)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.gain = nn.Parameter(torch.ones(4))
        self.mixing = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).transpose(1, 2)
        x = self.norm(self.up(self.depthwise(x)).transpose(1, 2))
        x = self.recurrent(self.attention(x, x, x)[0])[0] * self.gain
        return self.head(self.mixing(x))


def test_other_parameters_take_plain_gradients() -> None:
    tokens = torch.randint(7, (5, 3))
    model = Mixed()

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    found = KFAC(model, loss, (tokens, tokens), torch.optim.SGD(model.parameters(), lr=0.1), batch_size=5)
    assert list(found.layers) == ["mixing"]
    for _ in range(2):
        found.step()
    draw = found.draw(found.generator())
    plain, direction = found.plain_gradient(draw), found.gradient(draw)
    for name in plain:
        assert torch.equal(plain[name], direction[name]) == (not name.startswith("mixing")), name


def test_layers_that_stop_are_left_out() -> None:
    """A layer whose parameters stop, a bias that stops alone, and all layers."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    found = method(model, table(), factor_every=1, inverse_every=1, kl_clip=1e-2)
    found.step()
    kept = found.factors["0"], found.bases["0"]
    for stopped in (*model[0].parameters(), model[2].bias):
        stopped.requires_grad_(False)
        stopped.grad = None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found.step()
    assert found.factors["0"] is kept[0]
    assert found.bases["0"] is kept[1]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not p.requires_grad)
        before[name] = p.detach().clone()
    found.factor_every = found.inverse_every = 100  # `grad` does not measure, so that it says what a step without does
    asked = found.grad()
    found.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - 0.1 * asked.get(name, torch.zeros_like(p)), p.detach())
    found.factors.clear()
    draw = found.draw(found.generator())
    model.requires_grad_(False)
    found.observe(draw, None)
    assert not found.factors
