"""What the forward cache adds to stopping 4 of 6 convolutions at a fifth of the run: FLOPs, time, memory, accuracy.

    python benchmarks/forward_cache.py

Two workloads. Digits: 30 epochs of the default workload. Wide stack: the same data at 32x32 through a ResNet-18-like
stack without shortcuts (eight 3x3 convolutions of 16 to 64 channels with norms; through the sixth stopped), 10
epochs, whose convolutions are more of a step. For each seed, baseline, stopped and stopped with cache run in random
order; evaluation is not in the training time. The cache holds the prefix's norms in eval mode, which is another
training, hence the accuracies.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from statistics import mean, stdev

import torch.nn.functional as F
from machine import header, spread
from torch import nn

from trainables.config import TrialConfig
from trainables.training import run as run_module
from trainables.training.run import TrainingRun
from trainables.workloads import build_for
from trainables.workloads.base import Batch
from trainables.workloads.digits import Digits

WIDE = ((16, 1), (16, 1), (16, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1))
CACHE_MB = 100


class WideStack(Digits):
    """Digits at 32x32 through eight convolutions."""

    name = "wide_stack"

    def make_model(self) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = 1
        for number, (width, stride) in enumerate(WIDE, start=1):
            layers[f"conv{number}"] = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
            layers[f"norm{number}"] = nn.BatchNorm2d(width)
            layers[f"relu{number}"] = nn.ReLU()
            channels = width
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["classifier"] = nn.Linear(channels, 10)
        return nn.Sequential(layers)

    def train_batches(self, epoch: int, seed: int) -> Iterator[Batch]:
        for images, labels in super().train_batches(epoch, seed):
            yield F.interpolate(images, scale_factor=2.0), labels

    def evaluate(self, model: nn.Module, split: str, device: object) -> float:
        return super().evaluate(nn.Sequential(nn.Upsample(scale_factor=2.0), model), split, device)


def run(workload: Digits, config: TrialConfig) -> dict[str, float]:
    """The last row, and what the cache held."""
    run_module.build_for = lambda *_: workload  # type: ignore[assignment]
    try:
        with TrainingRun(config) as training:
            while not training.finished:
                row = training.train_epoch()
            cache = training.forward_cache
            return {**row, "file_bytes": 0 if cache is None else cache.bytes}
    finally:
        run_module.build_for = build_for


def table(workload: Digits, *, epochs: int, layer: int, seeds: range) -> None:
    """Print one workload's table."""
    steps = epochs * workload.steps_per_epoch
    stop = {"CAC_STOP_LAYER_NUM": (layer,), "CAC_STOP_LAYER_ITR": (steps // 5 - 1,)}
    settings = {
        "baseline": {"method": "none"},
        "stopped": stop,
        "stopped, cache": {**stop, "forward_cache_mb": CACHE_MB},
    }
    print(f"\n{workload.name}: {epochs} epochs, {steps} steps, stopped at step {steps // 5}, {len(seeds)} seeds")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    run(workload, TrialConfig(epochs=1, method="none"))
    for seed in seeds:
        order = list(settings)
        random.shuffle(order)
        for name in order:
            config = TrialConfig.from_mapping({"epochs": epochs, "seed": seed, **settings[name]})
            rows[name].append(run(workload, config))
    print(
        f"{'':<16}{'FLOPs saved':>12}  {'training time saved (median, range)':<48}{'test accuracy':>16}{'file MB':>9}"
    )
    for name, found in rows.items():
        saved = [1 - r["train_time_s"] / b["train_time_s"] for r, b in zip(found, rows["baseline"], strict=True)]
        accuracies = [r["test_quality"] for r in found]
        print(
            f"{name:<16}{found[0]['compute_saved']:>12.3f}  {spread(saved):<48}"
            f"{mean(accuracies):>9.4f} ± {stdev(accuracies):.4f}{found[0]['file_bytes'] / 1e6:>7.1f}"
        )
    pairs = zip(rows["stopped, cache"], rows["stopped"], strict=True)
    both = [(1 - c["train_time_s"] / s["train_time_s"], c["test_quality"] - s["test_quality"]) for c, s in pairs]
    print(f"cache against stopped alone: time saved {spread([time for time, _ in both])};")
    print(f"  test accuracy {spread([gain for _, gain in both])}, mean {mean(gain for _, gain in both):+.4f}")


def main() -> None:
    """Print the tables."""
    random.seed(0)
    print(header("benchmarks/forward_cache.py"))
    table(Digits(), epochs=30, layer=11, seeds=range(10))
    table(WideStack(), epochs=10, layer=17, seeds=range(5))


if __name__ == "__main__":
    main()
