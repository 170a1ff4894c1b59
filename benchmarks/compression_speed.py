"""What compression costs: masks in a training step of ResNet-20, and reading a schedule of 1,000 layers.

    python benchmarks/compression_speed.py [--batch 32] [--rounds 12]

Steps with and without masks on all convolutions alternate in one process; the ratio is of their medians. A step is
forward, backward and SGD with momentum; with masks also every callback of the scheduler. In an active epoch weights are
masked before the forward pass and after the step, else after it alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from machine import header, spread
from torch import nn

from trainables.compression.schedule import ModelFacts, read_schedule, resolve
from trainables.compression.scheduler import CompressionScheduler
from trainables.workloads.models import build_model

LAYERS = 1000


def step_of(epoch: int | None, batch: int) -> Any:
    """A function that trains one step; with masks set in an epoch before or active now, or without any."""
    torch.manual_seed(0)
    model = build_model("resnet20", classes=10, channels=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = CompressionScheduler(model, optimizer)
    if epoch is not None:
        schedule = {
            "version": 1,
            "pruners": {"p": {"class": "SensitivityPruner", "sensitivities": {"*conv*weight": 0.5}}},
            "policies": [{"pruner": {"instance_name": "p"}, "starting_epoch": 0, "ending_epoch": 1, "frequency": 1}],
        }
        scheduler = CompressionScheduler.from_schedule(model, optimizer, schedule)
        scheduler.on_epoch_begin(0)
    inputs, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    loss_of = nn.CrossEntropyLoss()

    def step() -> None:
        if epoch is not None:
            scheduler.on_minibatch_begin(epoch, 1, 100)
        loss = loss_of(model(inputs), labels)
        if epoch is not None:
            loss = scheduler.before_backward_pass(epoch, 1, 100, loss)
        optimizer.zero_grad()
        loss.backward()
        if epoch is not None:
            scheduler.before_parameter_optimization(epoch, 1, 100)
        optimizer.step()
        if epoch is not None:
            scheduler.on_minibatch_end(epoch, 1, 100)

    return step


def timed(function: Any) -> float:
    """Seconds."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def large_schedule() -> tuple[str, ModelFacts]:
    """A schedule that names 1,000 layers one by one, as published ones do, and the model they are of."""
    names = [f"layer{n // 10}.{n % 10}.conv.weight" for n in range(LAYERS)]
    lines = ["version: 1", "pruners:", "  fine:", "    class: SensitivityPruner", "    sensitivities:"]
    lines += [f"      module.{name}: 0.5" for name in names]
    lines += [
        "policies:",
        "- pruner: {instance_name: fine}",
        "  starting_epoch: 0",
        "  ending_epoch: 9",
        "  frequency: 1",
    ]
    return "\n".join(lines) + "\n", ModelFacts(parameters=dict.fromkeys(names, (16, 16, 3, 3)))


def main() -> None:
    """Print the ratios and the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(header("benchmarks/compression_speed.py"), f"| ResNet-20, batch {arguments.batch}, one thread")
    plain, active, later = (step_of(epoch, arguments.batch) for epoch in (None, 0, 1))
    for step in (plain, active, later):
        step()
    times: dict[str, list[float]] = {"plain": [], "active": [], "later": []}
    for _ in range(arguments.rounds):
        for name, step in (("plain", plain), ("active", active), ("later", later)):
            times[name].append(timed(step))
    for name, said in (("active", "in an active epoch"), ("later", "after its policy")):
        pairs = [masked / dense for masked, dense in zip(times[name], times["plain"], strict=True)]
        ratio = statistics.median(times[name]) / statistics.median(times["plain"])
        print(f"step with masks {said} over a step without: {ratio:.3f}, pairs {spread(pairs)}")
    text, facts = large_schedule()
    seconds = [timed(lambda: resolve(read_schedule(text), facts)) for _ in range(5)]
    print(f"reading and matching {LAYERS} named layers:", spread(seconds), "s")


if __name__ == "__main__":
    main()
