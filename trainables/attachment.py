"""A method at work on one training run: what the loop calls, and how a method is attached or replayed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainables.config import TrialConfig
from trainables.interventions import MethodReplay, NeverActs
from trainables.metrics import METHOD_DEFAULTS
from trainables.registry import METHODS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def _nothing() -> None:
    pass


class Attached:
    """A method at work on one training run. This base class is the method that does nothing.

    The loop's order: [begin_step, forward, loss, zero_grad and backward, before_optimizer, the optimizer's step,
    end_step] for each batch, then the evaluation and end_epoch.
    """

    replaces_schedule: bool = False
    """Whether learning rates are the method's: the workload's own schedule is then not stepped."""

    def begin_step(self, epoch: int, minibatch: int) -> None:
        """The forward pass of a step is about to begin; an epoch's first step is its minibatch 0."""

    def loss(self, loss: Tensor) -> Tensor:
        """What the backward pass begins from, given the workload's loss."""
        return loss

    def before_optimizer(self) -> None:
        """Gradients are there; the optimizer is about to step."""

    def end_step(self) -> None:
        """The optimizer and the schedule have stepped."""

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        """The epoch was evaluated; ``metrics`` is its row, or what is known of it."""

    def measured(self) -> dict[str, Any]:
        """Result columns that are measured on the model as it is now, after an epoch (`metrics.MODEL_DEFAULTS`)."""
        return {}

    def runs_beside(self) -> Sequence[nn.Module]:
        """Other models that run forward in every step now, such as a teacher."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """State that no optimizer carries; empty for a method that keeps its state there."""
        return {}

    def prepare_structure(self, training_state: Mapping[str, Any]) -> None:
        """Bring the model's structure to that of a state which is about to be loaded."""

    def stop_key(self) -> Hashable:
        """Equal keys mean equal sets of parameters without gradient; read before every step, so it must be cheap."""
        return ()

    def events(self) -> list[dict[str, Any]]:
        """What the method did so far, in plain types: iteration, layer, name, ratio, rule of each stop."""
        return []

    def columns(self) -> dict[str, Any]:
        """The method's own result columns (`trainables.metrics`)."""
        return {}

    def model_metadata(self) -> dict[str, Any]:
        """What the method's replay needs to know of the model, in plain types."""
        return {}

    def training_state(self) -> dict[str, Any]:
        """What of the method's state belongs to the training itself (tensors, plain types), not to its rule."""
        return {}

    def decision_state(self) -> dict[str, Any]:
        """Where the method stands, as its replay's `state_dict` says it."""
        return {}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        """Stand where a replay stands, in a run whose weights were loaded; ``training_state`` came with them."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a method may know of the run that it attaches to."""

    model: nn.Module
    """The model, as it will be trained."""
    forward: Callable[[nn.Module], Any]
    """Runs a model like it on one training batch."""
    total_steps: int
    """Optimizer steps of the full run."""
    steps_per_epoch: int = 1
    """Optimizer steps of an epoch."""
    base_lrs: tuple[float, ...] = ()
    """Learning rate of each parameter group, as the workload's optimizer was made."""
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor] | None = None
    """The workload's loss of a model on a batch."""
    example_batch: Callable[[], tuple[Tensor, ...]] | None = None
    """A training batch, on the CPU."""
    validation_loss: Callable[[], float | None] | None = None
    """Mean loss of the model as it is on the validation split; None from it where the workload has no such."""
    make_model: Callable[[], nn.Module] | None = None
    """Another model of the run's architecture."""
    before_change: Callable[[], None] = _nothing
    """To be called before a method changes what the model is made of, or hooks into it."""
    changed: Callable[[], None] = _nothing
    """To be called after the model's structure has changed."""


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
    if module is None:
        return config.method
    key: Hashable = importlib.import_module(module).blueprint_key(config)
    return key


def start_replay(config: TrialConfig, model_metadata: Mapping[str, Any]) -> MethodReplay:
    """Begin the replay of the configuration's method over recorded training. Loads no torch."""
    module = METHODS[config.method].replay_module
    if module is None:
        return NeverActs(METHOD_DEFAULTS)
    replay: MethodReplay = importlib.import_module(module).start_replay(config, model_metadata)
    return replay
