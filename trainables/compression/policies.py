"""Policies: what the scheduler calls when, for each kind of component.

A policy is told of the epochs in which it is active, and of those before in which its component looks at the training.
The order in an epoch: `epoch_begin`, [`minibatch_begin`, forward, `before_backward`, backward, `before_optimizer`, the
optimizer's step, `minibatch_end`] for each batch, `epoch_end` after the evaluation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
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
    """What policies work on."""

    model: nn.Module
    masks: Masks
    optimizer: Optimizer | None = None
    inputs: tuple[Any, ...] | None = None
    """Arguments of the model's last forward pass in this epoch, where a policy asked for them."""
    model_changed: Callable[[], None] = lambda: None
    """Called after modules or shapes have changed."""
    example: Callable[[nn.Module], object] | None = None
    """Runs a model on a batch."""
    removed: list[Any] = field(default_factory=list)
    """Records of what was removed, one a thinning, in their order."""


class Policy:
    """A component in its time; this one does nothing."""

    epochs_before: int = 0
    """Epochs before the first active one in which `look` is called."""
    wants_inputs: bool = False
    """Whether the arguments of the model's forward are kept in active epochs."""

    def look(self, training: Training) -> None:
        """See the training from here on; called again after an interruption."""

    def look_away(self) -> None:
        """See nothing any more."""

    def epoch_begin(self, training: Training, moment: Moment) -> None:
        """An active epoch begins."""

    def minibatch_begin(self, training: Training, moment: Moment) -> None:
        """The forward pass is about to begin."""

    def before_backward(self, training: Training, loss: Tensor) -> Tensor:
        """The loss that the backward pass begins from."""
        return loss

    def after_step(self, training: Training, moment: Moment) -> None:
        """The optimizer has stepped; masks are about to be applied."""

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        """The optimizer has stepped and masks were applied."""

    def epoch_end(self, training: Training, moment: Moment, metrics: Mapping[str, Any]) -> None:
        """The epoch was evaluated."""

    def state_dict(self) -> dict[str, Any]:
        """Memory in plain types and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class PruningPolicy(Policy):
    """Sets a pruner's masks at the begin of active epochs (and between, where its arguments say so)."""

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
    """Adds a regularizer's term to the loss and zeroes what its threshold criterion finds."""

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
            mask = training.masks.get(name)  # what is pruned is about to be zero, and judged so
            weights[name] = weight.detach() if mask is None else weight.detach() * mask
        last = moment.epoch == moment.timing.last_epoch and moment.minibatch == moment.minibatches_per_epoch - 1
        for name, mask in self.regularizer.masks(weights).items():
            there = training.masks.get(name)
            if last and self.keep_mask:
                training.masks.set(name, mask if there is None else mask * there)
            else:
                training.masks.set(name, mask, is_regularization_mask=True)


class QuantizationPolicy(Policy):
    """Prepares the model when it first acts; what it then computes with stays quantized."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.prepared = False

    def prepare(self, training: Training) -> None:
        """Change the model's modules, once."""
        if self.prepared:
            return
        groups = [] if training.optimizer is None else training.optimizer.param_groups
        there = len(groups)
        self.quantizer.prepare(training.model, training.optimizer)
        # Learned parameters join the last group: a learning-rate schedule knows its groups by number.
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
    """Sets the learning rates for the next epoch at the end of active ones, and those of epoch 0 at its beginning.

    The latter matters to what warms up (LinearLR, ConstantLR, OneCycleLR, CyclicLR): its first rate is not the base.
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
    """Removes zero structures after the last step of active epochs, before the evaluation."""

    wants_inputs = True

    def __init__(self, kind: Kind, *, round_to: int = 1) -> None:
        self.kind = kind
        self.round_to = round_to
        self.last: Thinned | None = None
        """What was removed last."""

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        if moment.minibatch < moment.minibatches_per_epoch - 1 or training.inputs is None:
            return
        self.last = thin(
            training.model, training.inputs, training.optimizer, kind=self.kind, round_to=self.round_to
        )  # fmt: skip
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
    """Lets the model learn from a teacher in active epochs."""

    def __init__(self, make: Callable[[], KnowledgeDistillationPolicy]) -> None:
        self._make = make
        self.distillation: KnowledgeDistillationPolicy | None = None
        """None before the first active epoch, in which the teacher is built."""
        self.is_active = False

    def look(self, training: Training) -> None:
        if self.distillation is None:
            self.distillation = self._make()
        if not self.is_active:
            self.distillation.attach()
            self.is_active = True

    def look_away(self) -> None:
        if self.distillation is not None and self.is_active:
            self.distillation.detach()
            self.is_active = False

    def before_backward(self, training: Training, loss: Tensor) -> Tensor:
        assert self.distillation is not None
        return self.distillation.before_backward(loss)


def first_inputs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward's arguments without their history."""
    return tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
