"""Short dry run of a workload that measures the costs, memory and times of its training. Prints nothing.

Shapes: P parameters in the model's order have the numbers 0..P-1; FLOPs and batch shapes are those of the first batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import Tensor, nn

from trainables.config import TrialConfig
from trainables.gradskip.layers import has_trained_statistics, make_plan
from trainables.runtime.isolation import kept_generators
from trainables.training.doctor.checks import Diagnosis, examine, now_s
from trainables.training.doctor.observation import NetworkCalls
from trainables.training.flops import CostTable, StepCost, saved_shares
from trainables.training.run import TrainingRun
from trainables.workloads.base import Batch
from trainables.workloads.batch_shapes import to_meta

#: Time limit for all timed steps; two steps are timed even if they exceed it.
STEPS_BUDGET_S = 20.0
#: A shorter evaluation is timed once more, because the first one also reads data and selects kernels.
SHORT_EVALUATION_S = 2.0
#: Most units whose stop is counted; each takes about as long as a step on the meta device, some tenths of a second.
MOST_UNITS = 16


@dataclass(frozen=True, kw_only=True)
class ParameterFacts:
    """One parameter: a row of the list of layers."""

    number: int  # its layer number, as used in ``CAC_STOP_LAYER_NUM``
    name: str
    shape: tuple[int, ...]
    watched: bool  # true if the rule watches it by default (``CAC_WATCH=conv``)
    unit_end: bool  # true if it is the last parameter of a unit: a layer with its bias and norm (``CAC_WHOLE_UNITS=1``)
    saved: float | None
    """Share of a step's FLOPs, in [0, 1], saved when layers 0..number are stopped; None where it was not counted."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Costs, memory and times of a training run."""

    epochs: int
    steps_per_epoch: int
    train_samples: int | None  # samples of the training set, if the workload reports them
    batch_shapes: tuple[tuple[tuple[int, ...], str], ...]  # (shape, dtype) of each tensor of the first batch
    parameters: tuple[ParameterFacts, ...]
    step_cost: StepCost  # cost of a step on the first batch with nothing stopped
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # bytes of all tensors of the optimizer's state after a few steps
    peak_bytes: int  # peak of the process on the CPU, of allocated memory on a GPU (`trainables.runtime.memory`)
    step_times_s: tuple[float, ...]  # each timed step after a warm-up, including the loading of its batch; at least one
    loader_times_s: tuple[float, ...]  # part of each step spent waiting for the batch
    evaluation_time_s: float
    moved_norms: tuple[tuple[float, float], ...]  # `moved_norms` of the norms that an earlier training has left

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def run_flops(self) -> int:
        """Return the FLOPs of a run with nothing stopped, assumed proportional to the number of samples.

        Without the number of samples, every batch is assumed to be as large as the first.
        """
        rows = self.batch_shapes[0][0][0] if self.batch_shapes and self.batch_shapes[0][0] else 1
        of_epoch = rows * self.steps_per_epoch
        if self.train_samples is not None:
            of_epoch = min(of_epoch, self.train_samples)
        return self.step_cost.flops * of_epoch * self.epochs // max(rows, 1)

    @property
    def step_time_s(self) -> float:
        return median(self.step_times_s)

    @property
    def loader_share(self) -> float:
        """Return the share of the steps' time spent waiting for batches, in [0, 1]."""
        total = sum(self.step_times_s)
        return sum(self.loader_times_s) / total if total > 0 else 0.0

    @property
    def run_time_s(self) -> float:
        """Return the seconds of one run: all steps, and an evaluation after each epoch."""
        return self.epochs * (self.steps_per_epoch * self.step_time_s + self.evaluation_time_s)


def dry_run(config: TrialConfig, steps: int = 5, most_units: int | None = MOST_UNITS) -> DryRun:
    """Train a few steps without a method, evaluate and count FLOPs; restore the process's state afterwards.

    After one warm-up step so many ``steps`` are timed, >= 1; fewer (two) where a step takes long. The savings of stops
    are counted for at most ``most_units`` units, evenly spread; None: for all.
    """
    with _TimedRun(replace(config, method="none", forward_cache_mb=0)) as run:
        norms = earlier_statistics(run.model)
        step_times_s = run.train_timed(steps)
        batch, workload = run.first_batch, run.workload
        parameters = list(run.model.parameters())
        moments = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        peak = run.peak_bytes
        evaluation_time_s = run.evaluation_time_s()
        step_cost = CostTable(workload, run.model).dense_step(batch)
        return DryRun(
            epochs=config.epochs,
            steps_per_epoch=workload.steps_per_epoch,
            train_samples=workload.train_samples,
            batch_shapes=tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in batch),
            parameters=_parameters(run.model, saved_shares(workload, run.model, batch, most_units)),
            step_cost=step_cost,
            parameter_bytes=sum(p.nbytes for p in parameters),
            gradient_bytes=sum(p.grad.nbytes for p in parameters if p.grad is not None),
            optimizer_bytes=sum(moment.nbytes for moment in moments),
            peak_bytes=peak,
            step_times_s=step_times_s,
            loader_times_s=tuple(run.loader_times_s[-len(step_times_s) :]),
            evaluation_time_s=evaluation_time_s,
            moved_norms=moved_norms(norms, run.step),
        )


def earlier_statistics(model: nn.Module) -> dict[Any, tuple[Tensor, Tensor]]:
    """Return copies of running mean and variance, (C,), of the norms that have those of an earlier training."""
    norms: list[Any] = [module for module in model.modules() if has_trained_statistics(module)]
    return {n: (n.running_mean.clone(), n.running_var.clone()) for n in norms}


def moved_norms(norms: Mapping[Any, tuple[Tensor, Tensor]], steps: int) -> tuple[tuple[float, float], ...]:
    """Return how the batches of these steps differ from the earlier statistics, for each norm; medians over channels.

    The distance of the batches' means in earlier deviations, and their variance over the earlier one. With momentum m
    running statistics have come nearer to the batches' by 1 - (1 - m)^steps.
    """
    found = []
    for norm, (mean, variance) in norms.items():
        if norm.momentum:
            nearer = 1 - (1 - norm.momentum) ** steps
            distance = (norm.running_mean - mean).abs() / (nearer * (variance + norm.eps).sqrt())
            ratio = 1 + (norm.running_var / variance.clamp_min(norm.eps) - 1) / nearer
            found.append((float(distance.median()), float(ratio.median())))
    return tuple(found)


class _TimedRun(TrainingRun):
    """A run that records the shapes of its first batch and the loading time of each batch."""

    first_batch: Batch  # the first batch, on the meta device

    def __init__(self, config: TrialConfig) -> None:
        self.loader_times_s: list[float] = []
        super().__init__(config)

    def _batches(self) -> Iterator[Batch]:
        batches = super()._batches()
        begun = time.perf_counter()
        for found in batches:
            self.loader_times_s.append(time.perf_counter() - begun)
            if len(self.loader_times_s) == 1:
                self.first_batch = to_meta(found)
            yield found
            begun = time.perf_counter()

    def train_timed(self, wanted: int) -> tuple[float, ...]:
        """Train a warm-up step and the wanted ones; return their times, or the first's, without those of counting."""
        times: list[float] = []
        for _ in self.each_step():
            counted, begun = self.cost.counting_time_s, now_s(self.device)
            self.train_step()
            times.append(now_s(self.device) - begun - (self.cost.counting_time_s - counted))
            if len(times) > min(wanted, max(2, int(STEPS_BUDGET_S / times[0]))):
                break
        self.pause()
        return tuple(times[1:] or times)

    def evaluation_time_s(self) -> float:
        """Return the seconds of one evaluation of the validation split; of a second one where the first was short."""
        for _ in range(2):
            begun = now_s(self.device)
            self._metrics("validation")
            found = now_s(self.device) - begun
            if found >= SHORT_EVALUATION_S:
                break
        return found


def _parameters(model: nn.Module, saved: Mapping[int, float | None]) -> tuple[ParameterFacts, ...]:
    named = list(model.named_parameters())
    plan = make_plan([p for _, p in named], ("conv",), model=model)
    watched = {number for unit in plan.units for number in unit.watched}
    return tuple(
        ParameterFacts(
            number=number,
            name=name,
            shape=tuple(parameter.shape),
            watched=number in watched,
            unit_end=number in saved,
            saved=saved.get(number),
        )
        for number, (name, parameter) in enumerate(named)
    )


def run_findings(config: TrialConfig, loader_share: float | None = None) -> Diagnosis:
    """Return what makes a run in our own loop slower than it has to be; `dry_run` has measured the loader's share."""
    with TrainingRun(config) as run, kept_generators([run.device]):
        run.model.train()
        with NetworkCalls().recorded() as calls:
            run._example_forward(run.model)
        networks = {run.model: calls.by_network.get(run.model)}  # None if the loss calls it in parts
        return examine(run.device, networks, [run.optimizer], loader_share=loader_share)
