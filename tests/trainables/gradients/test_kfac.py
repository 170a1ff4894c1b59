"""K-FAC against curvlinops, dense solves, Hessians and loops over samples and places."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curvlinops import KFACLinearOperator
from curvlinops.kfac import FisherType, KFACType
from torch import Tensor, nn

from trainables.errors import TrainingDiverged, UserError
from trainables.gradients import layer_signals
from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.kfac import KFAC

Data = tuple[Tensor, Tensor]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def squares(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return 0.5 * (model(batch[0]) - batch[1]).square().sum() / len(batch[0])


def images(count: int = 6, classes: int = 4, dtype: torch.dtype = torch.float64) -> Data:
    return torch.randn(count, 2, 7, 6, dtype=dtype), torch.randint(classes, (count,))


def image_net(norm: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        *([nn.BatchNorm2d(3), nn.Dropout(0.3)] if norm else []),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 2, (1, 2), bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def table(count: int = 12, features: int = 5, outputs: int = 3, dtype: torch.dtype = torch.float64) -> Data:
    return torch.randn(count, features, dtype=dtype), torch.randint(outputs, (count,))


def table_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def method(model: nn.Module, data: Data, loss: Callable[..., Tensor] = cross_entropy, **more: Any) -> KFAC:
    """K-FAC on batches of all samples, unclipped, in the data's dtype, under SGD."""
    if data[0].is_floating_point():
        model.to(data[0].dtype)
    options: dict[str, Any] = {"batch_size": len(data[0]), "kl_clip": None, **more}
    rate = options.pop("lr", 0.1)
    return KFAC(model, loss, data, torch.optim.SGD(model.parameters(), lr=rate), **options)


class Tokens(nn.Module):
    """(B, T, I) to logits (B, T, C), or (B, C, T) as `F.cross_entropy` takes them."""

    def __init__(self, classes_first: bool) -> None:
        super().__init__()
        self.layers, self.classes_first = table_net(), classes_first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y.transpose(1, 2) if self.classes_first else y


def curvlinops_factors(model: nn.Module, data: Data, loss: nn.Module, fisher: Any) -> KFACLinearOperator:
    operator = KFACLinearOperator(
        model,
        loss,
        [p for p in model.parameters() if p.requires_grad],
        [data],
        fisher_type=fisher,
        kfac_approx=KFACType.EXPAND,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    return operator


# ------------------------------------------------------------------ factors


@pytest.mark.parametrize("kind", ["images", "table", "sequences"])
def test_empirical_factors_are_those_of_curvlinops(kind: str) -> None:
    if kind == "images":
        model, data = image_net(), images()
        model[1] = nn.ReLU()  # curvlinops' hooks, too, would bear it in place
    elif kind == "table":
        model, data = table_net(), table()
    else:
        model = Tokens(classes_first=True)
        data = (torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(3, (4, 6)))
    found = method(model, data, fisher="empirical", lr=0.0)
    found.step()
    oracle = curvlinops_factors(model, data, nn.CrossEntropyLoss(), FisherType.EMPIRICAL)
    assert set(found.factors) == set(oracle._input_covariances) == set(found.layers)
    for name, factors in found.factors.items():
        torch.testing.assert_close(factors.inputs, oracle._input_covariances[name])
        torch.testing.assert_close(factors.outputs, oracle._gradient_covariances[name])


def test_classes_may_be_the_last_dimension_or_the_second() -> None:
    data = (torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(3, (4, 6)))
    second, last = Tokens(classes_first=True), Tokens(classes_first=False)
    last.load_state_dict(second.state_dict())
    found = [
        method(second, data, lr=0.0),
        method(last, data, lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())),
    ]
    for one in found:
        one.step()
    for name in found[0].factors:
        for a, b in zip(found[0].factors[name], found[1].factors[name], strict=True):
            torch.testing.assert_close(a, b)


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


@pytest.mark.parametrize("chunk", [1 << 22, 40])
def test_factors_of_a_dilated_convolution_by_loops(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place's patch and every sample's own gradient, one by one; patches of all samples and of few at a time."""
    monkeypatch.setattr(layer_signals, "CHUNK_NUMBERS", chunk)
    first = nn.Conv1d(2, 3, 2, stride=2, dilation=2, padding=1)
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(5, 2, 8, dtype=torch.float64), torch.randint(3, (5,))
    found = method(model, (x, y), fisher="empirical", lr=0.0)
    found.step()
    a, g = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    for sample, label in zip(x, y, strict=True):
        output = first(sample[None])
        loss = F.cross_entropy(model[1:](output), label[None])
        (gradient,) = torch.autograd.grad(loss, output)
        padded = F.pad(sample, (1, 1))
        for place in range(output.shape[2]):
            patch = [float(padded[channel, 2 * place + 2 * tap]) for channel in range(2) for tap in range(2)]
            row = torch.tensor([*patch, 1.0], dtype=torch.float64)
            a += torch.outer(row, row) / (len(x) * output.shape[2])
            g += torch.outer(gradient[0, :, place], gradient[0, :, place]) / len(x)
    torch.testing.assert_close(found.factors["0"].inputs, a)
    torch.testing.assert_close(found.factors["0"].outputs, g)


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


# ------------------------------------------------------------------ labels from the model


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


def test_sampled_fisher_of_a_gaussian_is_that_of_curvlinops() -> None:
    """Its mean squared error has the Fisher (2 / C) J^T J of C outputs, ours (variance 1) J^T J.

    400 draws of 12 samples: standard errors are about sqrt(2 / 4800) = 0.02 of the largest entry; 0.1 are allowed.
    """
    model = table_net().double()
    data = (torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64))
    found = method(model, data, squares)
    oracle = curvlinops_factors(model, data, nn.MSELoss(), FisherType.TYPE2)
    for name in ("0", "2"):
        exact = oracle._gradient_covariances[name] * 3 / 2
        assert (mean_of_sampled(found, name, 400) - exact).abs().max() < 0.1 * exact.abs().max()
        torch.testing.assert_close(found.factors[name].inputs, oracle._input_covariances[name])


def test_labels_differ_from_step_to_step_and_not_with_the_process() -> None:
    data = table()
    measured = []
    for seed in (1, 2):
        found = method(copy.deepcopy(fixed_net()), data, lr=0.0, factor_every=1, decay=0.0)
        for _ in range(2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found.step()
            assert torch.equal(torch.get_rng_state(), before)
            measured.append(found.factors["2"].outputs)
    assert torch.equal(measured[0], measured[2])
    assert torch.equal(measured[1], measured[3])
    assert not torch.equal(measured[0], measured[1])


def fixed_net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return table_net().double()


# ------------------------------------------------------------------ direction


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


# ------------------------------------------------------------------ what is not treated


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


def test_untreated_parameters_pass_with_one_warning_that_names_them() -> None:
    tokens = torch.randint(7, (5, 3))
    model = Mixed()
    with pytest.warns(UserWarning, match="plain gradients are taken of gain, words.weight, depthwise.weight") as seen:
        found = method(
            model, (tokens, tokens), lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), kl_clip=1e-2
        )
    assert len(seen) == 1
    assert "norm" not in str(seen[0].message)
    assert "and 10 more" in str(seen[0].message)
    assert seen[0].filename == __file__
    assert list(found.layers) == ["mixing"]
    for _ in range(2):
        found.step()
    draw = found.draw(found.generator())
    plain, direction = found.plain_gradient(draw), found.gradient(draw)
    for name in plain:
        assert torch.equal(plain[name], direction[name]) == (not name.startswith("mixing")), name


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.GroupNorm(3, 3), nn.LayerNorm([3, 4, 3])])
def test_norms_pass_silently_with_plain_gradients(norm: nn.Module) -> None:
    model, data = image_net(), images()
    model.insert(1, norm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = method(model, data)
    found.step()
    draw = found.draw(found.generator())
    plain, direction = found.plain_gradient(draw), found.gradient(draw)
    assert torch.equal(plain["1.weight"], direction["1.weight"])
    assert torch.equal(plain["1.bias"], direction["1.bias"])
    assert not torch.equal(plain["0.weight"], direction["0.weight"])


def test_a_layer_with_a_shared_bias_is_left_plain() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].bias = model[0].bias
    with pytest.warns(UserWarning, match=r"taken of 0\.weight, 0\.bias, 2\.weight"):
        found = method(model, table())
    assert list(found.layers) == ["3"]


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
    found = method(compiled, data, fisher="empirical", lr=0.0)
    found.step()
    plain = method(fixed_net(), data, fisher="empirical", lr=0.0)
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
    goal = 0.99 * float(loss(best, data)) + 0.01 * float(loss(start(), data))

    def steps(make: Callable[[nn.Module, float], GradientMethod], rate: float) -> int:
        made = make(start(), rate)
        return next((step for step in range(300) if float(made.step()) < goal), 300)

    def sgd(model: nn.Module, rate: float) -> GradientMethod:
        return GradientMethod(model, loss, data, torch.optim.SGD(model.parameters(), lr=rate), batch_size=64)

    def kfac(model: nn.Module, rate: float) -> GradientMethod:
        return method(model, data, loss, lr=rate)

    sgd_steps = min(steps(sgd, rate) for rate in (1e-3, 2e-3, 4e-3, 1e-2, 3e-2, 0.1))
    assert steps(kfac, 0.5) < sgd_steps / 4
