"""Policies: objects that the scheduler calls during training, one class for each kind of component.

A policy is called in the epochs in which it is active, and in earlier epochs in which its component observes training.
The order in an epoch: `epoch_begin`, [`minibatch_begin`, forward, `before_backward`, backward, the optimizer's step,
`after_step`, `minibatch_end`] for each batch, `epoch_end` after the evaluation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.compression.component import Pruner, Quantizer, Regularizer
from trainables.compression.distillation import DistillationLossWeights, KnowledgeDistillationPolicy
from trainables.compression.distillation.policy import build_teacher
from trainables.compression.lr_schedulers import ScheduleLR, build_lr_scheduler
from trainables.compression.masks import Masks, parameters_as_built
from trainables.compression.pruners import build_pruner
from trainables.compression.quantizers import build_quantizer
from trainables.compression.schedule import ModelFacts, PlannedPolicy, PrunerPolicyConfig, Schedule, resolve
from trainables.compression.schedule.configs import (
    ComponentConfig,
    GroupLassoRegularizerConfig,
    GroupVarianceRegularizerConfig,
    KnowledgeDistillationConfig,
    L1RegularizerConfig,
)
from trainables.compression.schedule.names import assigned, plain_name
from trainables.compression.schedule.timing import Moment, Timing
from trainables.compression.structures import (
    at_least_single,
    check_groups,
    group_count,
    group_mask,
    group_norms,
    parts_of,
)
from trainables.compression.thinning import Kind, Thinned, thin
from trainables.compression.thinning.batchnorm_folding import batchnorms_after, folded
from trainables.compression.thinning.removing import check_installed
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


# --- Regularization terms of the loss that push weights or groups towards zero, or the groups' norms apart ------------
# Symbols: w a weight; g one of its groups (see `structures`); lambda the strength that the schedule gives a parameter,
# >= 0. Terms are summed over the parameters.
#
#     L1               lambda sum |w|
#     group lasso      lambda sum_g ||g||_2                  (Yuan and Lin 2006, eq. 2.1, without sqrt of the group
#     size) group variance   lambda / var_g ||g||_2                (Torfi et al. 2018, arXiv:1802.09902; variance
#     unbiased)

#: Below this variance the group variance term is constant and its gradient is 0: equal norms give no direction in
#: which to increase the variance, and 1 / var**2 would overflow.
LEAST_VARIANCE = 1e-12


class L1(Regularizer):
    """lambda sum |w|. With a threshold criterion, elements with |w| <= lambda become zero."""

    def __init__(self, strengths: Mapping[str, float], criterion: str | None = None) -> None:
        self.strengths = dict(strengths)
        self.criterion = criterion
        self.thresholds = criterion is not None
        self.targets = tuple(self.strengths)

    def loss(self, weights: Mapping[str, Tensor]) -> Tensor:
        terms = (
            strength * weights[name].abs().sum(dtype=at_least_single(weights[name].dtype))
            for name, strength in self.strengths.items()
        )
        return reduce(add, terms)

    def masks(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.criterion is None:
            return {}
        found = {name: weights[name].detach() for name in self.targets}
        return {name: (w.abs() > self.strengths[name]).to(w.dtype) for name, w in found.items()}


class GroupLasso(Regularizer):
    """lambda times the sum of the groups' L2 norms; with two kinds of groups (``Rows+Cols``) both sums are added.

    With a threshold criterion, groups whose greatest (``Max``) or mean (``Mean_Abs``) absolute value is at most lambda
    become zero.
    """

    def __init__(self, regimes: Mapping[str, tuple[float, str]], criterion: str | None = None) -> None:
        self.regimes = dict(regimes)
        self.criterion = criterion
        self.thresholds = criterion is not None
        self.targets = tuple(self.regimes)

    def loss(self, weights: Mapping[str, Tensor]) -> Tensor:
        terms = (
            strength * group_norms(weights[name], kind).sum()
            for name, (strength, group) in self.regimes.items()
            for kind in parts_of(group)
        )
        return reduce(add, terms)

    def masks(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.criterion is None:
            return {}
        return {
            name: group_mask(weights[name], group, strength, self.criterion)
            for name, (strength, group) in self.regimes.items()
        }


class GroupVariance(Regularizer):
    """lambda over the unbiased variance of the groups' L2 norms, clamped to at least `LEAST_VARIANCE`."""

    def __init__(self, regimes: Mapping[str, tuple[float, str]]) -> None:
        self.regimes = dict(regimes)
        self.targets = tuple(self.regimes)

    def loss(self, weights: Mapping[str, Tensor]) -> Tensor:
        terms = (
            strength / group_norms(weights[name], kind).var(unbiased=True).clamp(min=LEAST_VARIANCE)
            for name, (strength, kind) in self.regimes.items()
        )
        return reduce(add, terms)


def build_regularizer(name: str, settings: ComponentConfig, model: nn.Module) -> Regularizer:
    """Build the regularizer that the settings describe, for the parameters of this model.

    Args:
        name: of the instance in the schedule, for messages.
        settings: one of `trainables.compression.schedule.configs.REGULARIZERS`.
        model: as built; the settings' patterns are matched with its parameters' names without a leading ``module.``.

    Raises:
        UserError: a pattern matches no parameter, or a parameter does not have the requested groups.
    """
    if not isinstance(settings, (L1RegularizerConfig, GroupLassoRegularizerConfig, GroupVarianceRegularizerConfig)):
        raise TypeError(f"{type(settings).__name__} holds the settings of no regularizer")
    shapes = {plain_name(key): tuple(parameter.shape) for key, parameter in model.named_parameters()}
    try:
        regimes: dict[str, Any] = assigned(settings.reg_regims, list(shapes))
        if isinstance(settings, L1RegularizerConfig):
            return L1(regimes, settings.threshold_criteria)
        for parameter, (_, group) in regimes.items():
            check_groups(parameter, shapes[parameter], group)
        if isinstance(settings, GroupLassoRegularizerConfig):
            return GroupLasso(regimes, settings.threshold_criteria)
        for parameter, (_, group) in regimes.items():
            if group_count(shapes[parameter], group) < 2:
                raise UserError(
                    f"the variance of group {group} needs at least two groups, but {parameter} of shape "
                    f"{list(shapes[parameter])} has one"
                )
        return GroupVariance(regimes)
    except UserError as error:
        raise UserError(f"regularizer {name}: {error}") from None


# --- Builds the components and policies of a schedule for a model -----------------------------------------------------

#: Structures that each extension removes.
_REMOVES: dict[str, Kind] = {"FilterRemover": "filters", "ChannelRemover": "channels", "StructureRemover": "structures"}


class BuiltPolicy(NamedTuple):
    """A policy of a schedule, built for a model."""

    policy: Policy
    timing: Timing
    name: str | None = None
    """Name of its component in the scheduler's state; None without state."""
    component: Any = None
    """The component, if it has state."""


def model_facts(model: nn.Module) -> ModelFacts:
    """Return the facts of a model that a schedule's names are matched with."""
    return ModelFacts(
        parameters={name: tuple(p.shape) for name, p in parameters_as_built(model).items()},
        modules={name: type(module).__name__ for name, module in model.named_modules() if name},
    )


def build_policies(
    model: nn.Module,
    optimizer: Optimizer | None,
    schedule: Schedule,
    *,
    seed: int,
    compatible: bool,
    make_model: Callable[[], nn.Module] | None,
    base_lrs: Sequence[float] | None,
) -> list[BuiltPolicy]:
    """Build the components and policies of a schedule, in its order.

    Args: see `CompressionScheduler.from_schedule`.

    Raises:
        UserError: the model does not have a name, or a component does not fit the model.
    """
    schedule = resolve(schedule, model_facts(model), compatible=compatible).schedule
    built: dict[str, Any] = {}

    def once(name: str, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if name not in built:
            built[name] = make(*arguments, **named)
        return built[name]

    def build(planned: PlannedPolicy) -> BuiltPolicy:
        component, timing = schedule.component(planned), planned.timing
        name = f"{component.section}.{component.name}"
        settings: Any = component.settings
        if planned.kind == "pruner":
            args = planned.args if isinstance(planned.args, PrunerPolicyConfig) else PrunerPolicyConfig()
            if args.levels is not None:
                name = f"{name}@{planned.position}"  # its own levels require a separate pruner
                settings = with_levels(settings, args.levels)
            pruner = once(name, build_pruner, component.name, settings, model, seed=seed)
            return BuiltPolicy(PruningPolicy(pruner, args), timing, name, pruner)
        if planned.kind == "regularizer":
            regularizer = build_regularizer(component.name, settings, model)
            keep_mask = bool(getattr(planned.args, "keep_mask", False))
            return BuiltPolicy(RegularizationPolicy(regularizer, keep_mask=keep_mask), timing)
        if planned.kind == "quantizer":  # its state is part of the policy's state
            quantizing = once(name, lambda: QuantizationPolicy(build_quantizer(component.name, settings, model)))
            return BuiltPolicy(quantizing, timing)
        if planned.kind == "lr_scheduler":
            if optimizer is None:
                raise UserError("a schedule with lr_schedulers needs an optimizer, got none")
            arguments = dict(component.arguments)
            rates = once(name, build_lr_scheduler, component.class_name, arguments, optimizer, base_lrs=base_lrs)
            return BuiltPolicy(LRPolicy(rates), timing, name, rates)
        if planned.kind == "extension":
            check_installed()  # fail now instead of epochs later
            round_to = int(getattr(settings, "round_to", 1))
            return BuiltPolicy(ThinningPolicy(_REMOVES[component.class_name], round_to=round_to), timing)
        return BuiltPolicy(DistillationPolicy(lambda: _distillation(model, settings, make_model)), timing)

    return [build(planned) for planned in schedule.policies]


def with_levels(settings: Any, levels: Any) -> Any:
    """Return a level pruner's settings with the policy's own levels.

    Raises:
        UserError: the pruner has no levels.
    """
    there = getattr(settings, "levels", None)
    if there is None:
        raise UserError(f"levels are arguments for SparsityLevelParameterPruner, got them for {settings.class_}")
    new = levels if isinstance(levels, dict) else dict.fromkeys(there, levels)
    return settings.model_copy(update={"levels": new})


def _distillation(
    model: nn.Module, settings: KnowledgeDistillationConfig, make_model: Callable[[], nn.Module] | None
) -> KnowledgeDistillationPolicy:
    weights = DistillationLossWeights(settings.distill_weight, settings.student_weight, settings.teacher_weight)
    teacher = build_teacher(settings, model, make_model)
    return KnowledgeDistillationPolicy(model, teacher, settings.temperature, weights)
