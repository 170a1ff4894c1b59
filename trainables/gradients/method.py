"""Gradient estimators as methods of a trial."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainables.attachment import EstimateFlops, RunFacts
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradients import variance_trial
from trainables.gradients.central_differences import check_changes_weights, check_epsilon, estimate, scaled_epsilon
from trainables.gradients.discrete_gradients import search
from trainables.gradients.fields import STE_ESTIMATORS, VARIANCE_METHODS
from trainables.gradients.gradient_method import ModelLoss, matching_names
from trainables.gradients.perturbations import Perturbations
from trainables.gradients.straight_through import binary_activations
from trainables.gradients.straight_through_directions import (
    StraightThroughSettings,
    SwitchedOn,
    straight_through_direction,
)
from trainables.gradskip import controller as gradskip
from trainables.gradskip.controller import WEIGHT_RULES, GradskipBeside
from trainables.runtime.flops import flop_counter
from trainables.runtime.isolation import kept_generators
from trainables.workloads.base import Batch, Workload
from trainables.workloads.batch_shapes import shapes_of
from trainables.workloads.seeded_loader import epoch_seed


class AttachedEstimator(SwitchedOn):
    """An estimator attached to one training run; a subclass a method.

    From its first iteration on, the estimated parameters take no part in the backward pass.
    """

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        super().__init__(config)
        self._optimizer = optimizer
        self._run = run
        self._names = matching_names(run.model, self.settings["gradient_layers"])
        self._parameters = dict(run.model.named_parameters())

    def begin_step(self, epoch: int, minibatch: int) -> None:
        if self.is_on:
            self._leave_backward_pass()

    def _leave_backward_pass(self) -> None:
        for name in self._names:
            self._parameters[name].requires_grad_(False)

    def stop_key(self) -> Hashable:
        return self.is_on

    def estimate(self, loss: Callable[[nn.Module], Tensor], batch: Batch) -> EstimateFlops | None:
        return self.direction(loss, shapes_of(batch)) if self.is_on else None

    def direction(self, loss: Callable[[nn.Module], Tensor], shapes: Hashable) -> EstimateFlops:
        """Set the gradients of the estimated parameters, or change these, and return what that executed."""
        raise NotImplementedError

    def epsilon(self) -> float:
        """Return epsilon in this step."""
        epsilon = float(self.settings["gradient_epsilon"])
        ratio = 1.0
        if self.settings["gradient_epsilon_decays"]:
            ratio = float(self._optimizer.param_groups[0]["lr"]) / self._run.base_lrs[0]
        return scaled_epsilon(epsilon, ratio, self._parameters[self._names[0]].dtype)


class AttachedPerturbations(AttachedEstimator):
    """An estimator that evaluates the loss under changes of single weights."""

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        super().__init__(optimizer, config, run)
        self._losses: Perturbations | None = None
        self._flop_counts: dict[Hashable, int] = {}

    def direction(self, loss: Callable[[nn.Module], Tensor], shapes: Hashable) -> EstimateFlops:
        losses = Perturbations(loss, self._run.model, flop_counts=self._flop_counts, key=shapes, like=self._losses)
        if self._losses is None:
            self.check(losses)
        self._losses = losses
        self.use(losses)
        return EstimateFlops(forward_flops=losses.flops)

    def check(self, losses: Perturbations) -> None:
        """Raise UserError in the first step for settings that change no weight."""
        raise NotImplementedError

    def use(self, losses: Perturbations) -> None:
        """Set the gradients of the estimated parameters, or change these."""
        raise NotImplementedError


class AttachedCentralDifference(AttachedPerturbations):
    """Central differences in place of the gradients."""

    def check(self, losses: Perturbations) -> None:
        check_epsilon(self.settings["gradient_epsilon"], self._run.model, self._names, losses.dtype)

    def use(self, losses: Perturbations) -> None:
        for name, slopes in estimate(losses, self._names, self.epsilon()).items():
            self._parameters[name].grad = slopes


class AttachedDiscreteGradient(AttachedPerturbations):
    """Discrete gradient steps in place of the optimizer's; epsilon is the length that a step may have."""

    def check(self, losses: Perturbations) -> None:
        check_changes_weights("discrete_stride", self._stride, self._run.model, self._names)

    def use(self, losses: Perturbations) -> None:
        epsilon = max(self.epsilon(), self._stride)
        found = search(losses, self._names, epsilon, self._stride, objective=self.settings["discrete_objective"])
        # Parameters without a gradient are left as they are by every optimizer.
        found.apply(self._run.model)

    @property
    def _stride(self) -> float:
        return float(self.settings["discrete_stride"])


class AttachedStraightThrough(AttachedEstimator):
    """Directions through binary activations."""

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        super().__init__(optimizer, config, run)
        self._seed = config.seed
        self._passes: dict[Hashable, tuple[int, int]] = {}  # FLOPs of a forward and a backward pass, by shapes
        own = {name.removeprefix("ste_"): value for name, value in self.settings.items() if name.startswith("ste_")}
        own["normalise"] = own.pop("normalised")
        self._estimator = StraightThroughSettings(**own)
        if STE_ESTIMATORS[self._estimator.estimator] is not None:
            binary_activations(run.model)  # which it must have

    def direction(self, loss: Callable[[nn.Module], Tensor], shapes: Hashable) -> EstimateFlops:
        for name in self._names:
            self._parameters[name].requires_grad_(True)
        try:
            with ModelLoss(loss, self._run.model).evaluating(), torch.enable_grad():
                if shapes not in self._passes:
                    self._passes[shapes] = self._count(loss)
                # One seed a step, so that a run goes on anywhere.
                seed = epoch_seed(self._iteration, self._seed)
                found = straight_through_direction(loss, self._run.model, self._estimator, seed)
        finally:
            self._leave_backward_pass()
        for name in self._names:
            self._parameters[name].grad = found.gradient.get(name)
        forward, backward = self._passes[shapes]
        return EstimateFlops(
            forward_flops=forward * found.forward_passes, backward_flops=backward * found.backward_passes
        )

    def _count(self, loss: Callable[[nn.Module], Tensor]) -> tuple[int, int]:
        """Return the FLOPs of a forward and of a backward pass."""
        forward, backward = flop_counter(), flop_counter()
        trained = [parameter for parameter in self._run.model.parameters() if parameter.requires_grad]
        with kept_generators([trained[0].device]):
            with forward:
                value = loss(self._run.model)
            with backward:
                torch.autograd.grad(value, trained, allow_unused=True)
        return int(forward.get_total_flops()), int(backward.get_total_flops())


_ATTACHED: dict[str, type[AttachedEstimator]] = {
    "central_difference": AttachedCentralDifference,
    "discrete_gradient": AttachedDiscreteGradient,
    "straight_through": AttachedStraightThrough,
}


def check_model(method: str, model: nn.Module, layers: Iterable[str] | None = None) -> None:
    """Raise UserError for a model that no configuration of the method can train.

    Args:
        method: an estimator.
        model: to be trained.
        layers: names or patterns of the estimated parameters, where they are fixed.
    """
    if method in VARIANCE_METHODS:
        variance_trial.check_model(method, model)
        return
    matching_names(model, layers)
    if method == "straight_through":
        binary_activations(model)


def check_run(method: str, workload: Workload, model: nn.Module, layers: Iterable[str] | None = None) -> None:
    """Check a model, once before it is trained, and warn of layers or samples that the method can't take whole.

    Raises:
        UserError: `check_model`.
    """
    check_model(method, model, layers)
    if method in VARIANCE_METHODS:
        variance_trial.warn_of_run(method, workload.samples())


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> AttachedEstimator:
    """Attach the configuration's estimator.

    Raises:
        UserError: names that the model does not have, or layers that the estimator cannot treat.
    """
    return _ATTACHED[config.method](optimizer, config, run)


# --- Gradient-Skip while samples with nearly no loss gradient are left out of the backward pass -----------------------


def attach_with_gradskip(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> GradskipBeside:
    """Attach both methods.

    Raises:
        UserError: Gradient-Skip's rule looks at gradients.
    """
    mode = config.gradskip_settings().mode
    if mode not in WEIGHT_RULES:
        raise UserError(
            f"CAC_RULE={mode} can't be combined with zero gradients: its signal would depend on which samples are left "
            "out in the same step; use CAC_RULE=variance or manual stops"
        )
    other = variance_trial.attach(optimizer, config, run)
    return GradskipBeside(gradskip.attach(optimizer, config, run), other, "gradients")
