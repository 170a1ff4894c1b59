"""One training run: built from a config, trained epoch by epoch, with counts of what it executes."""

from __future__ import annotations

import copy
import json
import math
import time
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from trainables.attachment import EstimateFlops, RunFacts, attach
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged, UserError
from trainables.gradients.fields import KEPT_SAMPLES, STATISTICS_SAMPLES
from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.gradient_statistics import GradientMoments, GradientStatistics
from trainables.gradskip.forward_cache import ForwardCache
from trainables.metrics import METHOD_DEFAULTS, MODEL_DEFAULTS, further_columns
from trainables.quality import Quality
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE, read_state
from trainables.runtime.energy import energy_j
from trainables.runtime.isolation import ProcessState, generators_state, kept_generators, set_generators
from trainables.runtime.memory import peak_bytes, reset_peak
from trainables.training.clock import TrainingClock
from trainables.training.flops import RunCost
from trainables.training.recipe.recipe import Recipe
from trainables.workloads import build_for
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import EpochShapes
from trainables.workloads.sample_access import reservoir

_WARM: set[Hashable] = set()


def warm_up(workload: Workload, model: nn.Module, device: torch.device, seed: int) -> None:
    """Run forward and backward on a copy of the model, once per process, workload and device.

    In the first steps of a process libraries choose kernels and allocators grow; the first trial is the baseline, to
    which times are compared. The run's weights, buffers and generators stay as they are.
    """
    if (workload.key, str(device)) in _WARM:
        return
    _WARM.add((workload.key, str(device)))
    with kept_generators([device]):
        rehearsal = copy.deepcopy(model).train()
        for batch in islice(workload.train_batches(0, seed), 2):
            loss = workload.loss(rehearsal, tuple(t.to(device) for t in batch))
            if loss.requires_grad:
                loss.backward()


# --- Gradient statistics in the course of a run, as columns of its rows -----------------------------------------------

#: Statistics of each layer that rows keep.
OF_LAYERS = ("norm", "average_variance", "normalised_variance", "snr")
#: Statistics of all layers together that are columns, with the estimator's name before them.
COLUMNS = (*OF_LAYERS, "bias")
#: Significant digits in rows.
DIGITS = 6


class RunStatistics:
    """Measure SGD's gradients, and those of the trial's own estimator beside them, at equal distances of a run.

    Of training samples without numbers the first epoch's are kept.
    """

    def __init__(self, config: TrialConfig, workload: Workload, model: nn.Module, total_steps: int) -> None:
        data = workload.samples()
        if data is None:
            batches = workload.train_batches(0, config.seed)
            size = len(next(iter(workload.train_batches(0, config.seed)))[0])
            data = reservoir(batches, most=KEPT_SAMPLES, seed=config.seed, batch_size=size)
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
        self._rows = self._of_epoch(step // self._steps_per_epoch)
        self._rows += [
            {
                "step": one.step,
                "estimator": one.estimator,
                "gradient_evaluations": one.gradient_evaluations,
                "total": _rounded(one.total),
                "layers": {name: _rounded(moments, OF_LAYERS) for name, moments in one.layers.items()},
            }
            for one in found
        ]
        return EstimateFlops(
            forward_flops=sum(one.forward_flops for one in found),
            backward_flops=sum(one.backward_flops for one in found),
        )

    def _of_epoch(self, epoch: int) -> list[dict[str, Any]]:
        return [row for row in self._rows if row["step"] // self._steps_per_epoch == epoch]

    def columns(self) -> dict[str, float]:
        """Return the statistics of the last measurement as columns: ``sgd_normalised_variance``, ``svrg_bias``, ..."""
        return {
            f"{row['estimator']}_{name}": row["total"][name]
            for row in self._rows
            if row["step"] == self._rows[-1]["step"]
            for name in COLUMNS
            if not (name == "bias" and row["estimator"] == "sgd")
        }

    def text(self, epoch: int) -> str:
        """Return the measurements in an epoch, from 1, as JSON (`metrics`, column ``gradient_statistics``)."""
        return json.dumps(self._of_epoch(epoch - 1), separators=(",", ":"))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": json.dumps(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`; empty for a run that was not measured."""
        self._rows = json.loads(state["rows"]) if state else []


def _rounded(moments: GradientMoments, names: tuple[str, ...] | None = None) -> dict[str, float | None]:
    values = asdict(moments)
    return {name: float(f"{values[name]:.{DIGITS}g}") for name in names or values}


# --- One training run -------------------------------------------------------------------------------------------------


def check_device(config: TrialConfig) -> None:
    """Raise UserError if the device is not available."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, but torch sees no CUDA device here: use cpu")


def check_forward_cache(config: TrialConfig, workload: Workload) -> None:
    """Raise UserError if the config asks for a forward cache and the workload's inputs do not repeat."""
    if config.forward_cache_mb and workload.different_inputs is None:
        raise UserError(
            f"forward_cache_mb must be 0, got {config.forward_cache_mb}, for workload {workload.name}, "
            f"{workload.why_inputs_vary}"
        )


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
        self.workload = workload = build_for(config)
        self.total_steps = workload.steps_per_epoch * config.epochs
        self.model = workload.make_model().to(self.device)
        self.cost = RunCost(workload, self.model)

        def model_changed() -> None:
            self.cost.change_model(self.model)

        self.recipe.prepare_model(self.model, self.cost.freeze_dense, model_changed)
        optimizer = workload.make_optimizer(self.model.named_parameters())
        self.optimizer = self.recipe.prepare_optimizer(optimizer, workload.batch_factor)
        base_lrs = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        self.scheduler = workload.make_scheduler(self.optimizer, self.total_steps)
        facts = RunFacts(
            model=self.model,
            forward=self._example_forward,
            total_steps=self.total_steps,
            steps_per_epoch=workload.steps_per_epoch,
            base_lrs=base_lrs,
            loss=workload.loss,
            example_batch=self._example_batch,
            epoch_batches=lambda epoch: workload.train_batches(epoch, config.seed),
            samples=workload.samples(),
            validation_loss=self._validation_loss,
            make_model=workload.make_model,
            quality=self.quality,
            before_change=self.cost.freeze_dense,
            changed=model_changed,
        )
        self.method = attach(self.optimizer, config, facts)
        self.statistics: RunStatistics | None = None
        if config.statistics_measurements is not None:
            self.statistics = RunStatistics(config, workload, self.model, self.total_steps)
        elif config.statistics_samples is not None:
            raise UserError(
                f"statistics_samples={config.statistics_samples} needs statistics_measurements, the number of "
                "measurements"
            )
        self.trains_at_first = tuple(p.requires_grad for p in self.model.parameters())
        """True for each parameter that trains at step 0, by number."""
        self._shapes = EpochShapes(workload.steps_per_epoch)
        self.forward_cache: ForwardCache | None = None
        if config.forward_cache_mb:
            check_forward_cache(config, workload)
            self.forward_cache = self._stack.enter_context(
                ForwardCache(
                    self.model,
                    samples=workload.different_inputs,
                    budget_bytes=config.forward_cache_mb * 10**6,
                    forward=self._example_forward,
                )
            )
        warm_up(workload, self.model, self.device, config.seed)
        self._loader = self.recipe.loader(workload)
        self._stack.callback(self._loader.close)
        self.recipe.compile(self.model)
        self.clock = TrainingClock(self.device, lambda: self.cost.counting_time_s)
        self._energy_before_j, self._energy_since_j = 0.0, energy_j(self.device)  # None where nothing measures it
        self._takes_energy = False  # whether an epoch is being trained
        self._wall_time_before_s, self._peak_before = 0.0, 0  # in the processes that saved the loaded checkpoint
        reset_peak(self.device)
        self.epoch = 0  # epochs trained and evaluated
        self._in_epoch = 0  # steps into the epoch
        self._samples = 0
        self._loss_sum = torch.zeros((), device=self.device)
        self._epoch_batches: Iterator[Batch] = iter(())
        self.row: dict[str, Any] | None = None  # the last epoch's row; None before the first

    def _example_batch(self) -> Batch:
        return next(iter(self.workload.train_batches(0, self.config.seed)))

    def _example_forward(self, model: nn.Module) -> Tensor:
        return self.workload.loss(model, tuple(t.to(self.device) for t in self._example_batch()))

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
        return self.epoch >= self.config.epochs

    @property
    def step(self) -> int:
        return self.cost.counts["step"]

    @property
    def executed_flops(self) -> int:
        return self.cost.executed_flops

    @property
    def quality(self) -> Quality:
        """Return the metric by which the trial is compared: the config's, else the workload's own."""
        return self.workload.quality if self.config.metric is None else self.config.quality

    @property
    def wall_time_s(self) -> float:
        """Return the seconds since the run was built, with those before the loaded checkpoint."""
        return self._wall_time_before_s + time.perf_counter() - self._started

    @property
    def peak_bytes(self) -> int:
        return max(self._peak_before, peak_bytes(self.device))

    @property
    def train_time_s(self) -> float:
        """Return the seconds of training steps, without evaluation and counting; waits for a GPU."""
        return self.clock.read_s()

    @property
    def train_energy_j(self) -> float | None:
        """Return the joules that the card has taken while it trained epochs; None where nothing measures it."""
        if self._energy_since_j is None or (now_j := energy_j(self.device)) is None:
            return None
        return self._energy_before_j + (now_j - self._energy_since_j if self._takes_energy else 0.0)

    def _resources(self) -> dict[str, Any]:
        return {
            "train_time_s": self.train_time_s,
            "train_energy_j": self.train_energy_j,
            "wall_time_s": self.wall_time_s,
            "peak_memory_bytes": self.peak_bytes,
        }

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

    def each_step(self) -> Iterator[None]:
        """Prepare each step for `train_step`, from the next to the run's last; ends of epochs are not evaluated."""
        while not self.finished:
            self.begin_epoch()
            while not self.epoch_is_trained:
                yield
            self.skip_evaluation({"epoch": self.epoch + 1})

    def begin_epoch(self) -> None:
        """Prepare the epoch's next step."""
        self.model.train()
        self._epoch_batches = self._batches()
        self._resume()

    @property
    def epoch_is_trained(self) -> bool:
        return self._in_epoch == self.workload.steps_per_epoch

    def train_step(self) -> None:
        batch = next(self._epoch_batches)
        self._shapes.see(batch, self._in_epoch)
        samples = self._samples_of(batch)
        if self.statistics is not None:
            self.cost.add_measured(self.statistics.before_step(self.step, self.method.gradient_method()))
        self._loss_sum += samples * self._step(self.recipe.on_device(batch))
        self._samples += samples
        self._in_epoch += 1

    def _samples_of(self, batch: Batch) -> int:
        return len(batch[0])

    def pause(self) -> None:
        """Pause the training time until `begin_epoch`."""
        self.clock.pause()
        self._energy_before_j, self._takes_energy = self.train_energy_j or 0.0, False

    def _resume(self) -> None:
        self.clock.resume()
        if not self._takes_energy:
            self._energy_since_j, self._takes_energy = energy_j(self.device), True

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Exclude the block, work between steps, from the training time; not from the energy, too coarse for it."""
        self.clock.pause()
        try:
            yield
        finally:
            self.clock.resume()

    def skip_evaluation(self, known: Mapping[str, Any]) -> None:
        """End the epoch without evaluation, because its row is known."""
        self.pause()
        self._close_epoch()
        self.method.end_epoch(known)

    def _close_epoch(self) -> None:
        self.epoch += 1
        self._in_epoch, self._samples = 0, 0
        self._loss_sum = torch.zeros((), device=self.device)

    def end_epoch(self) -> dict[str, Any]:
        """Evaluate and return the epoch's row; raise TrainingDiverged as `train_epoch`."""
        train_loss = float(self._loss_sum) / self._samples  # the epoch's only host-device synchronization
        self.pause()
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

    def _batches(self) -> Iterator[Batch]:
        return self._loader.batches(self.epoch, self._in_epoch)

    def _cached(self) -> AbstractContextManager[None]:
        return nullcontext() if self.forward_cache is None else self.forward_cache.running()

    def _step(self, batch: Batch) -> Tensor:
        dense = self.cost.dense_step(batch)
        self.method.begin_step(self.epoch, self._in_epoch)
        batch = self.method.batch(batch)
        cache = self.forward_cache
        with self._cached(), self.method.forward_pass(), self.recipe.precision.forward_pass():
            loss = self._loss(batch)
        cost = self.cost.step(self.method.stop_key(), batch, None if cache is None else cache.last)
        self.optimizer.zero_grad(set_to_none=True)
        whole = self.method.loss(loss)
        if whole.requires_grad:
            self.recipe.precision.scaled(self._weighted(whole)).backward()
        self.recipe.after_backward(self.optimizer)
        estimated = self.method.estimate(lambda model: self.workload.loss(model, batch), batch)
        self.method.before_optimizer()
        self.recipe.precision.step(self.optimizer)
        if not self.method.replaces_schedule:
            self.scheduler.step()
        self.method.end_step()
        self.cost.add(dense, cost, batch, self.method.runs_beside(), estimated)
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        return self.workload.loss(self.model, batch)

    def _weighted(self, loss: Tensor) -> Tensor:
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
            **self._resources(),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "stage": "",
            **MODEL_DEFAULTS,
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
        # The test split is read once.
        with self._evaluating(), self._cached() if split == "validation" else nullcontext():
            return self.workload.metrics_on(self.model, split, self.device, self.quality.name)

    def _validation_loss(self) -> float | None:
        with self._evaluating(), self._cached():
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
            **self._resources(),
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
        self.clock.set(state["train_time_s"])
        self._energy_before_j, self._energy_since_j = state.get("train_energy_j") or 0.0, energy_j(self.device)
        self._wall_time_before_s = state["wall_time_s"]
        self._peak_before = int(state["peak_memory_bytes"])
        if state["method"]:
            self.method.resume(**state["method"])
        if self.statistics is not None:
            self.statistics.load_state_dict(state["statistics"])
        self.recipe.precision.load_state_dict(state["precision"])
        set_generators(state["generators"], self.device)

    def save(self, folder: str | Path) -> None:
        torch.save(self.state_dict(), Path(folder) / CHECKPOINT_FILE)

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint of the same config; UserError if it is of another."""
        state = read_state(Path(folder) / CHECKPOINT_FILE)
        if state["config"] != self.config.to_dict():
            raise UserError(f"the checkpoint in {folder} is of another configuration: {state['config']}")
        self.load_state_dict(state)
