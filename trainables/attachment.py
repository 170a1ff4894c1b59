"""Interface between the training loop and a method: the loop's calls, and how a method is attached or replayed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainables.config import TrialConfig
from trainables.interventions import MethodReplay, PlannedActs
from trainables.metrics import METHOD_DEFAULTS
from trainables.quality import ACCURACY, Quality
from trainables.registry import METHODS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class EstimateFlops:
    """FLOPs of an estimate of gradients, beside those of the step's own forward and backward pass."""

    forward_flops: int = 0
    """FLOPs of forward passes."""
    backward_flops: int = 0
    """FLOPs of backward passes; below 0 where a part of the step's own was left out."""
    all_trained: bool = True
    """True if parameters that took no part in the step's own backward pass had gradients from the estimate."""


class Attached:
    """A method attached to one training run. This base class is the method that does nothing.

    Order of the calls: [begin_step, batch, forward in forward_pass, loss, zero_grad and backward, estimate,
    before_optimizer, the optimizer's step, end_step] for each batch, then the evaluation and end_epoch.
    """

    replaces_schedule: bool = False
    """True if the method sets the learning rates; the workload's own schedule is then not stepped."""

    def begin_step(self, epoch: int, minibatch: int) -> None:
        """Handle the start of a step, before its forward pass; an epoch's first step is minibatch 0."""

    def batch(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the batch that the step trains, given the loop's, on the run's device."""
        return batch

    def forward_pass(self) -> AbstractContextManager[Any]:
        """Return the block in which the step's forward pass runs."""
        return nullcontext()

    def loss(self, loss: Tensor) -> Tensor:
        """Return the tensor from which the backward pass starts, given the workload's loss."""
        return loss

    def estimate(self, loss: Callable[[nn.Module], Tensor], batch: tuple[Tensor, ...]) -> EstimateFlops | None:
        """Give gradients in place of the backward pass, or beside it; return what was executed, None for nothing.

        Args:
            loss: the workload's loss of a model on the step's batch.
            batch: the step's batch, on the run's device.
        """
        return None

    def gradient_method(self) -> Any:
        """Return the `GradientMethod` whose statistics can be measured; None where there is none, or not yet."""
        return None

    def before_optimizer(self) -> None:
        """Handle the gradients of a step, before the optimizer steps."""

    def end_step(self) -> None:
        """Handle the end of a step, after the optimizer and the schedule have stepped."""

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Handle the end of an epoch, after its evaluation; ``metrics`` holds all or some columns of its row."""

    def measured(self) -> dict[str, Any]:
        """Return the result columns measured on the current model after an epoch (`metrics.MODEL_DEFAULTS`)."""
        return {}

    def runs_beside(self) -> Sequence[nn.Module]:
        """Return other models that currently run forward in every step, such as a teacher."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is not in the optimizer's state; empty for a method that keeps all of it there."""
        return {}

    def prepare_structure(self, training_state: Mapping[str, Any]) -> None:
        """Change the model's structure to that of a state that is about to be loaded."""

    def stop_key(self) -> Hashable:
        """Return a key, equal for equal sets of parameters without gradient; read before every step."""
        return ()

    def watched_layers(self) -> list[tuple[int, ...]]:
        """Return the numbers in the model of each watched layer's weights, whose variances its rules read."""
        return []

    def events(self) -> list[dict[str, Any]]:
        """Return the stops so far in plain types: iteration, layer, name, ratio and rule of each."""
        return []

    def columns(self) -> dict[str, Any]:
        """Return the method's own result columns (`trainables.metrics`)."""
        return {}

    def model_metadata(self) -> dict[str, Any]:
        """Return the facts about the model that the method's replay needs, in plain types."""
        return {}

    def training_state(self) -> dict[str, Any]:
        """Return the part of the method's state that belongs to training, not to its rule (tensors, plain types)."""
        return {}

    def decision_state(self) -> dict[str, Any]:
        """Return the state of the method's decisions in the form of its replay's `state_dict`."""
        return {}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        """Continue from a replay's state in a run whose weights were loaded together with ``training_state``."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run for the method that attaches to it."""

    model: nn.Module
    forward: Callable[[nn.Module], Any]
    """Runs a model like `model` on one training batch."""
    total_steps: int
    """Optimizer steps of the full run."""
    steps_per_epoch: int = 1
    """Optimizer steps per epoch."""
    base_lrs: tuple[float, ...] = ()
    """Learning rate of each parameter group, as the workload created its optimizer."""
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor] | None = None
    """The workload's loss of a model on a batch."""
    example_batch: Callable[[], tuple[Tensor, ...]] | None = None
    """Returns a training batch on the CPU."""
    epoch_batches: Callable[[int], Iterator[tuple[Tensor, ...]]] | None = None
    """Returns the training batches of an epoch, on the CPU."""
    samples: Any = None
    """The training samples by number (`workloads.sample_access.Samples`); None where the workload has none."""
    validation_loss: Callable[[], float | None] | None = None
    """Returns the current model's mean loss on the validation split, or None where the workload has none."""
    make_model: Callable[[], nn.Module] | None = None
    """Returns another model of the run's architecture."""
    quality: Quality = ACCURACY
    """The metric that the run's rows have."""
    before_change: Callable[[], None] = lambda: None
    """Must be called before a method changes the model's structure or registers hooks on it."""
    changed: Callable[[], None] = lambda: None
    """Must be called after the model's structure has changed."""


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> Attached:
    """Attach the configuration's method to an optimizer that has not stepped yet."""
    home = METHODS[config.method].home
    if home is None:
        return Attached()
    module, function = home.split(":")
    attached: Attached = getattr(importlib.import_module(module), function)(optimizer, config, run)
    return attached


def metadata_key(config: TrialConfig) -> Hashable:
    """Return a key: configurations of one workload with equal keys have equal `Attached.model_metadata`."""
    module = METHODS[config.method].replay_module
    key: Hashable = importlib.import_module(module).blueprint_key(config) if module else config.method
    return key


def start_replay(config: TrialConfig, model_metadata: Mapping[str, Any]) -> MethodReplay:
    """Start the replay of the configuration's method over recorded training. Loads no torch."""
    if (module := METHODS[config.method].replay_module) is None:
        return PlannedActs((), METHOD_DEFAULTS)
    replay: MethodReplay = importlib.import_module(module).start_replay(config, model_metadata)
    return replay
