"""Central differences against the loop that changes one weight after the other, and against autograd.

    python benchmarks/central_difference.py [--rounds 5] [--threads 1]

Speed: a small convolutional network, strided or with max-pooling, at batch 8 and 32, all weights. The loop is the
laboratory's, two forward passes a weight with the weight changed in place, without its copies of the state. Estimates
are timed after a first one, in which the sizes of chunks are found. The ratio is of medians of one run, loop and
estimate in turn. Error: |estimate - gradient| / |gradient| by epsilon, for a smooth network in float64 and float32 and
for one of ReLU and max-pooling in float32.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from machine import header, spread
from torch import Tensor, nn

from trainables.gradients import autograd_gradient, central_difference, relative_error

EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def network(activation: type[nn.Module], pool: type[nn.Module]) -> nn.Sequential:
    """Three convolutions and a classifier for images of 8x8, 3,893 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), activation(),
        nn.Conv2d(8, 16, 3, padding=1), activation(), pool(2),
        nn.Conv2d(16, 16, 3, padding=1), activation(), pool(2),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def strided() -> nn.Sequential:
    """Three convolutions, two of them strided, and a classifier for images of 8x8, 3,893 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def loss_of(images: Tensor, labels: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: F.cross_entropy(model(images), labels)


def loop(loss: Callable[[nn.Module], Tensor], model: nn.Module, epsilon: float) -> dict[str, Tensor]:
    """Two forward passes a weight, one after the other."""
    found = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat, slopes = parameter.view(-1), torch.zeros(parameter.numel())
            for index in range(len(flat)):
                before = flat[index].item()
                flat[index] = before + epsilon
                above = loss(model).item()
                flat[index] = before - epsilon
                below = loss(model).item()
                flat[index] = before
                slopes[index] = (above - below) / (2 * epsilon)
            found[name] = slopes.view(parameter.shape)
    return found


def speed(rounds: int, batch: int, pooled: bool) -> None:
    torch.manual_seed(0)
    model = network(nn.ReLU, nn.MaxPool2d) if pooled else strided()
    loss = loss_of(torch.randn(batch, 1, 8, 8), torch.randint(5, (batch,)))
    times: dict[str, list[float]] = {"loop": [], "vectorised": []}
    calls = {"loop": lambda: loop(loss, model, 1e-2), "vectorised": lambda: central_difference(loss, model, 1e-2)}
    difference = relative_error(calls["vectorised"](), calls["loop"]())
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun)
    ratios = [a / b for a, b in zip(times["loop"], times["vectorised"], strict=True)]
    weights = sum(p.numel() for p in model.parameters())
    kind = "max-pooling" if pooled else "strided"
    print(f"\n{kind}, {weights:,} weights, batch {batch}; the two differ by {difference:.1e}")
    for name, found in times.items():
        print(f"  {name:<12} s {spread(found)}")
    print(f"  times as fast {median(times['loop']) / median(times['vectorised']):.1f}, by round {spread(ratios)}")


def errors() -> dict[str, list[float]]:
    """Relative errors at `EPSILONS`, by network."""
    found = {}
    for name, activation, pool, dtype in (
        ("smooth float64", nn.Tanh, nn.AvgPool2d, torch.float64),
        ("smooth float32", nn.Tanh, nn.AvgPool2d, torch.float32),
        ("ReLU, max-pooling float32", nn.ReLU, nn.MaxPool2d, torch.float32),
    ):
        torch.manual_seed(0)
        model = network(activation, pool).to(dtype)
        loss = loss_of(torch.randn(8, 1, 8, 8, dtype=dtype), torch.randint(5, (8,)))
        exact = autograd_gradient(loss, model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an epsilon below the floor, which is what is shown
            found[name] = [relative_error(central_difference(loss, model, e), exact) for e in EPSILONS]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(header("central_difference.py"), f"| threads {arguments.threads}")
    for pooled in (False, True):
        for batch in (8, 32):
            speed(arguments.rounds, batch, pooled)
    print("\nrelative error by epsilon " + "".join(f"{e:>10.0e}" for e in EPSILONS))
    for name, values in errors().items():
        print(f"  {name:<26}" + "".join(f"{value:>10.1e}" for value in values))


if __name__ == "__main__":
    main()
