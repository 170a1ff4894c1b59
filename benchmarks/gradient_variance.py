"""Normalised gradient variance of digits' layers over training, and what the rule that stops by it saves and loses.

    python benchmarks/gradient_variance.py [--seeds 10]

First the cost of a step in which the rule is not due, ResNet-50's parameters; no more with ``--seeds 0``. Then dense
runs: the signal of each convolution over intervals of 10 and 30 of the 300 steps, and beside it the study's statistic
at fixed weights, over the interval's batches again at the weights that the interval ends with; medians over seeds.
Then runs with rule `gradient_variance` by start, interval and threshold, beside the published rule and a linear
schedule: compute saved, and test accuracy minus the dense run's of the same seed.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from statistics import mean, median, stdev
from typing import Any

import torch
from clock_savings import run
from machine import header, seconds, spread
from step_overhead import resnet50_shapes
from torch import nn

from search_spaces import auto_thresholds
from search_spaces.space import SpaceContext
from trainables.config import TrialConfig
from trainables.gradskip import SGD, Settings
from trainables.gradskip.layer_plan import Unit
from trainables.gradskip.layers import make_plan, numbered
from trainables.gradskip.signals import GradientVarianceSignal
from trainables.training.run import TrainingRun

STEPS = 300
STEPS_PER_EPOCH = 10
TIMINGS = ((0, 10), (60, 10), (60, 30), (150, 10))
THRESHOLDS = (0.9, 0.95, 0.98, 1.0)


def course(seed: int, interval: int) -> list[tuple[list[float], list[float]]]:
    """Signals of a dense run by interval and layer, in training and at fixed weights."""
    with TrainingRun(TrialConfig(method="none", seed=seed)) as training:
        parameters, _ = numbered(training.optimizer.param_groups, training.model)
        units = make_plan(parameters, ("conv",), model=training.model).units
        signal = GradientVarianceSignal(parameters)
        training.optimizer.register_step_pre_hook(lambda *_: signal.observe(units, None, None))
        found = []
        while not training.finished:
            training.train_epoch()
            if training.step % interval == 0:
                epochs = range((training.step - interval) // STEPS_PER_EPOCH, training.step // STEPS_PER_EPOCH)
                found.append((signal.measure(units).tolist(), _fixed(training, units, epochs, seed)))
                signal.measured()
    return found


def _fixed(training: TrainingRun, units: Sequence[Unit], epochs: range, seed: int) -> list[float]:
    """Signals over the batches of some epochs, with a copy of the model that does not move."""
    model = copy.deepcopy(training.model).train()
    signal = GradientVarianceSignal(list(model.parameters()))
    for epoch in epochs:
        for batch in training.workload.train_batches(epoch, seed):
            model.zero_grad()
            training.workload.loss(model, batch).backward()
            signal.observe(units, None, None)
    return signal.measure(units).tolist()


def step_costs() -> None:
    """Print the time of a step under rules that observe every gradient, over one without a rule, in pairs."""
    ratios: dict[str, list[float]] = {"gradient_norm": [], "gradient_variance": []}
    torch.set_num_threads(1)
    for _ in range(7):
        times = {}
        for rule in ("off", *ratios):
            chosen = Settings(start_thr=-1) if rule == "off" else Settings(rule=rule, rule_interval=10**6)
            weights = [nn.Parameter(torch.randn(shape)) for shape in resnet50_shapes()]
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer = SGD(weights, lr=1e-4, momentum=0.9, settings=chosen)
            times[rule] = median(seconds(optimizer.step, 10))
        for rule in ratios:
            ratios[rule].append(times[rule] / times["off"])
    for rule, found in ratios.items():
        print(f"step under {rule} over one without a rule, ResNet-50's parameters, SGD foreach: {spread(found)}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=10, help="seeds of each setting (default: 10); 0: cost of a step alone"
    )
    seeds = range(parser.parse_args().seeds)
    print(header("benchmarks/gradient_variance.py"), f"| digits, 30 epochs of 10 steps, {len(seeds)} seeds")
    step_costs()
    if not seeds:
        return
    for interval in (10, 30):
        runs = [course(seed, interval) for seed in seeds]
        print(f"interval {interval}: step, then each convolution's median over seeds | the same at fixed weights")
        for place in [*range(0, STEPS // interval, max(1, 60 // interval)), STEPS // interval - 1]:
            medians = [
                " ".join(f"{median(layer):.3f}" for layer in zip(*(found[place][which] for found in runs), strict=True))
                for which in (0, 1)
            ]
            print(f"  {(place + 1) * interval:>4}", " | ".join(medians))
        for which, name in enumerate(("in training", "at fixed weights")):
            every = [value for found in runs for values in found for value in values[which]]
            print(f"  all {len(every)} {name}: {min(every):.3f} to {max(every):.3f}")

    dense = [run(TrialConfig(method="none", seed=seed)) for seed in seeds]
    print(f"dense: test accuracy {mean(row['test_accuracy'] for row in dense):.4f}")
    published = auto_thresholds.start(SpaceContext(total_steps=STEPS))
    settings: dict[str, dict[str, Any]] = {
        "published, defaults scaled": published,
        "published, from 60 every 5, thresholds 0.99": {
            **published, "CAC_VAR_START_ITR": 60, "CAC_VAR_SAMPLES": 5,
            **dict.fromkeys(("CAC_VAR_START_THR", "CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR"), 0.99),
        },
    }  # fmt: skip
    settings |= {
        f"linear, 60 to 300, depth {depth}": {
            "CAC_RULE": "linear", "CAC_RULE_START_ITR": 60, "CAC_RULE_END_ITR": STEPS, "CAC_RULE_DEPTH": depth,
        }
        for depth in (0.5, 1.0)
    }  # fmt: skip
    settings |= {
        f"start {start}, every {interval}, threshold {noise}": {
            "CAC_RULE": "gradient_variance", "CAC_RULE_START_ITR": start, "CAC_RULE_INTERVAL": interval,
            "CAC_RULE_NOISE": noise,
        }
        for start, interval in TIMINGS
        for noise in THRESHOLDS
    }  # fmt: skip
    for name, values in settings.items():
        rows = [run(TrialConfig(seed=seed, CAC_WHOLE_UNITS=True, **values)) for seed in seeds]
        saved = [row["compute_saved"] for row in rows]
        differences = [row["test_accuracy"] - plain["test_accuracy"] for row, plain in zip(rows, dense, strict=True)]
        deviation = stdev(differences) if len(seeds) > 1 else 0.0
        print(
            f"{name}: saved {mean(saved):.3f} ({min(saved):.3f} to {max(saved):.3f}), test accuracy "
            f"{mean(differences):+.4f} ± {deviation:.4f} ({min(differences):+.4f} to {max(differences):+.4f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
