"""Cost of a gradient-skip step with nothing stopped, over `torch.optim.SGD`'s: ratio in one run.

    python benchmarks/step_overhead.py

Both optimizers step the same parameters with the same gradients. Rounds alternate between them, in random order,
and each round's ratio is that of the two medians of its steps, so that a machine that slows down slows both.
"""

from __future__ import annotations

import random
import time
from statistics import median

import torch
from machine import header, spread
from torch import nn

from trainables.gradskip import SGD, Settings
from trainables.workloads.digits import Digits


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Parameter shapes of ResNet-50 (161 tensors, 25,557,032 numbers), in the order of its parameters()."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, channels, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def timed_step(optimizer: torch.optim.Optimizer) -> float:
    """Seconds of one step."""
    begun = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - begun


def ratios(shapes: list[tuple[int, ...]], *, rounds: int, steps: int, **options: object) -> tuple[list[float], float]:
    """Ratio of each round, and the median step of torch's own in seconds."""

    def parameters() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for parameter in made:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
        return made

    common = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4, **options}
    # Auto mode at work but not yet due, as in the first part of a run: what a user pays before anything is saved.
    ours = SGD(parameters(), **common, settings=Settings(start_itr=10**9))  # type: ignore[arg-type]
    theirs = torch.optim.SGD(parameters(), **common)  # type: ignore[arg-type]
    found, plain = [], []
    for round_number in range(rounds + 1):
        times: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(steps):
            order = [0, 1]
            random.shuffle(order)
            for which in order:
                times[which].append(timed_step((ours, theirs)[which]))
        if round_number:  # the first warms up
            found.append(median(times[0]) / median(times[1]))
            plain.append(median(times[1]))
    return found, median(plain)


def main() -> None:
    """Print the table."""
    random.seed(0)
    torch.set_num_threads(1)
    print(header("benchmarks/step_overhead.py"), "| 1 thread")
    digits = [tuple(p.shape) for p in Digits().make_model().parameters()]
    resnet = resnet50_shapes()
    assert sum(torch.Size(s).numel() for s in resnet) == 25_557_032
    for name, shapes, rounds, steps in (("digits", digits, 15, 400), ("ResNet-50", resnet, 9, 40)):
        for path in ({"foreach": True}, {"fused": True}):
            found, plain_s = ratios(shapes, rounds=rounds, steps=steps, **path)
            print(
                f"{name:<10} {next(iter(path)):<8} {len(shapes):>4} parameters: "
                f"step over torch's {spread(found)}; torch's step {1e6 * plain_s:.0f} us"
            )


if __name__ == "__main__":
    main()
