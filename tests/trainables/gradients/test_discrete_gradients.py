"""The discrete gradient against its definition, one element and one stride after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.gradients import BinaryActivation, DiscreteGradient, discrete_gradient
from trainables.gradients.discrete_gradients import taken_first

Loss = Callable[[nn.Module], Tensor]


def definition(loss: Loss, model: nn.Module, epsilon: float, stride: float) -> tuple[list[float], list[float]]:
    """The signed delta of every element, 0 for none, and its decrease."""
    deltas, decreases = [], []
    with torch.no_grad():
        before = float(loss(model))
        for parameter in model.parameters():
            for index in range(parameter.numel()):
                delta, decrease = 0.0, 0.0
                i = 0
                while not delta and (i + 1) * stride <= epsilon * (1 + 1e-9):
                    for sign in (1, -1):
                        changed = copy.deepcopy(model)
                        own = list(changed.parameters())[[id(p) for p in model.parameters()].index(id(parameter))]
                        own.view(-1)[index] += sign * stride * (i + 1)
                        gain = before - float(loss(changed))
                        if gain > decrease:
                            delta, decrease = sign * stride * (i + 1), gain
                    i += 1
                deltas.append(delta)
                decreases.append(decrease)
    return deltas, decreases


class Vector(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def discrete_gradient_of(function: Callable[[Tensor], Tensor], x: Tensor, **settings: float) -> DiscreteGradient:
    point = nn.ParameterDict({"x": x})
    return discrete_gradient(lambda _: function(point["x"]), point, **settings)


def mlp(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), activation(), nn.Linear(4, 4), activation(), nn.Linear(4, 2)).double()


_DATA = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
X, Y = _DATA[:, :3], _DATA[:, 3:]


def error(model: nn.Module) -> Tensor:
    return F.mse_loss(model(X), Y)


def rosenbrock(model: nn.Module) -> Tensor:
    odd, even = model.x.view(-1, 2).unbind(1)
    return (100 * (odd**2 - even) ** 2 + (odd - 1) ** 2).sum()


#: Loss, model, epsilon, stride; the steps of a loss of binary activations are many strides wide.
CASES: dict[str, tuple[Loss, nn.Module, float, float]] = {
    "quadratic": (lambda m: (m.x**2).sum(), Vector(0.004, -3.0, 0.0, 0.02), 0.02, 0.01),
    "rosenbrock": (rosenbrock, Vector(-1.0, 2.0, 3.0, 3.0), 0.1, 0.01),
    "smooth": (error, mlp(nn.Tanh), 0.01, 0.001),
    "binary": (error, mlp(BinaryActivation), 0.2, 0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_finds_what_the_definition_says(case: str) -> None:
    loss, model, epsilon, stride = CASES[case]
    deltas, decreases = definition(loss, model, epsilon, stride)
    found = discrete_gradient(loss, model, epsilon, stride)
    mine = torch.cat([m.flatten() for m in found.multiples.values()]).double() * stride
    torch.testing.assert_close(mine, torch.tensor(deltas, dtype=torch.float64))
    torch.testing.assert_close(
        torch.cat([d.flatten() for d in found.decreases.values()]), torch.tensor(decreases, dtype=torch.float64)
    )
    assert found.found == sum(delta != 0 for delta in deltas)
    assert sorted(found.deltas().tolist()) == pytest.approx(sorted(abs(d) for d in deltas if d))
    # What is taken, by the definition: from the best on, while there is budget.
    alone = [d for d in range(len(deltas)) if deltas[d] and abs(deltas[d]) < epsilon * (1 - 1e-9)]
    best = sorted(alone, key=lambda d: -decreases[d] / abs(deltas[d]))
    budget, wanted = 0.0, []
    for d in best:
        budget += deltas[d] ** 2
        if budget >= epsilon**2 * (1 - 1e-9):
            break
        wanted.append(d)
    taken = torch.cat([t.flatten() for t in found.taken.values()])
    if not found.retries:
        assert torch.nonzero(taken).flatten().tolist() == sorted(wanted)
    assert float(taken.square().sum()) < epsilon**2


@pytest.mark.parametrize("case", CASES)
def test_the_loss_decreases_by_what_is_said(case: str) -> None:
    loss, model, epsilon, stride = CASES[case]
    model = copy.deepcopy(model)
    found = discrete_gradient(loss, model, epsilon, stride)
    assert found.loss_before == float(loss(model))
    found.apply(model)
    assert found.loss_after == pytest.approx(float(loss(model)), rel=1e-12)
    assert found.loss_after < found.loss_before


def test_a_set_that_raises_the_loss_is_halved_until_it_lowers_it() -> None:
    """All together overshoot: each of ten numbers alone halves what is left of their sum."""
    x = torch.full((10,), 0.1, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return (x.sum() - 0.8).abs()

    found = discrete_gradient_of(function, x, epsilon=1.0, stride=0.2)
    assert (found.retries, found.count_taken) == (3, 1)
    assert found.loss_after == pytest.approx(0.0, abs=1e-12)
    assert x.tolist() == [0.1] * 10


def test_an_undefined_loss_on_one_side_hides_no_decrease_on_the_other() -> None:
    found = discrete_gradient_of(lambda x: -(1.0 - x).log().sum(), torch.tensor([0.995]), epsilon=0.1, stride=0.01)
    assert found.multiples["x"].tolist() == [-1]


def test_at_a_minimum_nothing_is_taken_and_it_says_so() -> None:
    found = discrete_gradient_of(lambda x: (x**2).sum(), torch.zeros(3), epsilon=0.1, stride=0.01)
    assert (found.found, found.count_taken, found.retries) == (0, 0, 0)
    assert found.loss_after == found.loss_before == 0
    assert found.evaluations == 1 + 3 * 10 * 2
    assert len(found.deltas()) == 0


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.floats(1e-6, 1.0)), min_size=1, max_size=40),
    st.integers(1, 60),
    st.sampled_from(["decrease/delta", "decrease/delta^2"]),
)
def test_the_budget_is_never_exceeded_and_no_better_change_is_left_out(
    found: list[tuple[int, float]], strides: int, objective: str
) -> None:
    multiples = torch.tensor([multiple for multiple, _ in found])
    decreases = torch.tensor([decrease for _, decrease in found], dtype=torch.float64)
    order, first = taken_first(multiples, decreases, strides * 1e-3, 1e-3, objective)
    taken = order[:first]
    assert int(multiples[taken].square().sum()) < strides**2
    assert bool((multiples[taken] != 0).all())
    power = 2 if objective.endswith("2") else 1
    value = decreases / (multiples.abs() * 1e-3).double() ** power
    fits = (multiples != 0) & (multiples.square() < strides**2)
    assert sorted(order.tolist()) == torch.nonzero(fits).flatten().tolist()
    left = sorted(set(order.tolist()) - set(taken.tolist()))
    if len(taken) and left:
        assert float(value[left].max()) <= float(value[taken].min()) * (1 + 1e-12)
    if left:  # and the next one would have exceeded it
        best = max(left, key=lambda d: float(value[d]))
        rest = min(int(multiples[d]) ** 2 for d in left if float(value[d]) >= float(value[best]) * (1 - 1e-12))
        assert int(multiples[taken].square().sum()) + max(rest, int(multiples[best]) ** 2) >= strides**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0}, "epsilon must be a number above 0, got 0"),
        ({"stride": -1e-4}, "stride must be a number above 0, got -0.0001"),
        ({"stride": 0.5}, "stride must be at most epsilon=0.01, got 0.5"),
        ({"objective": "decrease"}, "unknown objective 'decrease': did you mean 'decrease/delta'"),
        ({"stride": 1e-20}, r"stride must be above \S+ to change the weights of 0.weight \(float64\), got 1e-20"),
        ({"names": "3.*"}, r"unknown parameter '3.\*'"),
        ({"loss": lambda m: m(X)}, r"loss\(model\) must return a scalar tensor, got shape \(6, 2\)"),
    ],
)
def test_refusals_are_one_line(change: dict[str, Any], message: str) -> None:
    loss, model, _, _ = CASES["smooth"]
    with pytest.raises(UserError, match=message) as caught:
        discrete_gradient(**{"loss": loss, "model": model, **change})
    assert "\n" not in str(caught.value)
