"""The study's main figure: gradient variance against iteration, on real images and on images with duplicates.

    python benchmarks/variance_study.py [--data PATH] [--seeds 3] [--steps 1000] [--samples 4000] [--output FILE.png]

Each estimator (SGD, SVRG, gradient clustering, importance sampling by loss) trains a convolutional network of its own
from the same initial weights by SGD with momentum 0.9, learning rate 0.05, falling by 10 at 60 % and 80 % of the steps,
batches of 64. At --measurements points, 50 gradients of it and of SGD are taken at equal weights (GradientStatistics).
SVRG takes a snapshot every epoch, clustering has 10 clusters and two passes every two epochs.

Data: the CIFAR-10 training images at PATH (any data of workload `images`, the first --samples of a fixed random order),
or without --data the digits that ship with scikit-learn. "Duplicates": half of the images are copies of ten of them.

Printed: for early, middle and late thirds of the run the median of the variance relative to SGD's at the same weights,
SGD's normalised variance, the final losses and accuracies, and the cost in gradient evaluations; then the time of a
measured against an unmeasured SGD training, and of a training step with clustering against a plain one.
Source of the figure's idea: Faghri et al., arXiv:2007.04532, 2020, figures 2 to 5.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import header, spread
from torch import Tensor, nn

from trainables.gradients import (
    SVRG,
    GradientClustering,
    GradientMethod,
    GradientStatistics,
    ImportanceSampling,
)
from trainables.workloads import build

BATCH, RATE, MOMENTUM = 64, 0.05, 0.9
SAMPLES = 50
DUPLICATED = 10
Data = tuple[Tensor, Tensor]


def network(channels: int) -> nn.Module:
    """Five convolutions with group norm, so that a sample's gradient is its own."""
    layers: list[nn.Module] = []
    for width, stride in ((16, 2), (16, 1), (32, 2), (32, 1), (64, 2)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.GroupNorm(4, width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


def load(data: str | None, samples: int) -> Data:
    """Images and labels."""
    options = () if data is None else (f"data={data}", "augment=no")
    found = build("digits" if data is None else "images", options).samples()
    assert found is not None
    order = torch.randperm(found.count, generator=torch.Generator().manual_seed(0))[:samples]
    images, labels = found.batch(order, torch.Generator().manual_seed(0))
    return images, labels


def with_duplicates(data: Data) -> Data:
    """Half of the images replaced by copies of ten."""
    order = torch.arange(len(data[0]))
    half = len(order) // 2
    order[half:] = order[:DUPLICATED].repeat(len(order))[: len(order) - half]
    return data[0][order], data[1][order]


def estimators(epoch: int) -> dict[str, Callable[..., GradientMethod]]:
    """Constructors by name."""
    return {
        "sgd": GradientMethod,
        "svrg": lambda *a, **k: SVRG(*a, snapshot_every=epoch, **k),
        "gradient_clustering": lambda *a, **k: GradientClustering(*a, every=2 * epoch, iterations=2, **k),
        "importance_sampling": ImportanceSampling,
    }


def train(name: str, data: Data, steps: int, seed: int, measurements: int) -> dict[str, Any]:
    """Train one estimator's network, measured along the way."""
    torch.manual_seed(seed)
    model = network(data[0].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps * 6 // 10, steps * 8 // 10], 0.1)
    epoch = max(1, len(data[0]) // BATCH)
    method = estimators(epoch)[name](model, loss, data, optimizer, batch_size=BATCH, seed=seed)
    statistics = GradientStatistics(
        model, data, measurements, SAMPLES, loss=loss, total_steps=steps, batch_size=BATCH, seed=seed
    )
    others = () if name == "sgd" else (method,)
    begun, measuring = time.perf_counter(), 0.0
    for step in range(steps):
        before = time.perf_counter()
        statistics.measure(step, *others)
        measuring += time.perf_counter() - before
        method.step()
        schedule.step()
    took = time.perf_counter() - begun
    with torch.no_grad():
        scores = torch.cat([model(part) for part in data[0].split(500)])
    return {
        "history": statistics.history,
        "loss": float(F.cross_entropy(scores, data[1])),
        "accuracy": float((scores.argmax(1) == data[1]).float().mean()),
        "train_s": took - measuring,
        "measuring_s": measuring,
    }


def curves(found: dict[str, Any], name: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, average variance, variance relative to SGD's at the same weights, normalised variance."""
    own = [m for m in found["history"] if m.estimator == name]
    sgd = [m for m in found["history"] if m.estimator == "sgd"]
    relative = [a.total.average_variance / b.total.average_variance for a, b in zip(own, sgd, strict=True)]
    return (
        [m.step for m in own],
        [m.total.average_variance for m in own],
        relative,
        [m.total.normalised_variance for m in own],
    )


def main() -> None:
    """Run all trainings, print the table and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--measurements", type=int, default=20)
    parser.add_argument("--times", action="store_true", help="print only what a step with clustering takes")
    parser.add_argument("--output", default="variance_study.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(header("variance_study.py"))
    real = load(arguments.data, arguments.samples)
    if arguments.times:
        print_times(real)
        return
    kinds = {"real images": real, "half of them copies of ten": with_duplicates(real)}
    results: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for kind, data in kinds.items():
        for name in estimators(1):
            for seed in range(arguments.seeds):
                results[kind, name].append(train(name, data, arguments.steps, seed, arguments.measurements))
            runs = results[kind, name]
            relative = np.array([curves(run, name)[2] for run in runs])
            thirds = [spread(np.median(part, axis=1).tolist()) for part in np.array_split(relative, 3, axis=1)]
            cost = np.mean([m.gradient_evaluations for run in runs for m in run["history"] if m.estimator == name])
            print(
                f"{kind}, {name}: variance over SGD's, early {thirds[0]}, middle {thirds[1]}, late {thirds[2]}; "
                f"loss {spread([run['loss'] for run in runs])}, "
                f"accuracy {spread([run['accuracy'] for run in runs])}, "
                f"a measurement of {SAMPLES} costs {cost:.0f} gradients, "
                f"training {spread([r['train_s'] for r in runs])} s",
                flush=True,
            )
            if name == "sgd":
                normalised = np.array([curves(run, name)[3] for run in runs]).mean(0)
                print(f"  SGD's normalised variance at the points: {np.round(normalised, 3).tolist()}")
    runs = results["real images", "sgd"]
    shares = [run["measuring_s"] / run["train_s"] for run in runs]
    print(
        f"time of measuring SGD over the training's: {spread(shares)}; "
        f"samples / every = {SAMPLES * arguments.measurements / arguments.steps:.2f}"
    )
    draw(results).savefig(arguments.output, dpi=90)
    print(f"figure: {arguments.output}")


def print_times(data: Data, rounds: int = 7, steps: int = 60) -> None:
    """Print the time of a step with clustering over a plain one's, of the same round."""
    ratios = defaultdict(list)
    for _ in range(rounds):
        model = network(data[0].shape[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=MOMENTUM)
        given = (model, loss, data, optimizer)
        full = GradientClustering(*given, batch_size=BATCH, every=10**9)
        full.update()
        methods = {
            "plain": GradientMethod(*given, batch_size=BATCH),
            "full, between updates": full,
            "online, an update every 10 steps": GradientClustering(*given, batch_size=BATCH, mode="online", every=10),
            "online, an update every step": GradientClustering(*given, batch_size=BATCH, mode="online", every=1),
        }
        took = {}
        for name, method in methods.items():
            method.step()
            begun = time.perf_counter()
            for _ in range(steps):
                method.step()
            took[name] = (time.perf_counter() - begun) / steps
        begun = time.perf_counter()
        full.update()
        took["a full update, for each batch it looks at"] = (
            (time.perf_counter() - begun) / full.iterations / (len(data[0]) / BATCH)
        )
        for name in took:
            ratios[name].append(took[name] / took["plain"])
    for name, found in ratios.items():
        print(f"{name}: {spread(found)} times a plain step")


def draw(results: Mapping[tuple[str, str], list[dict[str, Any]]]) -> Any:
    """Return the figure: a row for each kind of data; variance, relative variance, normalised variance."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(kind for kind, _ in results))
    figure, axes = plt.subplots(len(kinds), 3, figsize=(13, 3.6 * len(kinds)), squeeze=False, constrained_layout=True)
    titles = ("average variance", "variance over SGD's at the same weights", "normalised variance")
    for row, kind in zip(axes, kinds, strict=True):
        for (of, name), runs in results.items():
            if of != kind:
                continue
            every = [curves(run, name) for run in runs]
            for axis, part in zip(row, (1, 2, 3), strict=True):
                table = np.array([each[part] for each in every])
                steps = every[0][0]
                (line,) = axis.plot(steps, np.median(table, 0), label=name.replace("_", " "))
                axis.fill_between(steps, table.min(0), table.max(0), alpha=0.15, color=line.get_color(), linewidth=0)
        for axis, title in zip(row, titles, strict=True):
            axis.set_title(f"{title}\n{kind}", fontsize=10)
            axis.set_xlabel("iteration")
        row[0].set_yscale("log")
        row[1].set_ylim(0, 1.6)
        row[2].set_ylim(0, 1.1)
    axes[0][0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
