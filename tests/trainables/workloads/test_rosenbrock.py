"""Rosenbrock's function: the laboratory's experiment with central differences, and what it tells about epsilon."""

from __future__ import annotations

import functools

import pytest
import torch
from runs import finish

from trainables.config import TrialConfig
from trainables.gradients import autograd_gradient, central_difference
from trainables.training.run import TrainingRun
from trainables.workloads.rosenbrock import Pairs, Rosenbrock

A, B, EPSILON = 1.0, 100.0, 1e-2
#: The experiment with two pairs: constant up to here, then a tenth of learning rate and epsilon every so many steps.
FROM, EVERY, UPDATES = 1500, 1500, 500


@functools.cache
def experiment(epochs: int, decays: bool, method: str = "central_difference") -> tuple[list[dict], torch.Tensor]:
    """Rows of a run, and the numbers at its end, (P, 2)."""
    more = {"gradient_epsilon": EPSILON, "gradient_epsilon_decays": decays} if method != "none" else {}
    options = ("pairs=2", f"updates={UPDATES}", f"decay_from={FROM}", f"decay_every={EVERY if decays else 2500}")
    config = TrialConfig(workload="rosenbrock", workload_options=options, method=method, epochs=epochs, **more)
    with TrainingRun(config) as run:
        return finish(run), run.model.get_parameter("x").detach().clone().view(-1, 2)


def values(rows: list[dict]) -> dict[int, float]:
    return {row["step"]: row["quality"] for row in rows}


def test_the_function_its_gradient_and_its_start() -> None:
    torch.manual_seed(5)
    workload = Rosenbrock()
    model = workload.make_model()
    x = model.get_parameter("x").detach()
    assert x.shape == (100,)
    assert x.dtype == torch.float64
    assert x.abs().max() == 10
    assert torch.equal(x, x.round())
    expected = sum(B * (x[2 * i] ** 2 - x[2 * i + 1]) ** 2 + (x[2 * i] - A) ** 2 for i in range(50))
    torch.testing.assert_close(model().detach(), expected)
    odd, even = x[::2], x[1::2]
    slopes = torch.stack([4 * B * odd * (odd**2 - even) + 2 * (odd - A), -2 * B * (odd**2 - even)], 1).view(-1)
    torch.testing.assert_close(autograd_gradient(lambda m: m(), model)["x"], slopes)
    with torch.no_grad():
        model.get_parameter("x").fill_(1.0)
    assert workload.evaluate(model, "validation", "cpu") == {"value": 0.0, "distance": 0.0}


def test_the_fixed_point_of_an_epsilon_is_exact() -> None:
    """d/dx of the difference is 4 b x (x^2 + e^2 - y) + 2 (x - a): zero at x = a / (1 + 2 b e^2), y = x^2."""
    model = Pairs(3, A, B)
    x = A / (1 + 2 * B * EPSILON**2)
    with torch.no_grad():
        model.x.copy_(torch.tensor([x, x**2] * 3, dtype=torch.float64))
    assert float(central_difference(lambda m: m(), model, EPSILON)["x"].abs().max()) < 1e-10
    assert float(autograd_gradient(lambda m: m(), model)["x"].abs().max()) > 0.03
    torch.testing.assert_close(float(model()), 3 * (x - A) ** 2)


@pytest.mark.thorough
@pytest.mark.slow
def test_stuck_almost_right_then_falling_then_at_the_optimum() -> None:
    rows, end = experiment(18, True)
    found = values(rows)
    stuck = [found[step] for step in range(500, FROM + 1, UPDATES)]
    assert min(stuck) > 0.5
    assert max(stuck) / min(stuck) < 4  # no further fall: from the start it fell from thousands
    distances = {row["step"]: float(row["further_metrics"].split(":")[1].strip("} ")) for row in rows}
    assert distances[FROM] < 1  # of numbers that began up to 11 away
    assert found[FROM + EVERY] < 0.05 * found[FROM]
    assert found[rows[-1]["step"]] < 1e-5
    assert float((end - 1).abs().max()) < 0.005
    assert rows[-1]["learning_rate"] == pytest.approx(1e-6)


def test_two_forward_passes_a_number_are_counted() -> None:
    """A step's own loss is (1, 2 P) x (2 P, 1) numbers; the estimate has 4 P such losses, and no backward pass."""
    options = ("pairs=2", "updates=5")
    config = TrialConfig(workload="rosenbrock", workload_options=options, method="central_difference", epochs=1)
    with TrainingRun(config) as run:
        row = run.train_epoch()
    loss = 2 * 4
    assert row["forward_flops"] == 5 * (loss + loss + 8 * loss)  # the estimate looks at the loss once more
    assert row["backward_flops"] == 0
    assert row["dense_flops"] == 5 * 3 * loss
    assert row["compute_saved"] == 1 - 10 / 3
