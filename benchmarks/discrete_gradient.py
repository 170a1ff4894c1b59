"""The discrete gradient's two runs of the laboratory: which changes lower the loss, and what a step of them is worth.

    python benchmarks/discrete_gradient.py [--seeds 3] [--batch 128] [--output discrete.png]

Three layers of 32 on a teacher's outputs (workload `binary_mlp`), raw, with binary activations, and the same network
with tanh; epsilon 1e-1 with stride 1e-4, and epsilon 1e-2 with stride 1e-5: a thousand strides each. Printed for each
layer: the share of weights of which a change lowers the loss, and quantiles of the smallest such change. Then the
decrease of the loss by a step, on the batch itself and on another one, beside a step of the same length along the plain
straight-through (tanh: the exact) gradient. With binary activations a search takes one to three million losses, so the
batch is small: a minute or two a search on one core.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import header, spread
from torch import Tensor, nn

from trainables.gradients import DiscreteGradient, autograd_gradient, discrete_gradient
from trainables.workloads import binary_mlp

#: Epsilon and stride of the laboratory's runs.
RUNS = ((1e-1, 1e-4), (1e-2, 1e-5))
ACTIVATIONS = ("binary", "tanh")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One search, and the decreases of the loss by steps of one length."""

    found: DiscreteGradient
    """Result of the search."""
    seconds: float
    """Time of the search."""
    discrete: tuple[float, float]
    """Decrease by the discrete step, on the batch and on another one."""
    gradient: tuple[float, float]
    """The same of a step of the same length along the gradient."""


def network(activation: str, seed: int) -> nn.Sequential:
    """The workload's network, with its activations or with tanh."""
    torch.manual_seed(seed)
    model = binary_mlp.network()
    if activation == "tanh":
        for name, module in list(model.named_children()):
            if not isinstance(module, nn.Linear):
                setattr(model, name, nn.Tanh())
    return model


def run(activation: str, epsilon: float, stride: float, *, seed: int = 0, batch: int = 128) -> Step:
    """Search once, and take both steps."""
    model = network(activation, seed)
    generator = torch.Generator().manual_seed(1_000 + seed)
    own, other = binary_mlp.draw(generator, batch), binary_mlp.draw(generator, batch)

    def loss_on(inputs: Tensor, targets: Tensor) -> Any:
        return lambda m: F.mse_loss(m(inputs), targets)

    begun = time.perf_counter()
    found = discrete_gradient(loss_on(*own), model, epsilon, stride)
    seconds = time.perf_counter() - begun
    length = torch.cat([change.flatten() for change in found.taken.values()]).norm()
    slopes = autograd_gradient(loss_on(*own), model)
    size = torch.cat([slope.flatten() for slope in slopes.values()]).norm()
    descent = {name: -slope * length / size for name, slope in slopes.items()}

    def decrease(change: Any) -> tuple[float, float]:
        changed = network(activation, seed)
        with torch.no_grad():
            before = [float(loss_on(*part)(changed)) for part in (own, other)]
            for name, parameter in changed.named_parameters():
                parameter.add_(change[name])
            after = [float(loss_on(*part)(changed)) for part in (own, other)]
        return before[0] - after[0], before[1] - after[1]

    return Step(found=found, seconds=seconds, discrete=decrease(found.taken), gradient=decrease(descent))


def deltas(found: DiscreteGradient, name: str) -> Tensor:
    """The sizes of the changes found in one parameter."""
    multiples = found.multiples[name].abs().flatten()
    return multiples[multiples > 0].double() * found.stride


def draw(axes: Any, found: DiscreteGradient, epsilon: float) -> None:
    """Draw the distribution of delta in each layer's weight."""
    bins = torch.logspace(torch.log10(torch.tensor(found.stride)) - 0.02, torch.log10(torch.tensor(epsilon)), 40)
    for name in (name for name in found.multiples if name.endswith("weight")):
        share = float((found.multiples[name] != 0).float().mean())
        axes.hist(deltas(found, name).numpy(), bins=bins.numpy(), histtype="step",
                  label=f"{name}: {share:.0%} found")  # fmt: skip
    axes.set(xscale="log", xlabel="delta, the smallest change that lowers the loss", ylabel="weights")
    axes.set_yscale("symlog", linthresh=1)
    axes.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(header("discrete_gradient.py"), "| threads 1")
    drawn = []
    for activation in ACTIVATIONS:
        for epsilon, stride in RUNS:
            steps = [
                run(activation, epsilon, stride, seed=seed, batch=arguments.batch) for seed in range(arguments.seeds)
            ]
            drawn.append((activation, epsilon, stride, steps[0].found))
            print(
                f"\n{activation}, epsilon {epsilon:g}, stride {stride:g}, batch {arguments.batch}, {len(steps)} seeds"
            )
            for name in (name for name in steps[0].found.multiples if name.endswith("weight")):
                every = torch.cat([deltas(step.found, name) for step in steps])
                count = sum(step.found.multiples[name].numel() for step in steps)
                low, middle, high = torch.quantile(every, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
                reach = f"delta median {middle:.2g} (10 % {low:.2g}, 90 % {high:.2g})"
                print(f"  {name:<15} found {len(every) / count:6.1%}  {reach}")
            print(f"  taken of found   {spread([step.found.count_taken / max(1, step.found.found) for step in steps])}")
            print(f"  retries          {spread([float(step.found.retries) for step in steps])}")
            print(f"  evaluations      {spread([float(step.found.evaluations) for step in steps])}")
            print(f"  seconds          {spread([step.seconds for step in steps])}")
            for place, where in enumerate(("own batch", "held out")):
                print(f"  decrease, {where:<9}: discrete {spread([step.discrete[place] for step in steps])}, "
                      f"gradient {spread([step.gradient[place] for step in steps])}")  # fmt: skip
    if arguments.output:
        from matplotlib import pyplot

        figure, grid = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
        for axes, (activation, epsilon, stride, found) in zip(grid.flat, drawn, strict=True):
            draw(axes, found, epsilon)
            axes.set_title(f"{activation}, epsilon {epsilon:g}, stride {stride:g}", fontsize=10)
        figure.savefig(arguments.output, dpi=110)


if __name__ == "__main__":
    main()
