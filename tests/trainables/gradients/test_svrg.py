"""SVRG: unbiased, its formula against loops over samples, its variance, its cost, and its use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sampled_nets import (
    cross_entropy,
    each_gradient,
    mean_of,
    noisy_net,
    table,
    table_net,
)
from torch import nn

from trainables.errors import UserError
from trainables.gradients.gradient_method import Draw, GradientMethod
from trainables.gradients.svrg import SVRG
from trainables.runtime.operator_flops import flop_counter

COUNT, SIZE = 14, 4


def method(model: nn.Module, data: Any, **more: Any) -> SVRG:
    optimizer = torch.optim.SGD(model.parameters(), lr=more.pop("lr", 0.5))
    return SVRG(model, cross_entropy, data, optimizer, batch_size=SIZE, **more)


def partition(found: GradientMethod) -> list[Draw]:
    source = torch.Generator().manual_seed(7)
    return [found.drawn(numbers, source) for numbers in torch.randperm(COUNT, generator=source).split(SIZE)]


def mean_direction(found: SVRG) -> dict[str, torch.Tensor]:
    draws = partition(found)
    return mean_of([found.gradient(draw) for draw in draws], [draw.size / COUNT for draw in draws])


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_it_is_the_formula_and_unbiased(alpha: float) -> None:
    model, data = table_net(), table(COUNT)
    found = method(model, data, alpha=alpha)
    old = copy.deepcopy(model)
    for _ in range(3):
        found.step()
    now, then = each_gradient(model, data), each_gradient(old, data)
    mean = mean_of(then)
    for draw in partition(found):
        assert draw.numbers is not None
        chosen = draw.numbers.tolist()
        g, g0 = mean_of([now[i] for i in chosen]), mean_of([then[i] for i in chosen])
        expected = {n: g[n] - alpha * (g0[n] - mean[n]) for n in g}
        torch.testing.assert_close(found.gradient(draw), expected, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(mean_direction(found), mean_of(now), rtol=1e-10, atol=1e-13)


def test_a_snapshot_costs_a_pass_and_a_step_one_gradient() -> None:
    """Against torch's counter around plain passes; the last batch is smaller."""
    model, data = table_net(), table(COUNT)

    def cost(sizes: list[int]) -> tuple[int, int]:
        counts = [0, 0]
        for size in sizes:
            with flop_counter() as forward:
                loss = cross_entropy(model, tuple(part[:size] for part in data))
            with flop_counter() as backward:
                loss.backward()
            counts = [counts[0] + forward.get_total_flops(), counts[1] + backward.get_total_flops()]
        return counts[0], counts[1]

    found = method(model, data, snapshot_every=3)
    snapshot, gradient = cost([4, 4, 4, 2]), cost([4])
    for step in range(7):
        found.step()
        taken = found.meter.take()
        expected = tuple(s * (step % 3 == 0) + g for s, g in zip(snapshot, gradient, strict=True))
        assert (taken.forward_flops, taken.backward_flops) == expected


def test_the_coefficient_falls_to_nothing() -> None:
    model, data = table_net(), table(COUNT)
    found = method(model, data, alpha=0.8, alpha_end=4, snapshot_every=2)
    assert [found.alpha_at(i) for i in (0, 1, 2, 4, 9)] == pytest.approx([0.8, 0.6, 0.4, 0.0, 0.0])
    assert method(model, data).alpha_at(10**6) == 1
    spent = []
    for _ in range(6):
        found.step()
        spent.append(found.meter.take().backward_flops)
    assert [flops > 0 for flops in spent] == [True] * 4 + [False] * 2
    assert spent[0] == spent[2] > spent[1] == spent[3]


def test_the_mode_must_be_the_snapshots() -> None:
    model, data = noisy_net(), table(COUNT)
    found = method(model, data)
    found.step()
    model.eval()
    with pytest.raises(UserError, match=r"taken in train mode .* got a model in eval mode: .* or call snapshot\(\)"):
        found.step()
    found.snapshot()
    found.step()
