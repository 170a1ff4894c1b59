"""Policies: objects that the scheduler calls during training, one class for each kind of component.

A policy is called in the epochs in which it is active, and in earlier epochs in which its component observes training.
The order in an epoch: `epoch_begin`, [`minibatch_begin`, forward, `before_backward`, backward, the optimizer's step,
`after_step`, `minibatch_end`] for each batch, `epoch_end` after the evaluation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from trainables.compression.distillation import DistillationLossWeights, KnowledgeDistillationPolicy, build_teacher
from trainables.compression.lr_schedulers import ScheduleLR, build_lr_scheduler
from trainables.compression.masks import Masks, parameters_as_built
from trainables.compression.model_copies import evaluating
from trainables.compression.pruners import Pruner, build_pruner
from trainables.compression.quantizers import Quantizer, build_quantizer
from trainables.compression.regularizers import Regularizer, build_regularizer
from trainables.compression.schedule import ModelFacts, PrunerPolicyConfig, Schedule
from trainables.compression.schedule.configs import PRUNERS, QUANTIZERS, REGULARIZERS, KnowledgeDistillationConfig
from trainables.compression.schedule.document import Findings, plain
from trainables.compression.schedule.names import plain_name
from trainables.compression.schedule.reading import validated
from trainables.compression.schedule.timing import Moment, Timing
from trainables.compression.thinning import Arguments, Kind, check_installed, thin
from trainables.errors import UserError, check_model_first


@dataclass(kw_only=True)
class Training:
    """Objects of a training run that policies work on."""

    model: nn.Module
    masks: Masks
    optimizer: Optimizer | None = None
    model_changed: Callable[[], None] = lambda: None  # called after modules or shapes have changed
    example: Callable[[nn.Module], object] | None = None  # runs a model on a batch
    removed: list[Any] = field(default_factory=list)  # records of removed structures, one per thinning, in their order


class Policy:
    """Base of all policies, which apply a component in their active epochs; this class does nothing."""

    epochs_before: int = 0  # number of epochs before the first active one in which `look` is called

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
            if self._batchnorms is None:
                if training.example is None:
                    raise UserError(
                        "fold_batchnorm must see the model run: give the scheduler example=, a function that runs a "
                        "model on a batch"
                    )
                self._batchnorms = batchnorms_after(training.model, training.example)
            weights = folded(weights, training.model, self._batchnorms)
        current = {name: mask for name in there if (mask := masks.get(name)) is not None}
        for name, mask in self.pruner.masks(weights, current, moment).items():
            masks.set(name, mask)

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
        if self.regularizer.criterion is None:
            return
        weights = {}
        for name, weight in training.masks.weights(self.regularizer.targets).items():
            mask = training.masks.get(name)  # pruned elements count as zero
            weights[name] = weight.detach() if mask is None else weight.detach() * mask
        last = moment.epoch == moment.timing.last_epoch and moment.minibatch == moment.minibatches_per_epoch - 1
        keep = last and self.keep_mask
        for name, mask in self.regularizer.masks(weights).items():
            there = training.masks.get(name)
            mask = mask * there if keep and there is not None else mask
            training.masks.set(name, mask, is_regularization_mask=not keep)


class QuantizationPolicy(Policy):
    """Prepare the model in the first active epoch; the model then stays quantized."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.prepared = False

    def prepare(self, training: Training) -> None:
        """Change the model's modules; later calls do nothing."""
        if not self.prepared:
            self.quantizer.prepare(training.model, training.optimizer)
            self.prepared = True
            training.masks.rebind(training.model)
            training.model_changed()

    def epoch_begin(self, training: Training, moment: Moment) -> None:
        self.prepare(training)

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        if moment.minibatch == moment.minibatches_per_epoch - 1:
            self.quantizer.finish_epoch(training.model)

    def state_dict(self) -> dict[str, Any]:
        return {"prepared": self.prepared}


class LRPolicy(Policy):
    """Set the learning rates for the next epoch at the end of active epochs, and those of epoch 0 at its start.

    The first rate of warm-up schedules (LinearLR, ConstantLR, OneCycleLR, CyclicLR) is not the base rate.
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

    def __init__(self, kind: Kind, *, round_to: int = 1) -> None:
        self.kind = kind
        self.round_to = round_to
        self._inputs: Arguments | None = None
        self._handle: RemovableHandle | None = None

    def look(self, training: Training) -> None:
        def keep(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if model.training:
                self._inputs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))

        self._handle = training.model.register_forward_pre_hook(keep, with_kwargs=True)

    def look_away(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def minibatch_end(self, training: Training, moment: Moment) -> None:
        if moment.minibatch < moment.minibatches_per_epoch - 1 or self._inputs is None:
            return
        args, kwargs = self._inputs
        found = thin(training.model, args, training.optimizer, kwargs=kwargs, kind=self.kind, round_to=self.round_to)
        if found.record:
            if not found.exact:
                warnings.warn(
                    "thinning changed what the model computes: outputs differ by up to "
                    f"{found.difference:.3g}, for what follows a removed filter (a batch norm's shift, a bias) was "
                    "not zero",
                    stacklevel=2,
                )
            training.removed.append(found.record)
            training.masks.crop(found.removed)
            training.masks.rebind(training.model)
            training.model_changed()


class DistillationPolicy(Policy):
    """Train the model with a teacher in active epochs."""

    def __init__(self, make: Callable[[], KnowledgeDistillationPolicy]) -> None:
        self._make = make
        self.distillation: KnowledgeDistillationPolicy | None = None
        """None before the first active epoch, when the teacher is built."""

    def look(self, training: Training) -> None:
        self.distillation = self.distillation or self._make()
        self.distillation.attach()

    def look_away(self) -> None:
        if self.distillation is not None:
            self.distillation.detach()

    def before_backward(self, training: Training, loss: Tensor) -> Tensor:
        assert self.distillation is not None
        return self.distillation.before_backward(loss)


# --- Convolution weights with the following batch norm folded in ------------------------------------------------------
# W a convolution's weight, (F, C, ...); gamma, running variance v and epsilon of the batch norm that reads its output,
# (F,). Inference computes with W gamma / sqrt(v + eps) (Krishnamoorthi 2018, eq. 20), so magnitude criteria rank these
# folded weights (policy argument ``fold_batchnorm``).


def batchnorms_after(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, str]:
    """Return the names of convolutions mapped to those of the batch norms that directly read their outputs.

    Runs one forward pass in evaluation mode without gradients; modes and statistics are left as they were.
    """
    names = {module: plain_name(name) for name, module in model.named_modules()}
    outputs: dict[int, tuple[str, Tensor]] = {}  # with the tensor, so that no later one gets the same id
    found: dict[str, str] = {}

    def convolved(module: nn.Module, inputs: object, output: Tensor) -> None:
        outputs[id(output)] = (names[module], output)

    def read(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and id(inputs[0]) in outputs:
            found[outputs[id(inputs[0])][0]] = names[module]

    with ExitStack() as hooks, evaluating(model):
        for module in names:
            if isinstance(module, _BatchNorm):
                hooks.enter_context(module.register_forward_pre_hook(read))
            elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                hooks.enter_context(module.register_forward_hook(convolved))
        run(model)
    return found


def folded(weights: Mapping[str, Tensor], model: nn.Module, batchnorms: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the weights with each filter multiplied by gamma / sqrt(v + eps) where a batch norm follows.

    Batch norms without running statistics cannot be folded in inference and are skipped.
    """
    modules = {plain_name(name): module for name, module in model.named_modules()}
    result = dict(weights)
    for convolution, batchnorm in batchnorms.items():
        weight = weights.get(f"{convolution}.weight")
        module = modules[batchnorm]
        assert isinstance(module, _BatchNorm)
        if weight is None or module.running_var is None:
            continue
        norm: Any = (module.running_mean, module.running_var, module.eps, module.weight, module.bias)
        result[f"{convolution}.weight"] = fuse_conv_bn_weights(weight, None, *norm)[0].detach()
    return result


def constructor(class_name: str) -> Callable[..., Pruner | Quantizer | Regularizer]:
    """Return what builds a component of a class: called with a model, ``name``, ``seed``, and the class's arguments.

    As in ``SensitivityPruner(model, sensitivities={"conv1.weight": 0.5})``. The result is for
    `CompressionScheduler.add_policy`. ScheduleError: an argument is unknown, missing or out of range.
    """

    def build(model: nn.Module, *, name: str = class_name, seed: int = 0, **arguments: Any) -> Any:
        check_model_first(model, f"{class_name}(model, ...)")
        findings = Findings(f"{class_name}()", {})
        settings: Any = validated({**PRUNERS, **QUANTIZERS, **REGULARIZERS}[class_name], plain(arguments), (), findings)
        findings.raise_or_warn()
        if class_name in PRUNERS:
            return build_pruner(name, settings, model, seed=seed)
        if class_name in QUANTIZERS:
            return build_quantizer(name, settings, model)
        return build_regularizer(name, settings, model)

    build.__name__ = build.__qualname__ = class_name
    return build


#: Structures that each extension removes.
_REMOVES: dict[str, Kind] = {"FilterRemover": "filters", "ChannelRemover": "channels", "StructureRemover": "structures"}


@dataclass(kw_only=True)
class Scheduled:
    """A policy and its timing."""

    policy: Policy
    timing: Timing
    component: str | None = None  # name of its component in the scheduler's state; None without state
    is_looking: bool = False  # true if its component currently observes training
    has_acted: bool = False  # true if it was active, or its component has observed training, in any epoch so far

    def looks_in(self, epoch: int) -> bool:
        """Return whether its component observes training in an epoch."""
        if isinstance(self.policy, DistillationPolicy):
            return self.timing.is_active(epoch)
        begin = max(0, self.timing.starting_epoch - self.policy.epochs_before)
        return begin <= epoch <= self.timing.last_epoch


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
    make_model: Callable[[], nn.Module] | None,
    base_lrs: Sequence[float] | None,
) -> tuple[list[Scheduled], dict[str, Any]]:
    """Build the policies of a resolved schedule, in its order, and the components with state, by name.

    The other arguments are those of `CompressionScheduler`. UserError if a component does not fit the model.
    """
    components: dict[str, Any] = {}
    quantization: QuantizationPolicy | None = None  # one for all policies of the one quantizer, with its state
    policies = []
    for planned in schedule.policies:
        component = schedule.component(planned)
        settings: Any = component.settings
        name = f"{component.section}.{component.name}"
        policy: Policy
        if planned.kind == "pruner":
            args: Any = planned.args or PrunerPolicyConfig()
            if args.levels is not None and hasattr(settings, "levels"):
                name = f"{name}@{planned.position}"  # its own levels require a separate pruner
                own = args.levels if isinstance(args.levels, dict) else dict.fromkeys(settings.levels, args.levels)
                settings = settings.model_copy(update={"levels": own})
            if name not in components:
                components[name] = build_pruner(component.name, settings, model, seed=seed)
            policy = PruningPolicy(components[name], args)
        elif planned.kind == "lr_scheduler":
            if optimizer is None:
                raise UserError("a schedule with lr_schedulers needs an optimizer, got none")
            if name not in components:
                kind, arguments = component.class_name, component.arguments
                components[name] = build_lr_scheduler(kind, arguments, optimizer, base_lrs=base_lrs)
            policy = LRPolicy(components[name])
        elif planned.kind == "regularizer":
            regularizer = build_regularizer(component.name, settings, model)
            policy = RegularizationPolicy(regularizer, keep_mask=getattr(planned.args, "keep_mask", False))
        elif planned.kind == "quantizer":
            quantization = quantization or QuantizationPolicy(build_quantizer(component.name, settings, model))
            policy = quantization
        elif planned.kind == "extension":
            check_installed()  # fail now instead of epochs later
            policy = ThinningPolicy(_REMOVES[component.class_name], round_to=settings.round_to)
        else:
            policy = DistillationPolicy(partial(_distillation, model, settings, make_model))
        policies.append(Scheduled(policy=policy, timing=planned.timing, component=name if name in components else None))
    return policies, components


def _distillation(
    model: nn.Module, settings: KnowledgeDistillationConfig, make_model: Callable[[], nn.Module] | None
) -> KnowledgeDistillationPolicy:
    weights = DistillationLossWeights(settings.distill_weight, settings.student_weight, settings.teacher_weight)
    teacher = build_teacher(settings, model, make_model)
    return KnowledgeDistillationPolicy(model, teacher, settings.temperature, weights)
