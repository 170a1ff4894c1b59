"""Gradient-Skip and a compression schedule on one training run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.attachment import Attached, RunFacts
from trainables.compression.trial import method as compression
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip import method as gradskip

#: Rules that decide by weights only: compression does not change these within a step.
_MODES = ("off", "auto", "manual")


class GradskipWithCompression(Attached):
    """Both methods; Gradient-Skip decides by the weights after the previous step."""

    def __init__(self, skip: gradskip.AttachedGradientSkip, compress: compression.AttachedCompression) -> None:
        self.skip = skip
        self.gradskip = skip.gradskip
        self.compress = compress
        self.replaces_schedule = compress.replaces_schedule

    def stop_key(self) -> Hashable:
        return (self.skip.stop_key(), self.compress.stop_key())

    def begin_step(self, epoch: int, minibatch: int) -> None:
        self.gradskip.look_ahead()
        self.compress.begin_step(epoch, minibatch)

    def loss(self, loss: Tensor) -> Tensor:
        return self.compress.loss(loss)

    def before_optimizer(self) -> None:
        self.compress.before_optimizer()

    def end_step(self) -> None:
        self.compress.end_step()

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        self.compress.end_epoch(metrics)

    def events(self) -> list[dict[str, Any]]:
        return self.skip.events()

    def columns(self) -> dict[str, Any]:
        return self.skip.columns()

    def measured(self) -> dict[str, Any]:
        return self.compress.measured()

    def runs_beside(self) -> Sequence[nn.Module]:
        return self.compress.runs_beside()

    def model_metadata(self) -> dict[str, Any]:
        return {"gradskip": self.skip.model_metadata(), "compression": self.compress.model_metadata()}

    def state_dict(self) -> dict[str, Any]:
        # Gradient-Skip's state is in the optimizer's state.
        return {
            "decision_state": {"compression": self.compress.decision_state()},
            "training_state": self.compress.training_state(),
        }

    def training_state(self) -> dict[str, Any]:
        return {**self.skip.training_state(), **self.compress.training_state()}

    def decision_state(self) -> dict[str, Any]:
        return {**self.skip.decision_state(), "compression": self.compress.decision_state()}

    def prepare_structure(self, training_state: Mapping[str, Any]) -> None:
        self.compress.prepare_structure(training_state)

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        if "machine" in decision_state:
            self.skip.resume({name: decision_state[name] for name in ("machine", "events")}, training_state)
        self.compress.resume(decision_state["compression"], training_state)


def check_together(config: TrialConfig, schedule: Mapping[str, Any]) -> None:
    """Check that Gradient-Skip can be combined with this schedule.

    Args:
        config: with Gradient-Skip's rule.
        schedule: plain mapping.

    Raises:
        UserError: the rule uses gradients, or the schedule changes the model's structure.
    """
    mode = config.gradskip_settings().mode
    if mode not in _MODES:
        raise UserError(
            f"CAC_RULE={mode} can't be combined with compression: its signal would depend on what is pruned in the "
            "same step; use CAC_RULE=variance or manual stops"
        )
    if any(kind in policy for policy in schedule["policies"] for kind in ("quantizer", "extension")):
        raise UserError(
            "Gradient-Skip can't be combined with quantizers or extensions, which change the layers that it numbers: "
            "leave them out of the schedule, or search one of the two methods"
        )


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> GradskipWithCompression:
    """Attach both methods.

    Raises:
        UserError: see `check_together`.
    """
    check_together(config, schedule_of(config))
    compress = compression.attach(optimizer, config, run)
    return GradskipWithCompression(gradskip.attach(optimizer, config, run), compress)
