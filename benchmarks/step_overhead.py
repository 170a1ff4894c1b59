"""Cost of a gradient-skip step with nothing stopped, over torch's own optimizer's: ratio in one run.

    python benchmarks/step_overhead.py [cpu|cuda]

Also: a decision step (one variance) over a plain one, and a step with all but two of 1,200 small tensors stopped over
torch's on the same tensors, of which two have gradients.

Both optimizers step the same parameters with the same gradients. Rounds alternate between them, in random order,
and each round's ratio is that of the two medians of its steps, so that a machine that slows down slows both.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from statistics import median

import torch
from machine import header, now, spread
from torch import nn

from trainables.gradskip import SGD, Adam, AdamW, Settings
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


DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"

#: Ours, torch's own, and their options.
KINDS = {
    "SGD": (SGD, torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4}),
    "Adam": (Adam, torch.optim.Adam, {"lr": 1e-6}),
    "AdamW": (AdamW, torch.optim.AdamW, {"lr": 1e-6, "weight_decay": 1e-2}),
}


#: Small tensors, of which so many train.
MANY, TRAINING = 1200, 2


def many(*, stopped: bool) -> list[nn.Parameter]:
    """Small tensors; with ``stopped`` only the last ones have a gradient, as a user's own freezing leaves them."""
    made = parameters([(16, 16)] * MANY)
    if stopped:
        for parameter in made[:-TRAINING]:
            parameter.requires_grad_(False)
            parameter.grad = None
    return made


def timed_step(optimizer: torch.optim.Optimizer) -> float:
    """Seconds of one step, finished on the device."""
    begun = now(DEVICE)
    optimizer.step()
    return now(DEVICE) - begun


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Random parameters with small random gradients."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE) * 1e-3
    return made


def ratios(
    first: Callable[[], torch.optim.Optimizer],
    second: Callable[[], torch.optim.Optimizer],
    *,
    rounds: int,
    steps: int,
) -> tuple[list[float], float]:
    """First over second, ratio of each round's medians; and the second's median step in seconds.

    Every round builds both anew, now the one and now the other first: where a tensor lies in memory makes more of a
    difference than what is measured here.
    """
    found, plain = [], []
    for round_number in range(rounds + 1):
        built = {which: (first, second)[which]() for which in ((0, 1) if round_number % 2 else (1, 0))}
        for optimizer in built.values():
            optimizer.step()
        times: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(steps):
            order = [0, 1]
            random.shuffle(order)
            for which in order:
                times[which].append(timed_step(built[which]))
        if round_number:  # the first warms up
            found.append(median(times[0]) / median(times[1]))
            plain.append(median(times[1]))
    return found, median(plain)


def main() -> None:
    """Print the tables."""
    random.seed(0)
    warnings.filterwarnings("ignore", message="Gradient-Skip (will|may) stop nothing")
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "1 thread"
    print(header("benchmarks/step_overhead.py"), "|", name)
    digits = [tuple(p.shape) for p in Digits().make_model().parameters()]
    resnet = resnet50_shapes()
    assert sum(torch.Size(s).numel() for s in resnet) == 25_557_032
    # Auto mode at work but not yet due, as in the first part of a run: what a user pays before anything is saved.
    waiting = Settings(start_itr=10**9)
    for model, shapes, rounds, steps in (("digits", digits, 16, 400), ("ResNet-50", resnet, 16, 16)):
        for kind, (ours, theirs, options) in KINDS.items():
            for path in ({"foreach": True}, {"fused": True}):
                found, plain_s = ratios(
                    lambda: ours(parameters(shapes), **options, **path, settings=waiting),  # noqa: B023
                    lambda: theirs(parameters(shapes), **options, **path),  # noqa: B023
                    rounds=rounds,
                    steps=steps,
                )
                print(
                    f"{model:<10} {kind:<6} {next(iter(path)):<8} {len(shapes):>4} parameters: "
                    f"step over torch's {spread(found)}; torch's step {1e6 * plain_s:.0f} us",
                    flush=True,
                )
    options = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4, "fused": True}
    always = Settings(start_itr=0, samples=1, start_thr=1e-9)
    found, _ = ratios(
        lambda: SGD(parameters(resnet), **options, settings=always),
        lambda: torch.optim.SGD(parameters(resnet), **options),
        rounds=16,
        steps=16,
    )
    print(f"ResNet-50  a decision step over a plain one, SGD fused: {spread(found)}")
    stopped = Settings(stop_layer_num=(MANY - TRAINING - 1,), stop_layer_itr=(0,))
    for kind, (ours, theirs, options) in KINDS.items():
        for path in ({"foreach": True}, {"fused": True}):
            found, plain_s = ratios(
                lambda: ours(many(stopped=False), **options, **path, settings=stopped),  # noqa: B023
                lambda: theirs(many(stopped=True), **options, **path),  # noqa: B023
                rounds=16,
                steps=400,
            )
            print(
                f"{kind:<6} {next(iter(path)):<8} {MANY - TRAINING} of {MANY} tensors stopped: step over torch's with "
                f"{TRAINING} gradients {spread(found)}; torch's step {1e6 * plain_s:.0f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()
