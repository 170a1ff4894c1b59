"""K-FAC's factors against curvlinops, Hessians and loops over samples and places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kfac_nets import Data, Tokens, image_net, images, method, squares, table, table_net
from torch import Tensor, nn

from trainables.gradients import layer_signals
from trainables.gradients.kfac import KFAC


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


def test_layers_side_by_side_and_one_that_is_called_later() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.later = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)
            self.all = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.left(x) + self.right(x)
            return y + self.later(x) if self.all else y

    model, data = Branches(), table()
    found = method(model, data, fisher="empirical", factor_every=1)
    found.step()
    assert set(found.factors) == set(found.bases) == {"left", "right"}
    torch.testing.assert_close(found.factors["left"], found.factors["right"])
    model.all = True
    found.step()
    assert set(found.bases) == {"left", "right", "later"}  # long before the next decompositions


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
