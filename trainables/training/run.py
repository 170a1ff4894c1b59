"""One training run: built from a config, trained epoch by epoch, counting what it really executes."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainables.attachment import RunFacts, attach
from trainables.config import TrialConfig
from trainables.errors import TrainingDiverged, UserError
from trainables.gradskip.forward_cache.cache import ForwardCache
from trainables.metrics import METHOD_DEFAULTS, MODEL_DEFAULTS
from trainables.runtime.checkpoint_file import CHECKPOINT_FILE, read_state
from trainables.runtime.generators import generators_state, kept_generators, set_generators
from trainables.runtime.isolation import ProcessState
from trainables.runtime.memory import peak_bytes, reset_peak
from trainables.runtime.stopwatch import Stopwatch
from trainables.training.cost import CostTable
from trainables.training.warm_up import warm_up
from trainables.workloads import build
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import see_batch, structure_of

if TYPE_CHECKING:
    from typing_extensions import Self


def check_device(config: TrialConfig) -> None:
    """Raise UserError where the device is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, but torch sees no CUDA device here: use cpu")


def check_forward_cache(config: TrialConfig, workload: Workload) -> None:
    """Raise UserError for a forward cache where inputs do not repeat."""
    if config.forward_cache_mb == 0:
        return
    if workload.train_samples is None or workload.train_sample_indices(0, config.seed) is None:
        raise UserError(
            f"forward_cache_mb must be 0 for workload {workload.name}, whose inputs do not repeat, "
            f"got {config.forward_cache_mb}"
        )


class TrainingRun:
    """A run of `config.epochs` epochs. Use it as a context manager: process state is put back on leaving.

        with TrainingRun(config) as run:
            while not run.finished:
                row = run.train_epoch()

    `train_epoch` is `begin_epoch`, `train_step` until `epoch_is_trained`, `end_epoch`. A run that is saved at any step
    and loaded into a new `TrainingRun` of the same config continues bit for bit.

    Raises:
        UserError: a CUDA device asked for and not there, a layer number past the model's last parameter, or a
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
            self._build()
        except BaseException:
            self._stack.close()
            raise

    def _build(self) -> None:
        config = self.config
        self.workload = build(config.workload, config.options)
        self.total_steps = self.workload.steps_per_epoch * config.epochs
        self.model = self.workload.make_model().to(self.device)
        self.optimizer = self.workload.make_optimizer(self.model.named_parameters())
        base_lrs = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        self.scheduler = self.workload.make_scheduler(self.optimizer, self.total_steps)
        self._cost = self._dense_cost = CostTable(self.workload, self.model)
        self._tables = [self._dense_cost]
        self._beside: dict[int, CostTable] = {}
        facts = RunFacts(
            model=self.model,
            forward=self._example_forward,
            total_steps=self.total_steps,
            steps_per_epoch=self.workload.steps_per_epoch,
            base_lrs=base_lrs,
            loss=self.workload.loss,
            example_batch=lambda: next(iter(self.workload.train_batches(0, config.seed))),
            validation_loss=self._validation_loss,
            make_model=self.workload.make_model,
            before_change=self._dense_cost.freeze,
            changed=self._model_changed,
        )
        self.method = attach(self.optimizer, config, facts)
        self.trains_at_first = tuple(p.requires_grad for p in self.model.parameters())
        """Whether each parameter trains at step 0, by number."""
        self.epoch_shapes: list[tuple[int, Batch]] | None = None
        """Run lengths of the batches of an epoch, on the meta device; None until one was trained from its start."""
        self._shapes: list[tuple[int, Batch]] = []
        self.forward_cache = self._make_forward_cache()
        warm_up(self.workload, self.model, self.device, config.seed)
        reset_peak(self.device)
        self.epoch = 0
        """Epochs trained and evaluated."""
        self._in_epoch = 0  # steps into the epoch
        self._samples = 0
        self._loss_sum = torch.zeros((), device=self.device)
        self._epoch_batches: Iterator[tuple[Batch, Tensor | None]] = iter(())
        self._counts = dict.fromkeys(
            ("step", "forward_flops", "backward_flops", "gradient_bytes", "optimizer_bytes",
             "dense_flops", "dense_backward_flops"), 0
        )  # fmt: skip
        self._train_time = Stopwatch(self._counting_time_s)
        self._wall_time_before_s = 0.0
        self._peak_before = 0  # in the process of whoever saved what was loaded
        self._flops_before = 0  # executed by whoever saved what was loaded
        self.row: dict[str, Any] | None = None
        """The last epoch's row; None before the first."""

    def _model_changed(self) -> None:
        """Steps cost something else now; what is saved is still counted against the model as it was built."""
        self._cost = self._new_table(self.model, structure_of(self.model))
        self._cost.freeze()  # what looks at the model is away now, and will be back when a step is counted
        self._beside.clear()

    def _new_table(self, model: nn.Module, structure: Hashable) -> CostTable:
        table = CostTable(self.workload, model, structure)
        self._tables.append(table)
        return table

    def _counting_time_s(self) -> float:
        return sum(table.counting_time_s for table in self._tables)

    def _flops_beside(self, batch: Batch) -> int:
        """Forward FLOPs of other models in this step."""
        flops = 0
        for model in self.method.runs_beside():
            table = self._beside.get(id(model))
            if table is None:
                table = self._beside[id(model)] = self._new_table(model, ("beside", structure_of(model)))
            flops += table.forward_flops(batch)
        return flops

    def _example_forward(self, model: nn.Module) -> torch.Tensor:
        batch = next(iter(self.workload.train_batches(0, self.config.seed)))
        return self.workload.loss(model, tuple(t.to(self.device) for t in batch))

    def _make_forward_cache(self) -> ForwardCache | None:
        megabytes, workload = self.config.forward_cache_mb, self.workload
        if megabytes == 0:
            return None
        check_forward_cache(self.config, workload)
        assert workload.train_samples is not None
        cache = ForwardCache(
            self.model,
            samples=workload.train_samples,
            budget_bytes=megabytes * 10**6,
            chain=workload.forward_chain(self.model),
        )
        return self._stack.enter_context(cache)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Put the process state back as it was before the run."""
        self._epoch_batches = iter(())  # a loader that reads ahead ends its thread
        self._stack.close()

    @property
    def finished(self) -> bool:
        """Whether all epochs are trained."""
        return self.epoch >= self.config.epochs

    @property
    def step(self) -> int:
        """Optimizer steps executed, from the run's start."""
        return self._counts["step"]

    @property
    def executed_flops(self) -> int:
        """FLOPs of those steps."""
        return self._counts["forward_flops"] + self._counts["backward_flops"]

    def train_epoch(self) -> dict[str, Any]:
        """Train one epoch (what is left of it) and evaluate; the row of result columns (`trainables.metrics.ROW`).

        Raises:
            TrainingDiverged: the loss or the accuracy is not finite.
        """
        self.begin_epoch()
        while not self.epoch_is_trained:
            self.train_step()
        return self.end_epoch()

    def begin_epoch(self) -> None:
        """Make ready for the epoch's next step."""
        self.model.train()
        self._epoch_batches = self._batches()
        self._train_time.start()

    @property
    def epoch_is_trained(self) -> bool:
        """Whether the epoch's last step is done."""
        return self._in_epoch == self.workload.steps_per_epoch

    def train_step(self) -> None:
        """One optimizer step."""
        batch, indices = next(self._epoch_batches)
        if self.epoch_shapes is None:
            self._see_shapes(batch)
        samples = len(batch[0])
        self._loss_sum += samples * self._step(tuple(t.to(self.device, non_blocking=True) for t in batch), indices)
        self._samples += samples
        self._in_epoch += 1

    def _see_shapes(self, batch: Batch) -> None:
        if self._in_epoch == 0:
            self._shapes = []
        elif not self._shapes:
            return  # begun in the middle of an epoch
        see_batch(self._shapes, batch)
        if self._in_epoch == self.workload.steps_per_epoch - 1:
            self.epoch_shapes = self._shapes

    def pause(self) -> None:
        """Training is interrupted until `begin_epoch`."""
        self._train_time.pause()

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """For work between steps that is no part of the training time."""
        self._train_time.pause()
        try:
            yield
        finally:
            self._train_time.start()

    def skip_evaluation(self, known: Mapping[str, Any]) -> None:
        """End the epoch where its row is known."""
        self._train_time.pause()
        self._close_epoch()
        self.method.end_epoch(known)

    def _close_epoch(self) -> None:
        self.epoch += 1
        self._in_epoch, self._samples = 0, 0
        self._loss_sum = torch.zeros((), device=self.device)

    def end_epoch(self) -> dict[str, Any]:
        """Evaluate; the epoch's row.

        Raises:
            TrainingDiverged: the loss or the accuracy is not finite.
        """
        train_loss = float(self._loss_sum) / self._samples  # the epoch's only host-device synchronization
        self._train_time.pause()
        self._close_epoch()
        if not math.isfinite(train_loss):
            raise TrainingDiverged(f"the training loss is {train_loss} in epoch {self.epoch}")
        self.row = self._row(train_loss)
        if not math.isfinite(self.row["accuracy"]):
            raise TrainingDiverged(f"the accuracy is {self.row['accuracy']} in epoch {self.epoch}")
        self.method.end_epoch(self.row)
        return self.row

    def _batches(self) -> Iterator[tuple[Batch, Tensor | None]]:
        """What is left of the epoch's batches, with the sample numbers where the forward cache needs them."""
        batches = self.workload.train_batches_from(self.epoch, self.config.seed, self._in_epoch)
        indices = self.workload.train_sample_indices(self.epoch, self.config.seed) if self.forward_cache else None
        if indices is None:
            return ((batch, None) for batch in batches)
        return zip(batches, islice(indices, self._in_epoch, None), strict=True)

    def _step(self, batch: Batch, indices: Tensor | None = None) -> Tensor:
        dense = self._dense_cost.dense_step(batch)
        self.method.begin_step(self.epoch, self._in_epoch)
        cache = self.forward_cache
        with cache.batch(indices) if cache is not None and indices is not None else nullcontext():
            loss = self._loss(batch)
        cost = self._cost.step(self.method.stop_key(), batch, None if cache is None else cache.last)
        self.optimizer.zero_grad(set_to_none=True)
        whole = self.method.loss(loss)
        if whole.requires_grad:
            self._weighted(whole).backward()
        self.method.before_optimizer()
        self.optimizer.step()
        if not self.method.replaces_schedule:
            self.scheduler.step()
        self.method.end_step()
        counts = self._counts
        counts["step"] += 1
        counts["forward_flops"] += cost.forward_flops + self._flops_beside(batch)
        counts["backward_flops"] += cost.backward_flops
        counts["gradient_bytes"] += cost.gradient_bytes
        counts["optimizer_bytes"] += cost.optimizer_bytes
        counts["dense_flops"] += dense.flops
        counts["dense_backward_flops"] += dense.backward_flops
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch."""
        return self.workload.loss(self.model, batch)

    def _weighted(self, loss: Tensor) -> Tensor:
        """What the backward pass begins from."""
        return loss

    def _row(self, train_loss: float) -> dict[str, Any]:
        accuracy = self._accuracy("validation")
        test_accuracy = self._accuracy("test") if self.finished and "test" in self.workload.splits else None
        counts = self._counts
        # Epochs are alike, so the executed part gives the full budget's cost.
        budget = counts["dense_flops"] * self.config.epochs // self.epoch
        backward_budget = counts["dense_backward_flops"] * self.config.epochs // self.epoch
        executed = self.executed_flops
        return {
            "epoch": self.epoch,
            "step": counts["step"],
            "train_loss": train_loss,
            "accuracy": accuracy,
            "test_accuracy": test_accuracy,
            "compute_saved": (counts["dense_flops"] - executed) / budget if budget else 0.0,
            "backward_saved": (
                (counts["dense_backward_flops"] - counts["backward_flops"]) / backward_budget
                if backward_budget
                else 0.0
            ),
            "executed_flops": executed,
            "search_flops": executed - self._flops_before,
            "forward_flops": counts["forward_flops"],
            "backward_flops": counts["backward_flops"],
            "dense_flops": budget,
            "gradient_bytes": counts["gradient_bytes"],
            "optimizer_bytes": counts["optimizer_bytes"],
            "train_time_s": self._train_time.elapsed_s,
            "wall_time_s": self._wall_time_s(),
            "peak_memory_bytes": self._peak_bytes(),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "stage": "",
            **MODEL_DEFAULTS,
            **self.method.measured(),
            **METHOD_DEFAULTS,
            **self.method.columns(),
        }

    def _accuracy(self, split: str) -> float:
        self.model.eval()
        # A data loader draws a seed when it is iterated. What is trained next must not depend on whether a row was
        # evaluated here or is known.
        with torch.no_grad(), kept_generators([self.device]):
            return float(self.workload.evaluate(self.model, split, self.device))

    def _validation_loss(self) -> float | None:
        self.model.eval()
        with torch.no_grad(), kept_generators([self.device]):
            return self.workload.mean_loss(self.model, "validation", self.device)

    def _peak_bytes(self) -> int:
        return max(self._peak_before, peak_bytes(self.device))

    def _wall_time_s(self) -> float:
        return self._wall_time_before_s + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """The run's whole state at a step's start: weights, optimizer and rule, schedule, counts, generators, place.

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
            "counts": self._counts,
            "row": self.row,
            "train_time_s": self._train_time.elapsed_s,
            "wall_time_s": self._wall_time_s(),
            "search_flops": self.executed_flops - self._flops_before,
            "peak_memory_bytes": self._peak_bytes(),
            "generators": generators_state(self.device),
            "method": self.method.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`; which configuration it came from is the caller's to check."""
        if state["method"]:
            self.method.prepare_structure(state["method"]["training_state"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self._in_epoch = state["epoch"], state["in_epoch"]
        self._samples = state["samples"]
        self._loss_sum = state["loss_sum"].to(self.device)
        self.row = state["row"]
        self._counts = dict(state["counts"])
        self._flops_before = self.executed_flops - state["search_flops"]
        self._train_time.elapsed_s = state["train_time_s"]
        self._wall_time_before_s = state["wall_time_s"]
        self._peak_before = int(state["peak_memory_bytes"])
        if state["method"]:
            self.method.resume(**state["method"])
        set_generators(state["generators"], self.device)

    def count_spent_from_here(self) -> None:
        """`search_flops` begins anew: what was executed before is another trial's."""
        self._flops_before = self.executed_flops

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
