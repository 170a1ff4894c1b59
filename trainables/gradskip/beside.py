"""Gradient-Skip and another method on one training run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from trainables.attachment import Attached, EstimateFlops
from trainables.gradskip.method import AttachedGradientSkip

#: Rules that decide by weights only, which the other method does not change within a step.
WEIGHT_RULES = ("off", "auto", "manual")


class GradskipBeside(Attached):
    """Both methods; Gradient-Skip decides by the weights after the previous step.

    Args:
        skip: Gradient-Skip.
        other: the other method.
        name: of the other method, in states.
    """

    def __init__(self, skip: AttachedGradientSkip, other: Attached, name: str) -> None:
        self.skip, self.other, self._name = skip, other, name
        self.gradskip = skip.gradskip
        self.replaces_schedule = other.replaces_schedule

    def stop_key(self) -> Hashable:
        return (self.skip.stop_key(), self.other.stop_key())

    def begin_step(self, epoch: int, minibatch: int) -> None:
        self.gradskip.look_ahead()
        self.other.begin_step(epoch, minibatch)

    def batch(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.other.batch(batch)

    def forward_pass(self) -> AbstractContextManager[Any]:
        return self.other.forward_pass()

    def loss(self, loss: Tensor) -> Tensor:
        return self.other.loss(loss)

    def estimate(self, loss: Callable[[nn.Module], Tensor], batch: tuple[Tensor, ...]) -> EstimateFlops | None:
        return self.other.estimate(loss, batch)

    def gradient_method(self) -> Any:
        return self.other.gradient_method()

    def before_optimizer(self) -> None:
        self.other.before_optimizer()

    def end_step(self) -> None:
        self.other.end_step()

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        self.other.end_epoch(metrics)

    def watched_layers(self) -> list[tuple[int, ...]]:
        return self.skip.watched_layers()

    def events(self) -> list[dict[str, Any]]:
        return self.skip.events()

    def columns(self) -> dict[str, Any]:
        return self.skip.columns()

    def measured(self) -> dict[str, Any]:
        return self.other.measured()

    def runs_beside(self) -> Sequence[nn.Module]:
        return self.other.runs_beside()

    def model_metadata(self) -> dict[str, Any]:
        return {"gradskip": self.skip.model_metadata(), self._name: self.other.model_metadata()}

    def state_dict(self) -> dict[str, Any]:
        # Gradient-Skip's state is in the optimizer's state.
        return {
            "decision_state": {self._name: self.other.decision_state()},
            "training_state": self.other.training_state(),
        }

    def training_state(self) -> dict[str, Any]:
        return {**self.skip.training_state(), **self.other.training_state()}

    def decision_state(self) -> dict[str, Any]:
        return {**self.skip.decision_state(), self._name: self.other.decision_state()}

    def prepare_structure(self, training_state: Mapping[str, Any]) -> None:
        self.other.prepare_structure(training_state)

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        if "machine" in decision_state:
            self.skip.resume({name: decision_state[name] for name in ("machine", "events")}, training_state)
        self.other.resume(decision_state[self._name], training_state)
