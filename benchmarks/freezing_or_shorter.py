"""Compare what freezes layers with training shorter, at equal compute: a table and a picture of one workload.

    python benchmarks/freezing_or_shorter.py --workload digits [--results FOLDER] [--option NAME=VALUE ...]
                                             [--methods NAME ...] [--budgets 0.7 0.5 0.3] [--seeds 3] [--processes 2]

| workload | trained on | options |
|---|---|---|
| digits, char_lm | workloads `digits` and `text`, 30 epochs, from scratch | |
| resnet20 | 10,000 images of CIFAR-10, 10 epochs, from scratch | data=FOLDER (Parquet) |
| efficientnet | EfficientNet-Lite0 of ImageNet, 1,500 images, norms held (`fine_tuning.py`) | data, weights=FILE |
| minilm | MiniLM (6 layers, width 384), 1,500 sentences of SST-2, 3 epochs | data=FOLDER (tsv), weights=FOLDER |

A budget is the FLOPs that a training may execute, as a share of the dense one's; evaluation and a rule's measurements
are not counted (time has the latter). Start and depth of schedules are chosen by their costs, thresholds of rules by
replay of what they measure in a dense training of a seed that is not reported. What cannot reach a budget in full
length has one midway to that of ``shorter``; what still misses it by more than a tenth has no row. A cached prefix
never trains either, is in evaluation mode and computed once a sample; alone, and over steps midway. ``shorter`` has the
same schedule over fewer steps. Its learning rate, and that of cached prefixes, are chosen of half, once and twice the
workload's on that other seed, at half of the compute.
A difference is to the ``shorter`` of the same seed at the same executed compute (linear between its budgets).
Accuracy is the mean of validation and test. Every training is a process of its own and one line of FOLDER/rows.jsonl:
what is there is not trained again. Time is the processor's in training steps, one thread; peak memory is over that
before the first pass. Sources: Kumar et al. 2022 (head first); Howard and Ruder 2018 (unfreezing, layer-wise rates).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from machine import header
from matplotlib import pyplot
from torch import nn

from analysis.metrics.confirmation import paired_interval
from trainables.gradskip import Settings, wrap
from trainables.gradskip.forward_cache import ForwardCache
from trainables.gradskip.replay import Blueprint
from trainables.runtime.memory import peak_bytes, reset_peak
from trainables.training.flops import CostTable
from trainables.workloads import build, default_epochs

#: Name of the workload, and what counts as a layer.
WORKLOADS = {
    "digits": ("digits", ("conv",)),
    "char_lm": ("text", ("linear",)),
    "resnet20": ("cifar_subset:resnet20", ("conv",)),
    "efficientnet": ("fine_tuning:make", ("conv",)),
    "minilm": ("fine_tuning:minilm", ("linear",)),
}
METHODS = (
    "shorter", "cached prefix", "cached and shorter", "from the start", "linear", "freezeout", "variance",
    "plasticity", "grades", "random stops", "head first", "gradual unfreezing", "layer-wise rates", "linear probe",
)  # fmt: skip
#: Seed of what is chosen, which is not reported.
OTHER_SEED, CPU = 100, torch.device("cpu")
#: Decisions of a rule in a run, and the share of the run before the first.
DECISIONS, WARM_UP = 30, 0.1
#: Distance from a budget at which fewer steps are tried, and at which there is no row.
NEAR, FAR = 0.03, 0.1
#: Factors of a learning rate, and whose are chosen, each for methods that begin alike.
RATES, RETUNED = (0.5, 1.0, 2.0), {"shorter": "shorter", "cached": "cached and shorter"}
#: Budget of ``shorter`` for what executes less than all others.
LEAST = 0.2
#: Variables of each measured rule, and the values that are tried, of which the first stops nothing.
MEASURED = {
    "variance": (("start_thr", "mt_thr", "slope_thr"), [1e-9, *1 - np.geomspace(1e-5, 0.5, 300)]),
    "plasticity": (("rule_tolerance",), [1e-9, *np.geomspace(1e-3, 0.999, 300)]),
    "grades": (("rule_tau",), [1e-30, *np.geomspace(1e-8, 1.0, 600)]),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training."""

    steps: int
    settings: Settings | None = None  # of Gradient-Skip; None for plain torch
    frozen: tuple[tuple[int, int], ...] = ()  # steps, and how many first layers are frozen by hand from them on
    rate: float = 1.0  # factor on the learning rates
    spread: float = 1.0  # learning rate of the first layer over the last one's
    caches: bool = False  # whether outputs of the stopped prefix are computed once a sample
    records: bool = False  # whether the row has ``signals``: what the rule measures of all layers at every decision


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A workload with its layers and their costs."""

    name: str
    options: tuple[str, ...]
    steps: int  # of the dense training
    blueprint: Blueprint
    ends: tuple[int, ...]  # of the layers that may stop, in the order in which parameters stop
    costs: tuple[float, ...] = ()  # mean FLOPs of a step with the first 0, 1, 2, ... layers frozen
    steps_to_fill: int | None = None  # a forward cache; None where inputs do not repeat

    def freeze(self, parameters: list[nn.Parameter], layers: int) -> None:
        """Freeze the first layers, and let all others train."""
        through = self.ends[layers - 1] if layers else -1
        for place, number in enumerate(self.blueprint.plan.order):
            parameters[number].requires_grad_(place > through)

    def share(self, frozen: list[int]) -> float:
        """Return the compute of a training by its number of frozen layers at each step."""
        return sum(self.costs[layers] for layers in frozen) / (self.steps * self.costs[0])

    def stops(self, settings: Settings, steps: int, signals: dict[tuple[int, int], float]) -> list[int]:
        """Return the number of stopped layers at each step, by replay of recorded signals."""
        machine, found = self.blueprint.machine(settings), [0]
        while (step := min(machine.quiet_until(), steps)) < steps:
            machine.iteration = step
            machine.step(lambda end, now=step: signals[now, end])  # type: ignore[misc]
            found += [found[-1]] * (step + 1 - len(found)) + [bisect_right(self.ends, machine.stopped_through)]
        return (found + [found[-1]] * steps)[:steps]


def bench_of(name: str, options: tuple[str, ...]) -> Bench:
    """Return a workload's layers, each with what it costs a step to leave them out."""
    kind, watch = WORKLOADS[name]
    workload = build(kind, options)
    model = workload.make_model()
    table = CostTable(workload, model)
    table.freeze()
    batches = list(workload.train_batches(0, 0))
    optimizer: Any = workload.make_optimizer(model.named_parameters())
    settings = Settings(rule="linear", rule_end_itr=9, watch=watch, whole_units=True)
    wrap(optimizer, settings, model=model, example_inputs=lambda m: workload.loss(m, batches[0]))
    blueprint, steps = optimizer.gradskip.blueprint, workload.steps_per_epoch * default_epochs(kind, options)
    ends = tuple(unit.end for unit in blueprint.plan.units[: blueprint.stoppable])
    bench = Bench(name=name, options=options, steps=steps, blueprint=blueprint, ends=ends)
    costs = []
    for layers in range(len(bench.ends) + 1):
        bench.freeze(list(model.parameters()), layers)
        costs.append(fmean(table.step(layers, batch).flops for batch in batches))
    fills = workload.steps_per_epoch if workload.different_inputs is not None else None
    return replace(bench, costs=tuple(costs), steps_to_fill=fills)


def trained(bench: Bench, plan: Plan, seed: int) -> dict[str, Any]:
    """Train once and return what came of it."""
    torch.set_num_threads(1)
    workload = build(WORKLOADS[bench.name][0], bench.options)
    torch.manual_seed(seed)
    model = workload.make_model()
    parameters = list(model.parameters())
    optimizer: Any = workload.make_optimizer(model.named_parameters())
    reset_peak(CPU)
    before = peak_bytes(CPU)
    signals: list[tuple[int, int, float]] = []
    (group,) = optimizer.param_groups
    group["lr"] *= plan.rate
    if plan.spread != 1:
        optimizer.param_groups = [
            {**group, "params": [parameters[number]], "lr": group["lr"] * plan.spread**height}
            for place, number in enumerate(bench.blueprint.plan.order)
            for height in [1 - bisect_left(bench.ends, place) / len(bench.ends)]
        ]
    if plan.settings is not None:
        first = next(iter(workload.train_batches(0, seed)))
        wrap(optimizer, plan.settings, model=model, example_inputs=lambda m: workload.loss(m, first))
        skip = optimizer.gradskip
        skip.signal.together |= plan.records
        skip.on_measured.append(lambda unit, number: signals.append((skip.iteration - 1, unit.end, number)))
    schedule = workload.make_scheduler(optimizer, plan.steps)
    model.train()
    for norm in (m for m in model.modules() if bench.name == "efficientnet" and isinstance(m, nn.BatchNorm2d)):
        norm.eval()
    flops, seconds, frozen = 0.0, 0.0, dict(plan.frozen)
    lasts = [parameters[bench.blueprint.plan.order[end]] for end in bench.ends]
    cache = table = None
    if plan.caches:
        cache, table = ForwardCache(model, budget_bytes=4 * 10**9), CostTable(workload, model)
        table.freeze()
    over = cache.epoch if cache is not None else iter
    batches = (batch for epoch in count() for batch in over(workload.train_batches(epoch, seed)))
    for step, batch in enumerate(islice(batches, plan.steps)):
        if step in frozen:
            bench.freeze(parameters, frozen[step])
        layers = sum(not last.requires_grad for last in lasts)
        begun = time.process_time()
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        schedule.step()
        seconds += time.process_time() - begun
        flops += table.step(layers, batch, cache.last).flops if cache is not None else bench.costs[layers]
    batches.close()
    peak = peak_bytes(CPU) - before
    model.eval()
    with torch.no_grad():
        found = {split: workload.quality_on(model, split, CPU) for split in ("validation", "test")}
    found["executed"] = flops / (bench.steps * bench.costs[0])
    return {**found, "seconds": seconds, "peak_mb": peak / 1e6, "signals": signals * plan.records}


class Comparison:
    """The trainings of a workload, and what each method trains within a budget."""

    def __init__(self, bench: Bench, file: Path, processes: int) -> None:
        self.bench, self.file, self.processes = bench, file, processes
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.rows = {(row["method"], row["budget"], row["seed"]): row for row in map(json.loads, lines)}

    def train(self, plans: dict[tuple[str, float, int], Plan]) -> None:
        """Train what is not there yet: plans by method, budget and seed."""
        context = get_context("forkserver")
        context.set_forkserver_preload(
            ["matplotlib.pyplot", "pandas", "trainables.gradskip", "trainables.training.flops"]
        )
        with ProcessPoolExecutor(self.processes, mp_context=context, max_tasks_per_child=1) as pool:
            missing = {key: plan for key, plan in plans.items() if key not in self.rows}
            jobs = {pool.submit(trained, self.bench, plan, key[2]): key for key, plan in missing.items()}
            for job in as_completed(jobs):
                key = jobs[job]
                named = {"method": key[0], "budget": key[1], "seed": key[2], "plan": str(missing[key])}
                self.rows[key] = named | job.result()
                with self.file.open("a") as lines:
                    lines.write(json.dumps(self.rows[key]) + "\n")

    def settings(self, rule: str, steps: int) -> Iterator[Settings]:
        """Yield the settings of a rule that are tried, of a measured one first what stops nothing."""
        given: dict[str, Any] = {"rule": rule, "watch": WORKLOADS[self.bench.name][1], "whole_units": True}
        times = sorted({max(1, int(steps * share)) for share in np.linspace(0, 0.98, 60)})
        if rule in MEASURED:
            start, interval = ("start_itr", "samples") if rule == "variance" else ("rule_start_itr", "rule_interval")
            given |= {start: round(WARM_UP * steps), interval: max(1, steps // DECISIONS)}
            names, values = MEASURED[rule]
            yield from (Settings(**given, **dict.fromkeys(names, float(value))) for value in values)
        elif rule in ("linear", "freezeout"):  # of FreezeOut's the last layer trains to the end of the schedule
            spans = [(start, steps) for start in times] + [(0, end) for end in times if rule == "linear"]
            given |= {"rule_depth": 1.0} if rule == "linear" else {"rule_cubic": True}
            yield from (Settings(**given, rule_start_itr=start, rule_end_itr=end) for start, end in spans)

    def plans(self, method: str, steps: int, seed: int) -> Iterator[tuple[float, Plan]]:
        """Yield compute and plan of every setting of a method that is tried, of these steps."""
        tried, signals = list(self.settings(method, steps)), {}
        if method in MEASURED:
            key = (f"signals of {method}", steps / self.bench.steps, OTHER_SEED)
            self.train({key: Plan(steps=steps, settings=tried[0], records=True)})
            signals = {(step, end): value for step, end, value in self.rows[key]["signals"]}
        for settings in tried:
            yield self.bench.share(self.bench.stops(settings, steps, signals)), Plan(steps=steps, settings=settings)
        for frozen in self.by_hand(method, steps, random.Random(seed)):
            layers = [0] * steps
            for when, number in frozen:
                layers[when:] = [number] * (steps - when)
            yield self.bench.share(layers), Plan(steps=steps, frozen=frozen)

    def cached(self, steps: int) -> Iterator[tuple[float, Plan]]:
        """Yield compute, but for an estimate of the cached part, and plan of prefixes of every depth."""
        costs = self.bench.costs
        for layers, end in enumerate(self.bench.ends if self.bench.steps_to_fill else (), start=1):
            forward = (costs[0] - costs[layers]) / 2  # a backward pass is two forward ones
            spared = max(0, steps - self.bench.steps_to_fill) * forward / (self.bench.steps * costs[0])
            settings = Settings(stop_layer_num=(end,), stop_layer_itr=(-1,), prefix_mode="eval")
            plan = Plan(steps=steps, settings=settings, caches=True)
            yield self.bench.share([layers] * steps) - spared, plan

    def by_hand(self, method: str, steps: int, rng: random.Random) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield steps, ascending, and numbers of layers frozen from them on."""
        depth = len(self.bench.ends)
        if method == "from the start":
            yield from (((0, layers),) for layers in range(1, depth + 1))
        elif method == "head first":
            yield from (((0, depth), (when, 0)) for when in range(1, steps))
        elif method == "gradual unfreezing":
            for share in np.linspace(0.02, 2, 150):
                whens = {min(steps - 1, round(share * steps * (n + 1) / depth)): depth - n - 1 for n in range(depth)}
                yield ((0, depth), *whens.items())
        elif method == "random stops":
            for _ in range(1000):
                stops = rng.randint(1, min(5, depth))
                whens, layers = rng.sample(range(1, steps), stops), rng.sample(range(1, depth + 1), stops)
                yield tuple(zip(sorted(whens), sorted(layers), strict=True))

    def rates(self) -> dict[str, float]:
        """Return the factor on the learning rate by the methods of `RETUNED`."""
        tried = {}
        for method in RETUNED.values():
            if (plan := self.plan(method, 0.5, OTHER_SEED, {})) is None:
                continue
            found = {(f"{method}, rate x {rate}", 0.5, OTHER_SEED): rate for rate in RATES}
            self.train({key: replace(plan, rate=rate) for key, rate in found.items()})
            tried[method] = found[max(found, key=lambda key: self.rows[key]["validation"])]
        return tried

    def plan(self, method: str, budget: float, seed: int, rates: dict[str, float]) -> Plan | None:
        """Return a method's training within a budget, None where it has none."""
        rate = next((rates[of] for kind, of in RETUNED.items() if method.startswith(kind) and of in rates), 1.0)
        full, costs = self.bench.steps, self.bench.costs
        simple = {
            "shorter": Plan(steps=round(budget * full), rate=rate),
            "layer-wise rates": Plan(steps=round(budget * full), spread=0.1),
            "linear probe": Plan(steps=round(budget * full * costs[0] / costs[-1]), frozen=((0, len(costs) - 1),)),
        }
        if method in simple:
            return simple[method]
        near, midway = (1.0, Plan(steps=full)), round((1 + budget) / 2 * full)
        for steps in {"cached prefix": [full], "cached and shorter": [midway]}.get(method, [full, midway]):
            if near[0] > NEAR:
                plans = self.cached(steps) if method.startswith("cached") else self.plans(method, steps, seed)
                found = ((abs(share - budget), plan) for share, plan in plans)
                near = min([near, *found], key=lambda one: one[0])
        return replace(near[1], rate=rate) if near[0] <= FAR else None


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one line a method and budget: means over seeds, and the difference to ``shorter`` with its interval."""
    rows = rows[rows["seed"] != OTHER_SEED].assign(accuracy=50 * (rows["validation"] + rows["test"]))
    control = rows[rows["method"].isin(["dense", "shorter"])].sort_values("executed")
    dense = rows[rows["method"] == "dense"].set_index("seed")
    lines = []
    for (method, budget), found in rows.groupby(["method", "budget"], sort=False):
        differences = []
        for row in found.itertuples():
            own = control[control["seed"] == row.seed]
            differences.append(row.accuracy - np.interp(row.executed, own["executed"], own["accuracy"]))
        interval = paired_interval(differences) if len(found) > 1 else None
        means, full = found.mean(numeric_only=True), dense.loc[found["seed"]].mean(numeric_only=True)
        lines.append({
            "method": method, "budget": budget, "n": len(found), "executed": means["executed"],
            "accuracy": means["accuracy"], "low": found["accuracy"].min(), "high": found["accuracy"].max(),
            "to shorter": np.mean(differences), "±": interval.high - interval.mean if interval else np.nan,
            "time": means["seconds"] / full["seconds"], "memory": means["peak_mb"] / full["peak_mb"],
        })  # fmt: skip
    return pd.DataFrame(lines).sort_values(["budget", "accuracy"], ascending=False)


def draw(table: pd.DataFrame, name: str, file: Path) -> None:
    """Draw accuracy against executed compute, a line a method."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    values = table["accuracy"]
    lowest = values[table["method"] == "shorter"].min() - 10  # a linear probe may be far below
    for number, method in enumerate(METHODS):
        found = table[table["method"].isin([method, "dense"][: 1 + (method == "shorter")])].sort_values("executed")
        if found.empty or found["accuracy"].max() < lowest:
            continue
        how = {"color": pyplot.cm.tab20(number), "linewidth": 3 if method == "shorter" else 1}
        axes.plot(found["executed"], found["accuracy"], marker="osx"[number % 3], label=method, **how)
    pyplot.rcParams["svg.fonttype"] = "none"
    limits = (values[values > lowest].min() - 1, values.max() + 1)
    axes.set(xlabel="compute executed, share of the dense training", ylabel="accuracy, %", title=name, ylim=limits)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(file)


def main() -> None:
    """Train what is missing, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.7, 0.5, 0.3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("results/freezing_or_shorter"))
    given = parser.parse_args()
    folder = given.results / given.workload
    folder.mkdir(parents=True, exist_ok=True)
    bench = bench_of(given.workload, tuple(given.option))
    runs = Comparison(bench, folder / "rows.jsonl", given.processes)
    rates = runs.rates()
    for seed in range(given.seeds):
        keys = [(method, budget, seed) for budget in given.budgets for method in given.methods]
        keys.append(("shorter", LEAST, seed))
        plans = {key: runs.plan(*key, rates) for key in keys if key not in runs.rows}
        runs.train({("dense", 1.0, seed): Plan(steps=bench.steps)} | {k: plan for k, plan in plans.items() if plan})
    table = table_of(pd.DataFrame(runs.rows.values()).drop(columns=["signals", "plan"]))
    print(header("benchmarks/freezing_or_shorter.py"), f"| {given.workload}, learning rates times {rates}")
    print(table.to_string(index=False, float_format="{:.3f}".format))
    draw(table, given.workload, folder / f"{given.workload}.svg")


if __name__ == "__main__":
    main()
