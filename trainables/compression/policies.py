"""Policies: objects that the scheduler calls during training, one class for each kind of component.

A policy is called in the epochs in which it is active, and in earlier epochs in which its component observes training.
The order in an epoch: `epoch_begin`, [`minibatch_begin`, forward, `before_backward`, backward, the optimizer's step,
`after_step`, `minibatch_end`] for each batch, `epoch_end` after the evaluation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.compression.component import Pruner, Quantizer, Regularizer
from trainables.compression.distillation import KnowledgeDistillationPolicy
from trainables.compression.lr_schedulers import ScheduleLR
from trainables.compression.masks import Masks
from trainables.compression.schedule import PrunerPolicyConfig
from trainables.compression.schedule.timing import Moment
from trainables.compression.thinning import Kind, Thinned, thin
from trainables.compression.thinning.batchnorm_folding import batchnorms_after, folded
from trainables.errors import UserError


@dataclass(kw_only=True)
class Training:
    """Objects of a training run that policies work on."""

    model: nn.Module
    masks: Masks
    optimizer: Optimizer | None = None
    inputs: tuple[Any, ...] | None = None
    """Arguments of the model's last training forward pass, kept if a policy needs them."""
    model_changed: Callable[[], None] = lambda: None
    """Called after modules or shapes have changed."""
    example: Callable[[nn.Module], object] | None = None
    """Runs a model on a batch."""
    removed: list[Any] = field(default_factory=list)
    """Records of removed structures, one per thinning, in their order."""


class Policy:
    """Base of all policies, which apply a component in their active epochs; this class does nothing."""

    epochs_before: int = 0
    """Number of epochs before the first active one in which `look` is called."""
    wants_inputs: bool = False
    """True if the arguments of the model's forward are kept in active epochs."""

    def look(self, training: Training) -> None:
        """Start observing training; called again after an interruption."""

    def look_away(self) -> None:
        """Stop observing training."""

    def epoch_begin(self, training: Training, moment: Moment) -> None:
        """Handle the start of an active epoch."""

    def minibatch_begin(self, training: Training, moment: Moment) -> None:
        """Prepare for the forward pass."""

    def before_backward(self, training: Training, loss: Tensor) -> Tensor:
        """Return the loss for the backward pass."""
        return loss

    def after_step(self, training: Training, moment: Moment) -> None:
        """Handle the end of the optimizer's step, before masks are applied."""

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        """Handle the end of the optimizer's step, after masks were applied."""

    def epoch_end(self, training: Training, moment: Moment, metrics: Mapping[str, Any]) -> None:
        """Handle the end of an active epoch, after its evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""


class PruningPolicy(Policy):
    """Set a pruner's masks at the start of active epochs, and within them if its arguments require it."""

    def __init__(self, pruner: Pruner, args: PrunerPolicyConfig | None = None) -> None:
        self.pruner = pruner
        self.args = args or PrunerPolicyConfig()
        self.epochs_before = pruner.epochs_before
        self._begun = False
        self._batchnorms: Mapping[str, str] | None = None

    def look(self, training: Training) -> None:
        self.pruner.start(training.model)

    def look_away(self) -> None:
        self.pruner.stop()

    def epoch_begin(self, training: Training, moment: Moment) -> None:
        first, self._begun = not self._begun, True
        if first:
            for name in self.pruner.targets:
                training.masks.configure(
                    name,
                    use_double_copies=self.args.use_double_copies,
                    mask_on_forward_only=self.args.mask_on_forward_only,
                )
                if self.args.mask_gradients:
                    training.masks.mask_gradients(name, True)
        if not (first and self.args.skip_first_minibatch):
            self._prune(training, moment)

    def minibatch_begin(self, training: Training, moment: Moment) -> None:
        step = moment.epoch * moment.minibatches_per_epoch + moment.minibatch
        every = self.args.mini_batch_pruning_frequency
        again = every > 0 and moment.minibatch > 0 and step % every == 0
        first = moment.timing.starting_epoch * moment.minibatches_per_epoch + 1
        if again or (self.args.skip_first_minibatch and step == first):
            self._prune(training, moment)

    def _prune(self, training: Training, moment: Moment) -> None:
        masks = training.masks
        there = masks.weights(self.pruner.targets)
        weights = {name: masks.dense(name).detach() for name in there}
        if self.args.fold_batchnorm:
            weights = folded(weights, training.model, self._batchnorms_of(training))
        current = {name: mask for name in there if (mask := masks.get(name)) is not None}
        for name, mask in self.pruner.masks(weights, current, moment).items():
            masks.set(name, mask)

    def _batchnorms_of(self, training: Training) -> Mapping[str, str]:
        if self._batchnorms is None:
            if training.example is None:
                raise UserError(
                    "fold_batchnorm must see the model run: give the scheduler example=, a function that runs a model "
                    "on a batch"
                )
            model, example = training.model, training.example
            self._batchnorms = batchnorms_after(model, lambda: example(model))
        return self._batchnorms

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        if self.args.discard_masks_at_minibatch_end:
            training.masks.discard(self.pruner.targets)

    def epoch_end(self, training: Training, moment: Moment, metrics: Mapping[str, Any]) -> None:
        if moment.epoch == moment.timing.last_epoch:
            for name in training.masks.weights(self.pruner.targets):
                if self.args.keep_mask:
                    training.masks.release(name)
                elif self.args.mask_gradients:
                    training.masks.mask_gradients(name, False)

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self._begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begun = bool(state["begun"])


class RegularizationPolicy(Policy):
    """Add a regularizer's term to the loss and zero what its threshold criterion finds."""

    def __init__(self, regularizer: Regularizer, *, keep_mask: bool = False) -> None:
        self.regularizer = regularizer
        self.keep_mask = keep_mask

    def before_backward(self, training: Training, loss: Tensor) -> Tensor:
        return loss + self.regularizer.loss(training.masks.weights(self.regularizer.targets))

    def after_step(self, training: Training, moment: Moment) -> None:
        if not self.regularizer.thresholds:
            return
        weights = {}
        for name, weight in training.masks.weights(self.regularizer.targets).items():
            mask = training.masks.get(name)  # pruned elements count as zero
            weights[name] = weight.detach() if mask is None else weight.detach() * mask
        last = moment.epoch == moment.timing.last_epoch and moment.minibatch == moment.minibatches_per_epoch - 1
        for name, mask in self.regularizer.masks(weights).items():
            there = training.masks.get(name)
            if last and self.keep_mask:
                training.masks.set(name, mask if there is None else mask * there)
            else:
                training.masks.set(name, mask, is_regularization_mask=True)


class QuantizationPolicy(Policy):
    """Prepare the model in the first active epoch; the model then stays quantized."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.prepared = False

    def prepare(self, training: Training) -> None:
        """Change the model's modules; later calls do nothing."""
        if self.prepared:
            return
        groups = [] if training.optimizer is None else training.optimizer.param_groups
        there = len(groups)
        self.quantizer.prepare(training.model, training.optimizer)
        # Learned parameters are moved to the last group, because learning-rate schedules refer to groups by index.
        while len(groups) > there:
            learned = groups.pop(there)
            for key in ("params", "param_names"):
                if key in groups[there - 1]:
                    groups[there - 1][key].extend(learned[key])
        self.prepared = True
        training.masks.rebind(training.model)
        training.model_changed()

    def epoch_begin(self, training: Training, moment: Moment) -> None:
        self.prepare(training)

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        if moment.minibatch == moment.minibatches_per_epoch - 1:
            self.quantizer.finish_epoch(training.model)

    def state_dict(self) -> dict[str, Any]:
        return {"prepared": self.prepared, "quantizer": self.quantizer.state_dict() if self.prepared else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["prepared"]:
            self.quantizer.load_state_dict(state["quantizer"])


class LRPolicy(Policy):
    """Set the learning rates for the next epoch at the end of active epochs, and those of epoch 0 at its start.

    The latter is needed for warm-up schedules (LinearLR, ConstantLR, OneCycleLR, CyclicLR), whose first rate is not the
    base rate.
    """

    def __init__(self, scheduler: ScheduleLR) -> None:
        self.scheduler = scheduler

    def epoch_begin(self, training: Training, moment: Moment) -> None:
        if moment.epoch == 0 and self.scheduler.metric is None:
            self.scheduler.step_to(0)

    def epoch_end(self, training: Training, moment: Moment, metrics: Mapping[str, Any]) -> None:
        wanted = self.scheduler.metric
        if wanted is not None and metrics.get(wanted) is None:
            raise UserError(
                f"a learning rate that follows {'a loss' if wanted == 'min' else 'an accuracy'} must be told it: "
                f'on_epoch_end(epoch, metrics={{"{wanted}": ...}}), got {dict(metrics) or "none"}'
            )
        self.scheduler.step_to(moment.epoch + 1, None if wanted is None else float(metrics[wanted]))


class ThinningPolicy(Policy):
    """Remove zero structures after the last step of active epochs, before the evaluation."""

    wants_inputs = True

    def __init__(self, kind: Kind, *, round_to: int = 1) -> None:
        self.kind = kind
        self.round_to = round_to
        self.last: Thinned | None = None
        """Result of the last thinning."""

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        if moment.minibatch < moment.minibatches_per_epoch - 1 or training.inputs is None:
            return
        self.last = thin(training.model, training.inputs, training.optimizer, kind=self.kind, round_to=self.round_to)
        if self.last.record:
            if not self.last.exact:
                warnings.warn(
                    "thinning changed what the model computes: outputs differ by up to "
                    f"{self.last.difference:.3g}, for what follows a removed filter (a batch norm's shift, a bias) was "
                    "not zero",
                    stacklevel=2,
                )
            training.removed.append(self.last.record)
            training.masks.crop(self.last.removed)
            training.masks.rebind(training.model)
            training.model_changed()


class DistillationPolicy(Policy):
    """Train the model with a teacher in active epochs."""

    def __init__(self, make: Callable[[], KnowledgeDistillationPolicy]) -> None:
        self._make = make
        self.distillation: KnowledgeDistillationPolicy | None = None
        """None before the first active epoch, when the teacher is built."""

    def look(self, training: Training) -> None:
        if self.distillation is None:
            self.distillation = self._make()
        self.distillation.attach()

    def look_away(self) -> None:
        if self.distillation is not None:
            self.distillation.detach()

    def before_backward(self, training: Training, loss: Tensor) -> Tensor:
        assert self.distillation is not None
        return self.distillation.before_backward(loss)
