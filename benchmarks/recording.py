"""Cost of `gradskip.record` at its default interval, over a step: ratio in one run.

    python benchmarks/recording.py [cpu|cuda]

ResNet-18, 32x32 images. The cost is that of all measurements and of writing the file at the end, over the steps that
they are spread over; beside a whole training step stands the optimizer's alone, which is the strictest measure.
"""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median

import torch
from machine import header, spread
from resnet import resnet18
from torch import nn

from trainables.gradskip import SGD, Settings, record

EVERY, MEASUREMENTS, ROUNDS = 200, 50, 7


def main() -> None:
    """Print the ratios."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    batch = 512 if device == "cuda" else 32
    torch.set_num_threads(2)
    name = torch.cuda.get_device_name() if device == "cuda" else "2 threads"
    print(header("benchmarks/recording.py"), f"| {name}, ResNet-18, batch {batch}, every {EVERY} steps")
    model = resnet18().to(device)
    waiting = Settings(start_itr=10**9)
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True, settings=waiting)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.zeros(batch, dtype=torch.int64, device=device)

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def training_step() -> float:
        begun = now()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        return now() - begun

    def optimizer_steps(count: int) -> float:
        begun = now()
        for _ in range(count):
            optimizer.step()
        return now() - begun

    training_step()
    of_training, of_optimizer = [], []
    for _ in range(ROUNDS):
        plain_s = optimizer_steps(MEASUREMENTS)
        with tempfile.TemporaryDirectory() as folder:
            begun = now()
            with record(optimizer, f"{folder}/variances.parquet", every=1):
                optimizer_steps(MEASUREMENTS)
            added_s = (now() - begun - plain_s) / (EVERY * MEASUREMENTS)
        of_training.append(added_s / median(training_step() for _ in range(3)))
        of_optimizer.append(added_s * MEASUREMENTS / plain_s)
    print(f"added share of a training step:        {spread(of_training)}")
    print(f"added share of the optimizer's step:   {spread(of_optimizer)}")


if __name__ == "__main__":
    main()
