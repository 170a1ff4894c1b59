"""Compression as a method of a trial."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.attachment import Attached, RunFacts
from trainables.compression.measures import latency, layer_macs, size_columns
from trainables.compression.policies import DistillationPolicy, LRPolicy
from trainables.compression.scheduler import CompressionScheduler
from trainables.compression.trial.from_config import schedule_of
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip import controller as gradskip
from trainables.gradskip.controller import WEIGHT_RULES, GradskipBeside
from trainables.runtime.isolation import kept_generators


class AttachedCompression(Attached):
    """A compression schedule attached to one training run."""

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        self._run = run
        self._iteration = 0
        self._macs: dict[str, int] | None = None
        self._built_macs: int | None = None
        self._structure = 0
        schedule = schedule_of(config)
        self.scheduler = CompressionScheduler(
            run.model,
            schedule if schedule["policies"] else None,  # without one it does nothing
            optimizer,
            seed=config.seed,
            compatible=bool(config.schedule_compatible),
            make_model=run.make_model,
            base_lrs=run.base_lrs,
            example=run.forward,
            before_change=run.before_change,
            model_changed=self._changed,
        )
        self.replaces_schedule = any(isinstance(s.policy, LRPolicy) for s in self.scheduler.policies)
        if self.replaces_schedule:
            for group, lr in zip(optimizer.param_groups, run.base_lrs, strict=True):
                group["lr"] = lr

    def _changed(self) -> None:
        self._structure += 1
        self._macs = None
        self._run.changed()

    def stop_key(self) -> Hashable:
        return self._structure

    def begin_step(self, epoch: int, minibatch: int) -> None:
        if minibatch == 0:
            self.scheduler.on_epoch_begin(epoch)
        self.scheduler.on_minibatch_begin(epoch, minibatch, self._run.steps_per_epoch)
        self._place = (epoch, minibatch, self._run.steps_per_epoch)

    def loss(self, loss: Tensor) -> Tensor:
        return self.scheduler.before_backward_pass(*self._place, loss)

    def before_optimizer(self) -> None:
        self.scheduler.before_parameter_optimization(*self._place)

    def end_step(self) -> None:
        self._iteration += 1
        self.scheduler.on_minibatch_end(*self._place)

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        epoch = int(metrics["epoch"]) - 1
        known = {"max": metrics.get("quality") if self._run.quality.direction == "max" else None}
        if any(
            isinstance(s.policy, LRPolicy) and s.policy.scheduler.metric == "min" and s.timing.is_active(epoch)
            for s in self.scheduler.policies
        ):
            assert self._run.validation_loss is not None
            known["min"] = self._run.validation_loss()
            if known["min"] is None:
                raise UserError(
                    "ReduceLROnPlateau with mode: min follows the loss of the validation split, and the workload "
                    "has no evaluation_batches: define them, or use mode: max, the accuracy"
                )
        self.scheduler.on_epoch_end(epoch, metrics=known)

    def runs_beside(self) -> Sequence[nn.Module]:
        policies = [s.policy for s in self.scheduler.policies if isinstance(s.policy, DistillationPolicy)]
        found = [p.distillation for p in policies if p.distillation is not None and p.distillation.is_attached]
        return [distillation.teacher for distillation in found if distillation.calls_teacher_each_step]

    def measured(self) -> dict[str, Any]:
        if not any(scheduled.has_acted for scheduled in self.scheduler.policies):
            return {}  # the same as in uncompressed runs, which share these rows
        run = self._run
        assert run.loss is not None
        assert run.example_batch is not None
        assert run.make_model is not None
        with self.scheduler.unhooked():
            if self._macs is None:
                self._macs = layer_macs(run.model, run.loss, run.example_batch())
            if self._built_macs is None:
                built = self._macs
                if self.scheduler.training.removed:
                    with kept_generators([]):
                        built = layer_macs(run.make_model(), run.loss, run.example_batch())
                self._built_macs = sum(built.values())
            found = size_columns(run.model, self._macs, self._built_macs)
            if self.scheduler.training.removed and self._iteration == run.total_steps:
                device = next(run.model.parameters()).device
                batch = tuple(tensor.to(device) for tensor in run.example_batch())
                found["latency_s"] = latency(run.model, run.loss, batch)
        return found

    def model_metadata(self) -> dict[str, Any]:
        return {"steps_per_epoch": self._run.steps_per_epoch}

    def state_dict(self) -> dict[str, Any]:
        return {"decision_state": self.decision_state(), "training_state": self.training_state()}

    def training_state(self) -> dict[str, Any]:
        return {"compression": self.scheduler.state_dict()} if self.scheduler.policies else {}

    def decision_state(self) -> dict[str, Any]:
        return {"iteration": self._iteration}

    def prepare_structure(self, training_state: Mapping[str, Any]) -> None:
        if self.scheduler.policies and "compression" in training_state:
            self.scheduler.prepare_structure(training_state["compression"])

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        self._iteration = int(decision_state["iteration"])
        if self.scheduler.policies and "compression" in training_state:
            self.scheduler.load_state_dict(training_state["compression"])


def check_together(config: TrialConfig, schedule: Mapping[str, Any]) -> None:
    """Raise UserError if the rule uses gradients, or the plain schedule changes the model's structure."""
    mode = config.gradskip_settings().mode
    if mode not in WEIGHT_RULES:
        raise UserError(
            f"CAC_RULE={mode} can't be combined with compression: its signal would depend on what is pruned in the "
            "same step; use CAC_RULE=variance or manual stops"
        )
    if any(kind in policy for policy in schedule["policies"] for kind in ("quantizer", "extension")):
        raise UserError(
            "Gradient-Skip can't be combined with quantizers or extensions, which change the layers that it numbers: "
            "leave them out of the schedule, or search one of the two methods"
        )


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> Attached:
    """Attach the configuration's schedule, beside Gradient-Skip where it is joined with it (`check_together`)."""
    if not config.skips_gradients:
        return AttachedCompression(optimizer, config, run)
    check_together(config, schedule_of(config))
    compress = AttachedCompression(optimizer, config, run)
    return GradskipBeside(gradskip.attach(optimizer, config, run), compress, "compression")
