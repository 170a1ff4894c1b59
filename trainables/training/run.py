"""One training run: built from a config, trained epoch by epoch, with counts of what it executes."""

from __future__ import annotations

import copy
import json
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainables.attachment import EstimateFlops, RunFacts, attach
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged, UserError
from trainables.gradients.fields import KEPT_SAMPLES, STATISTICS_SAMPLES
from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.gradient_statistics import GradientMeasurement, GradientMoments, GradientStatistics
from trainables.gradskip.forward_cache import PassReport
from trainables.metrics import METHOD_DEFAULTS, MODEL_DEFAULTS, further_columns
from trainables.quality import Quality
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE, read_state
from trainables.runtime.isolation import ProcessState, generators_state, kept_generators, set_generators
from trainables.runtime.memory import peak_bytes, reset_peak
from trainables.runtime.stopwatch import Stopwatch
from trainables.savings import share_of_budget
from trainables.training.cost import CostTable, StepCost
from trainables.training.forward_cache import open_forward_cache
from trainables.training.recipe.recipe import Recipe
from trainables.workloads import build_for
from trainables.workloads.base import Batch, Samples, Workload
from trainables.workloads.batch_shapes import EpochShapes, structure_of
from trainables.workloads.sample_access import reservoir

if TYPE_CHECKING:
    from typing import Self


# --- Training steps on a throw-away copy, once per process, workload and device ---------------------------------------
# In the first steps of a process libraries choose kernels and allocators grow. The first trial is the baseline, to
# which times are compared.


_WARM: set[Hashable] = set()


def warm_up(workload: Workload, model: nn.Module, device: torch.device, seed: int) -> None:
    """Run forward and backward on a copy of the model; the run's weights, buffers and generators stay as they are."""
    if (workload.key, str(device)) in _WARM:
        return
    _WARM.add((workload.key, str(device)))
    with kept_generators([device]):
        rehearsal = copy.deepcopy(model).train()
        for batch, _ in zip(workload.train_batches(0, seed), range(2), strict=False):
            loss = workload.loss(rehearsal, tuple(t.to(device) for t in batch))
            if loss.requires_grad:
                loss.backward()


# --- Time and memory of a run, including those before a loaded checkpoint ---------------------------------------------


class RunResources:
    """Measure training time, wall time and peak memory of a run.

    Args:
        device: whose memory counts.
        started: `time.perf_counter` when the run began to be built.
        excluded: returns the running total of seconds that never count as training.
    """

    def __init__(self, device: torch.device, started: float, excluded: Callable[[], float]) -> None:
        self._device, self._started = device, started
        self.train_time = Stopwatch(excluded)
        """Seconds of training steps, without evaluation."""
        self._wall_time_before_s = 0.0
        self.peak_before = 0
        """Peak bytes in the process that saved the loaded checkpoint."""

    def reset_peak(self) -> None:
        """Begin a new memory peak."""
        reset_peak(self._device)

    @property
    def wall_time_s(self) -> float:
        """Return the seconds since the run was built."""
        return self._wall_time_before_s + time.perf_counter() - self._started

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory so far."""
        return max(self.peak_before, peak_bytes(self._device))

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured, as the result columns of the same names."""
        return {
            "train_time_s": self.train_time.elapsed_s,
            "wall_time_s": self.wall_time_s,
            "peak_memory_bytes": self.peak_bytes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; other keys are ignored."""
        self.train_time.elapsed_s = state["train_time_s"]
        self._wall_time_before_s = state["wall_time_s"]
        self.peak_before = int(state["peak_memory_bytes"])


# --- Gradient statistics in the course of a run, as columns of its rows -----------------------------------------------

#: Statistics of each layer that rows keep.
OF_LAYERS = ("norm", "average_variance", "normalised_variance", "snr")
#: Statistics of all layers together that are columns, with the estimator's name before them.
COLUMNS = (*OF_LAYERS, "bias")
#: Significant digits in rows.
DIGITS = 6


def open_statistics(
    config: TrialConfig, workload: Workload, model: nn.Module, total_steps: int
) -> RunStatistics | None:
    """Return the run's statistics; None if the configuration asks for none.

    Raises:
        UserError: samples of a measurement without the number of measurements.
    """
    if config.statistics_samples is not None and config.statistics_measurements is None:
        raise UserError(
            f"statistics_samples={config.statistics_samples} needs statistics_measurements, the number of measurements"
        )
    return None if config.statistics_measurements is None else RunStatistics(config, workload, model, total_steps)


class RunStatistics:
    """Measure SGD's gradients, and those of the trial's own estimator beside them, at equal distances of a run.

    Args:
        config: with ``statistics_measurements``.
        workload: whose training samples are drawn from; of samples without numbers the first epoch's are kept.
        model: of the run.
        total_steps: of the run.
    """

    def __init__(self, config: TrialConfig, workload: Workload, model: nn.Module, total_steps: int) -> None:
        data = workload.samples()
        if data is None:
            data = _kept(workload, config.seed)
        self._steps_per_epoch = workload.steps_per_epoch
        self._statistics = GradientStatistics(
            model,
            data,
            config.statistics_measurements or 1,
            config.statistics_samples or STATISTICS_SAMPLES,
            loss=workload.loss,
            total_steps=total_steps,
            batch_size=min(data.batch_size, data.count),
            seed=config.seed,
        )
        self._rows: list[dict[str, Any]] = []  # of the epoch of the last measurement

    def before_step(self, step: int, method: GradientMethod | None) -> EstimateFlops | None:
        """Measure if this step is due; return what that executed."""
        if not self._statistics.is_due(step):
            return None
        found = self._statistics.measure(step, *(() if method is None else (method,)))
        self._statistics.history.clear()
        epoch = step // self._steps_per_epoch
        self._rows = [row for row in self._rows if row["step"] // self._steps_per_epoch == epoch]
        self._rows += [_row(one) for one in found]
        return EstimateFlops(
            forward_flops=sum(one.forward_flops for one in found),
            backward_flops=sum(one.backward_flops for one in found),
        )

    def columns(self) -> dict[str, float]:
        """Return the statistics of the last measurement as columns: ``sgd_normalised_variance``, ``svrg_bias``, ..."""
        last = [row for row in self._rows if row["step"] == self._rows[-1]["step"]]
        return {
            f"{row['estimator']}_{name}": row["total"][name]
            for row in last
            for name in COLUMNS
            if not (name == "bias" and row["estimator"] == "sgd")
        }

    def text(self, epoch: int) -> str:
        """Return the measurements in an epoch, from 1, as JSON (`metrics`, column ``gradient_statistics``)."""
        rows = [row for row in self._rows if row["step"] // self._steps_per_epoch == epoch - 1]
        return json.dumps(rows, separators=(",", ":"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        return {"rows": json.dumps(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`; empty for a run that was not measured."""
        self._rows = json.loads(state["rows"]) if state else []


def _kept(workload: Workload, seed: int) -> Samples:
    first = next(iter(workload.train_batches(0, seed)))
    return reservoir(workload.train_batches(0, seed), most=KEPT_SAMPLES, seed=seed, batch_size=len(first[0]))


def _row(found: GradientMeasurement) -> dict[str, Any]:
    return {
        "step": found.step,
        "estimator": found.estimator,
        "gradient_evaluations": found.gradient_evaluations,
        "total": _rounded(found.total),
        "layers": {name: _rounded(moments, OF_LAYERS) for name, moments in found.layers.items()},
    }


def _rounded(moments: GradientMoments, names: tuple[str, ...] | None = None) -> dict[str, float | None]:
    values = asdict(moments)
    return {name: float(f"{values[name]:.{DIGITS}g}") for name in names or values}


# --- FLOPs and bytes of the steps that a run executes, against those of the model as it was built ---------------------


def with_estimate(cost: StepCost, dense: StepCost, estimated: EstimateFlops) -> StepCost:
    """Return the cost of a step in which a method estimated gradients.

    Args:
        cost: of the step's own forward and backward pass.
        dense: of a step with nothing stopped, whose optimizer visits what this one's does.
        estimated: what the estimate executed.
    """
    return replace(
        cost,
        forward_flops=cost.forward_flops + estimated.forward_flops,
        backward_flops=cost.backward_flops + estimated.backward_flops,
        optimizer_bytes=dense.optimizer_bytes if estimated.all_trained else cost.optimizer_bytes,
    )


class RunCost:
    """Count what each step costs, once for each set of stopped layers, batch shape and structure of the model.

    Args:
        workload: whose loss is counted.
        model: as it was built; savings are relative to it, even if it changes later.
    """

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self._workload = workload
        self._now = self._dense = CostTable(workload, model)
        self._tables = [self._dense]
        self._beside: dict[int, CostTable] = {}
        self.counts = dict.fromkeys(
            ("step", "forward_flops", "backward_flops", "gradient_bytes", "optimizer_bytes",
             "dense_flops", "dense_backward_flops"), 0
        )  # fmt: skip
        self.flops_before = 0
        """FLOPs executed before the loaded checkpoint."""

    @property
    def counting_time_s(self) -> float:
        """Return the seconds spent on counting so far, which are no part of the training."""
        return sum(table.counting_time_s for table in self._tables)

    @property
    def executed_flops(self) -> int:
        """Return the forward and backward FLOPs of the executed steps."""
        return self.counts["forward_flops"] + self.counts["backward_flops"]

    @property
    def search_flops(self) -> int:
        """Return the FLOPs executed since the checkpoint was loaded, or since `begin_spending`."""
        return self.executed_flops - self.flops_before

    def begin_spending(self) -> None:
        """Count `search_flops` from now on; FLOPs executed before belong to another trial."""
        self.flops_before = self.executed_flops

    def freeze_dense(self) -> None:
        """Copy the model as it is, before a method changes its structure or hooks into it."""
        self._dense.freeze()

    def change_model(self, model: nn.Module) -> None:
        """Count the steps of a model with another structure; savings stay relative to the model as it was built."""
        self._now = self._new_table(model, structure_of(model))
        self._now.freeze()  # without the hooks that are removed now and registered again when a step is counted
        self._beside.clear()

    def dense_step(self, batch: Batch) -> StepCost:
        """Return the cost of a step with nothing stopped, of the model as it was built."""
        return self._dense.dense_step(batch)

    def step(self, stop_key: Hashable, batch: Batch, cached: PassReport | None = None) -> StepCost:
        """Return the cost of a step of the model as it is now.

        Args:
            stop_key: `Attached.stop_key`.
            batch: of the step.
            cached: what the forward cache saved of its forward pass.
        """
        return self._now.step(stop_key, batch, cached)

    def add(self, dense: StepCost, cost: StepCost, batch: Batch, beside: Iterable[nn.Module]) -> None:
        """Add an executed step.

        Args:
            dense: of `dense_step`.
            cost: of `step`.
            batch: of the step.
            beside: other models that ran forward on it, such as a teacher.
        """
        counts = self.counts
        counts["step"] += 1
        counts["forward_flops"] += cost.forward_flops + sum(self._forward_flops(model, batch) for model in beside)
        counts["backward_flops"] += cost.backward_flops
        counts["gradient_bytes"] += cost.gradient_bytes
        counts["optimizer_bytes"] += cost.optimizer_bytes
        counts["dense_flops"] += dense.flops
        counts["dense_backward_flops"] += dense.backward_flops

    def add_measured(self, executed: EstimateFlops | None) -> None:
        """Add what measurements executed beside the steps."""
        if executed is not None:
            self.counts["forward_flops"] += executed.forward_flops
            self.counts["backward_flops"] += executed.backward_flops

    def _forward_flops(self, model: nn.Module, batch: Batch) -> int:
        table = self._beside.get(id(model))
        if table is None:
            table = self._beside[id(model)] = self._new_table(model, ("beside", structure_of(model)))
        return table.forward_flops(batch)

    def _new_table(self, model: nn.Module, structure: Hashable) -> CostTable:
        table = CostTable(self._workload, model, structure)
        self._tables.append(table)
        return table

    def columns(self, epoch: int, epochs: int) -> dict[str, Any]:
        """Return the result columns of compute after ``epoch`` of ``epochs`` epochs (`trainables.metrics.ROW`)."""
        counts, executed = self.counts, self.executed_flops
        # Epochs are alike, so the executed part gives the full budget's cost.
        budget = counts["dense_flops"] * epochs // epoch
        backward_budget = counts["dense_backward_flops"] * epochs // epoch
        backward_saved = counts["dense_backward_flops"] - counts["backward_flops"]
        return {
            "compute_saved": share_of_budget(counts["dense_flops"] - executed, budget),
            "backward_saved": share_of_budget(backward_saved, backward_budget),
            "executed_flops": executed,
            "search_flops": self.search_flops,
            "forward_flops": counts["forward_flops"],
            "backward_flops": counts["backward_flops"],
            "dense_flops": budget,
            "gradient_bytes": counts["gradient_bytes"],
            "optimizer_bytes": counts["optimizer_bytes"],
        }


# --- One training run -------------------------------------------------------------------------------------------------


def check_device(config: TrialConfig) -> None:
    """Raise UserError if the device is not available."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, but torch sees no CUDA device here: use cpu")


class TrainingRun:
    """A run of `config.epochs` epochs, used as a context manager that restores the process state at its end.

        with TrainingRun(config) as run:
            while not run.finished:
                row = run.train_epoch()

    `train_epoch` is `begin_epoch`, `train_step` until `epoch_is_trained`, `end_epoch`. A run that is saved at any step
    and loaded into a new `TrainingRun` of the same config continues bit for bit.

    Raises:
        UserError: a CUDA device that is not available, a layer number past the model's last parameter, or a
            forward cache for a workload whose inputs do not repeat.
    """

    def __init__(self, config: TrialConfig) -> None:
        self.config = config
        self._stack = ExitStack()
        self._started = time.perf_counter()
        check_device(config)
        self.device = torch.device(config.device)
        state = ProcessState()
        self._stack.callback(state.restore)
        try:
            state.begin(seed=config.seed, threads=config.threads)
            self.recipe = Recipe(config, self.device)
            self.recipe.set_process()
            self._build()
        except BaseException:
            self._stack.close()
            raise

    def _build(self) -> None:
        config = self.config
        self.workload = build_for(config)
        self.total_steps = self.workload.steps_per_epoch * config.epochs
        self.model = self.workload.make_model().to(self.device)
        self.cost = RunCost(self.workload, self.model)
        self.recipe.prepare_model(self.model, self.cost.freeze_dense, lambda: self.cost.change_model(self.model))
        optimizer = self.workload.make_optimizer(self.model.named_parameters())
        self.optimizer = self.recipe.prepare_optimizer(optimizer, self.workload.batch_factor)
        base_lrs = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        self.scheduler = self.workload.make_scheduler(self.optimizer, self.total_steps)
        facts = RunFacts(
            model=self.model,
            forward=self._example_forward,
            total_steps=self.total_steps,
            steps_per_epoch=self.workload.steps_per_epoch,
            base_lrs=base_lrs,
            loss=self.workload.loss,
            example_batch=lambda: next(iter(self.workload.train_batches(0, config.seed))),
            epoch_batches=lambda epoch: self.workload.train_batches(epoch, config.seed),
            samples=self.workload.samples(),
            validation_loss=self._validation_loss,
            make_model=self.workload.make_model,
            quality=self.quality,
            before_change=self.cost.freeze_dense,
            changed=lambda: self.cost.change_model(self.model),
        )
        self.method = attach(self.optimizer, config, facts)
        self.statistics = open_statistics(config, self.workload, self.model, self.total_steps)
        self.trains_at_first = tuple(p.requires_grad for p in self.model.parameters())
        """True for each parameter that trains at step 0, by number."""
        self._shapes = EpochShapes(self.workload.steps_per_epoch)
        self.forward_cache = open_forward_cache(config, self.workload, self.model)
        if self.forward_cache is not None:
            self._stack.enter_context(self.forward_cache)
        warm_up(self.workload, self.model, self.device, config.seed)
        self._loader = self.recipe.loader(self.workload)
        self._stack.callback(self._loader.close)
        self.recipe.compile(self.model)
        self.resources = RunResources(self.device, self._started, lambda: self.cost.counting_time_s)
        self.resources.reset_peak()
        self.epoch = 0
        """Epochs trained and evaluated."""
        self._in_epoch = 0  # steps into the epoch
        self._samples = 0
        self._loss_sum = torch.zeros((), device=self.device)
        self._epoch_batches: Iterator[tuple[Batch, Tensor | None]] = iter(())
        self.row: dict[str, Any] | None = None
        """The last epoch's row; None before the first."""

    def _example_forward(self, model: nn.Module) -> torch.Tensor:
        batch = next(iter(self.workload.train_batches(0, self.config.seed)))
        return self.workload.loss(model, tuple(t.to(self.device) for t in batch))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the process state from before the run."""
        self._epoch_batches = iter(())  # a loader that reads ahead ends its thread
        self._stack.close()

    @property
    def finished(self) -> bool:
        """Return whether all epochs are trained."""
        return self.epoch >= self.config.epochs

    @property
    def step(self) -> int:
        """Return the optimizer steps executed since the run's start."""
        return self.cost.counts["step"]

    @property
    def executed_flops(self) -> int:
        """Return the FLOPs of the executed steps."""
        return self.cost.executed_flops

    @property
    def quality(self) -> Quality:
        """Return the metric by which the trial is compared: the config's, else the workload's own."""
        return self.workload.quality if self.config.metric is None else self.config.quality

    @property
    def epoch_shapes(self) -> list[tuple[int, Batch]] | None:
        """Return run lengths of an epoch's batch shapes (meta device); None before one was trained from its start."""
        return self._shapes.complete

    def train_epoch(self) -> dict[str, Any]:
        """Train the rest of an epoch, evaluate and return the row of result columns (`trainables.metrics.ROW`).

        Raises:
            TrainingDiverged: the loss or the accuracy is not finite.
        """
        self.begin_epoch()
        while not self.epoch_is_trained:
            self.train_step()
        return self.end_epoch()

    def begin_epoch(self) -> None:
        """Prepare the epoch's next step."""
        self.model.train()
        self._epoch_batches = self._batches()
        self.resources.train_time.start()

    @property
    def epoch_is_trained(self) -> bool:
        """Return whether the epoch's last step is done."""
        return self._in_epoch == self.workload.steps_per_epoch

    def train_step(self) -> None:
        """Execute one optimizer step."""
        batch, indices = next(self._epoch_batches)
        self._shapes.see(batch, self._in_epoch)
        samples = len(batch[0])
        if self.statistics is not None:
            self.cost.add_measured(self.statistics.before_step(self.step, self.method.gradient_method()))
        self._loss_sum += samples * self._step(self.recipe.on_device(batch), indices)
        self._samples += samples
        self._in_epoch += 1

    def pause(self) -> None:
        """Pause the training time until `begin_epoch`."""
        self.resources.train_time.pause()

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the block, work between steps, from the training time."""
        self.resources.train_time.pause()
        try:
            yield
        finally:
            self.resources.train_time.start()

    def skip_evaluation(self, known: Mapping[str, Any]) -> None:
        """End the epoch without evaluation, because its row is known."""
        self.resources.train_time.pause()
        self._close_epoch()
        self.method.end_epoch(known)

    def _close_epoch(self) -> None:
        self.epoch += 1
        self._in_epoch, self._samples = 0, 0
        self._loss_sum = torch.zeros((), device=self.device)

    def end_epoch(self) -> dict[str, Any]:
        """Evaluate and return the epoch's row.

        Raises:
            TrainingDiverged: the loss or the accuracy is not finite.
        """
        train_loss = float(self._loss_sum) / self._samples  # the epoch's only host-device synchronization
        self.resources.train_time.pause()
        self._close_epoch()
        if not math.isfinite(train_loss):
            raise TrainingDiverged(f"the training loss is {train_loss} in epoch {self.epoch}")
        self.row = self._row(train_loss)
        quality = self.quality
        value = self.row["quality"]
        # Of another metric one epoch's value may be undefined, such as an F1 without a hit; the last one counts.
        if not math.isfinite(value) and (quality.is_accuracy or self.finished):
            raise TrainingDiverged(f"the {quality.name} is {value} in epoch {self.epoch}")
        self.method.end_epoch(self.row)
        return self.row

    def _batches(self) -> Iterator[tuple[Batch, Tensor | None]]:
        """Return the rest of the epoch's batches, with sample numbers if the forward cache needs them."""
        batches = self._loader.batches(self.epoch, self._in_epoch)
        indices = self.workload.train_sample_indices(self.epoch, self.config.seed) if self.forward_cache else None
        if indices is None:
            return ((batch, None) for batch in batches)
        return zip(batches, islice(indices, self._in_epoch, None), strict=True)

    def _step(self, batch: Batch, indices: Tensor | None = None) -> Tensor:
        dense = self.cost.dense_step(batch)
        self.method.begin_step(self.epoch, self._in_epoch)
        batch = self.method.batch(batch)
        cache = self.forward_cache
        cached = cache.batch(indices) if cache is not None and indices is not None else nullcontext()
        with cached, self.method.forward_pass(), self.recipe.precision.forward_pass():
            loss = self._loss(batch)
        cost = self.cost.step(self.method.stop_key(), batch, None if cache is None else cache.last)
        self.optimizer.zero_grad(set_to_none=True)
        whole = self.method.loss(loss)
        if whole.requires_grad:
            self.recipe.backward(self._weighted(whole))
        self.recipe.after_backward(self.optimizer)
        estimated = self.method.estimate(lambda model: self.workload.loss(model, batch), batch)
        if estimated is not None:
            cost = with_estimate(cost, dense, estimated)
        self.method.before_optimizer()
        self.recipe.precision.step(self.optimizer)
        if not self.method.replaces_schedule:
            self.scheduler.step()
        self.method.end_step()
        self.cost.add(dense, cost, batch, self.method.runs_beside())
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        return self.workload.loss(self.model, batch)

    def _weighted(self, loss: Tensor) -> Tensor:
        """Return the loss that the backward pass begins from."""
        return loss

    def _row(self, train_loss: float) -> dict[str, Any]:
        quality = self.quality
        found = self._metrics("validation")
        if trouble := self.workload.trouble(found):
            warnings.warn(f"epoch {self.epoch}: {trouble}", stacklevel=2)
        tested = self._metrics("test") if self.finished and "test" in self.workload.splits else {}
        further = {name: value for name, value in found.items() if name != quality.name}
        further |= {f"test_{name}": value for name, value in tested.items() if name != quality.name}
        statistics = self.statistics
        if statistics is not None:
            further |= statistics.columns()
        return {
            "epoch": self.epoch,
            "step": self.step,
            "train_loss": train_loss,
            "quality": found[quality.name],
            "test_quality": tested.get(quality.name),
            **further_columns(further),
            **self.cost.columns(self.epoch, self.config.epochs),
            **self.resources.state_dict(),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "stage": "",
            **MODEL_DEFAULTS,
            "sample_picture": self._picture(),
            **self.method.measured(),
            **({} if statistics is None else {"gradient_statistics": statistics.text(self.epoch)}),
            **METHOD_DEFAULTS,
            **self.method.columns(),
        }

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluate in the block.

        A data loader draws a seed when it is iterated, and the next training must not depend on whether a row was
        evaluated here or was known.
        """
        self.model.eval()
        with torch.no_grad(), kept_generators([self.device]), self.recipe.evaluation():
            yield

    def _metrics(self, split: str) -> dict[str, float]:
        """Return the metrics on a split by name, the one by which the trial is compared among them."""
        with self._evaluating():
            return self.workload.metrics_on(self.model, split, self.device, self.quality.name)

    def _picture(self) -> str:
        """Return a picture of what the evaluated model makes."""
        with self._evaluating():
            return self.workload.picture(self.model, self.device)

    def _validation_loss(self) -> float | None:
        with self._evaluating():
            return self.workload.mean_loss(self.model, "validation", self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state at a step's start: weights, optimizer, rule, schedule, counts, generators, position.

        Tensors are the live ones: write or copy the state before the next step.
        """
        return {
            "config": self.config.to_dict(),
            "epoch": self.epoch,
            "in_epoch": self._in_epoch,
            "samples": self._samples,
            "loss_sum": self._loss_sum,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "counts": self.cost.counts,
            "row": self.row,
            **self.resources.state_dict(),
            "search_flops": self.cost.search_flops,
            "precision": self.recipe.precision.state_dict(),
            "generators": generators_state(self.device),
            "method": self.method.state_dict(),
            "statistics": {} if self.statistics is None else self.statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`; the caller checks which configuration it came from."""
        if state["method"]:
            self.method.prepare_structure(state["method"]["training_state"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self._in_epoch = state["epoch"], state["in_epoch"]
        self._samples = state["samples"]
        self._loss_sum = state["loss_sum"].to(self.device)
        self.row = state["row"]
        self.cost.counts = dict(state["counts"])
        self.cost.flops_before = self.executed_flops - state["search_flops"]
        self.resources.load_state_dict(state)
        if state["method"]:
            self.method.resume(**state["method"])
        if self.statistics is not None:
            self.statistics.load_state_dict(state.get("statistics", {}))
        self.recipe.precision.load_state_dict(state.get("precision", {}))
        set_generators(state["generators"], self.device)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint."""
        torch.save(self.state_dict(), Path(folder) / CHECKPOINT_FILE)

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint of the same config.

        Raises:
            UserError: the checkpoint is of another config.
        """
        state = read_state(Path(folder) / CHECKPOINT_FILE)
        if state["config"] != self.config.to_dict():
            raise UserError(f"the checkpoint in {folder} is of another configuration: {state['config']}")
        self.load_state_dict(state)
