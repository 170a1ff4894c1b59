"""Gradient estimators as methods of a trial."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainables.attachment import Attached, EstimateFlops, RunFacts
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradients.central_differences import check_changes_weights, check_epsilon, estimate, scaled_epsilon
from trainables.gradients.discrete_gradients import search
from trainables.gradients.fields import STE_ESTIMATORS, estimator_in, options_of, settings_of
from trainables.gradients.flop_meter import FlopMeter
from trainables.gradients.gradient_clustering import GradientClustering
from trainables.gradients.gradient_method import Draw, GradientMethod, Loss, matching_names
from trainables.gradients.importance_sampling import ImportanceSampling
from trainables.gradients.kfac import KFAC
from trainables.gradients.layer_signals import treatable_layers
from trainables.gradients.perturbations import Perturbations
from trainables.gradients.straight_through import binary_activations
from trainables.gradients.straight_through_directions import StraightThroughSettings, straight_through_direction
from trainables.gradients.svrg import SVRG
from trainables.gradients.zero_gradients import ZeroGradients
from trainables.gradskip import controller as gradskip
from trainables.gradskip.controller import WEIGHT_RULES, GradskipBeside
from trainables.runtime.isolation import captured_generators
from trainables.workloads.base import Batch, Samples
from trainables.workloads.batch_shapes import shapes_of
from trainables.workloads.sample_access import TensorSamples, reservoir
from trainables.workloads.seeded_loader import epoch_seed


class SwitchedOn(Attached):
    """Base of the estimators in trials: before ``gradient_start_itr`` a run is plain training."""

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        self.settings = settings_of(config)
        self._optimizer, self._run, self._seed = optimizer, run, config.seed
        self._start = int(self.settings["gradient_start_itr"])
        self._iteration = 0

    @property
    def is_on(self) -> bool:
        """Return whether the estimator gives the gradients of this step."""
        return self._iteration >= self._start

    def end_step(self) -> None:
        self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        return {"decision_state": self.decision_state(), "training_state": self.training_state()}

    def decision_state(self) -> dict[str, Any]:
        return {"iteration": self._iteration}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        self._iteration = int(decision_state["iteration"])


class AttachedEstimator(SwitchedOn):
    """An estimator of some parameters; a subclass gives them gradients, or changes them."""

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        super().__init__(optimizer, config, run)
        self._parameters = {
            name: run.model.get_parameter(name) for name in matching_names(run.model, self.settings["gradient_layers"])
        }
        self._meter = FlopMeter()

    def begin_step(self, epoch: int, minibatch: int) -> None:
        if self.is_on:
            self._require_gradients(False)

    def _require_gradients(self, required: bool) -> None:
        for parameter in self._parameters.values():
            parameter.requires_grad_(required)

    def stop_key(self) -> Hashable:
        return self.is_on

    def estimate(self, loss: Loss, batch: Batch) -> EstimateFlops | None:
        if not self.is_on:
            return None
        self.set_direction(loss, shapes_of(batch))
        return self._meter.take()

    def set_direction(self, loss: Loss, shapes: Hashable) -> None:
        """Set the gradients of the estimated parameters, or change these; count it in the meter."""
        raise NotImplementedError


class AttachedPerturbations(AttachedEstimator):
    """Central differences, or discrete gradient steps in place of the optimizer's."""

    _losses: Perturbations | None = None

    def set_direction(self, loss: Loss, shapes: Hashable) -> None:
        model, settings = self._run.model, self.settings
        losses = Perturbations(loss, model, meter=self._meter, key=shapes, like=self._losses)
        epsilon, stride, ratio = float(settings["gradient_epsilon"]), settings.get("discrete_stride"), 1.0
        if self._losses is None:
            if stride is None:
                check_epsilon(epsilon, model, self._parameters, losses.dtype)
            else:
                check_changes_weights("discrete_stride", stride, model, self._parameters)
        self._losses = losses
        if settings["gradient_epsilon_decays"]:
            ratio = float(self._optimizer.param_groups[0]["lr"]) / self._run.base_lrs[0]
        epsilon = scaled_epsilon(epsilon, ratio, next(iter(self._parameters.values())).dtype)
        if stride is None:
            for name, slopes in estimate(losses, self._parameters, epsilon).items():
                self._parameters[name].grad = slopes
        else:  # parameters without a gradient are left as they are by every optimizer
            epsilon = max(epsilon, stride)
            search(losses, [*self._parameters], epsilon, stride, settings["discrete_objective"]).apply(model)


class AttachedStraightThrough(AttachedEstimator):
    """Directions through binary activations."""

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        super().__init__(optimizer, config, run)
        self._estimator = StraightThroughSettings(**options_of("straight_through", self.settings, run.total_steps))
        if STE_ESTIMATORS[self._estimator.estimator] is not None:
            binary_activations(run.model)  # which it must have

    def set_direction(self, loss: Loss, shapes: Hashable) -> None:
        self._require_gradients(True)
        try:
            # One seed a step, so that a run goes on anywhere.
            seed = epoch_seed(self._iteration, self._seed)
            model, meter = self._run.model, self._meter
            found = straight_through_direction(loss, model, self._estimator, seed, meter=meter, key=shapes)
        finally:
            self._require_gradients(False)
        for name, parameter in self._parameters.items():
            parameter.grad = found.gradient.get(name)


_CLASSES: dict[str, type[GradientMethod]] = {
    method.name: method for method in (SVRG, KFAC, GradientClustering, ImportanceSampling, ZeroGradients)
}


class AttachedGradientMethod(SwitchedOn):
    """A gradient method attached to one training run.

    It is built in its first step, so that nothing is spent before. Data without numbers are kept in a reservoir, one
    epoch's samples at most, which is filled anew before a method passes over all samples.
    """

    def __init__(self, optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> None:
        super().__init__(optimizer, config, run)
        self._name = str(estimator_in(config.method))
        self._class = _CLASSES[self._name]
        self._epoch = self._filled = 0
        self._method: GradientMethod | None = None
        self._draw: Draw | None = None
        self._rows: AbstractContextManager[Any] = nullcontext()
        if config.forward_cache_mb and self._class.chooses_samples:
            raise UserError(
                f"method {self._name} chooses the samples of a step, which a forward cache would not know, got "
                f"forward_cache_mb={config.forward_cache_mb}: leave it out"
            )
        check_model(self._name, run.model)

    def gradient_method(self) -> GradientMethod | None:
        return self._method

    def begin_step(self, epoch: int, minibatch: int) -> None:
        self._epoch = epoch

    def batch(self, batch: Batch) -> Batch:
        self._draw = None
        if not self.is_on:
            return batch
        method = self._method or self._built(self._epoch, len(batch[0]))
        method.iteration = self._iteration
        if self._run.samples is None and method.is_about_to_pass and self._filled != self._epoch:
            method.data = self._kept(self._epoch)
        method.refresh()
        if self._class.chooses_samples:
            usual, method.batch_size = method.batch_size, len(batch[0])
            self._draw = method.draw(method.generator())
            method.batch_size = usual
        else:
            self._draw = Draw(batch=batch, randomness=captured_generators(method.device))
        return self._draw.batch

    def forward_pass(self) -> AbstractContextManager[Any]:
        if self._draw is not None and self._method is not None:
            self._rows = self._method.rows(self._draw)
        return self._rows

    def estimate(self, loss: Loss, batch: Batch) -> EstimateFlops | None:
        method, draw = self._method, self._draw
        if draw is None or method is None:
            return None
        method.observe(draw, self._rows)
        if type(method).adjust is not GradientMethod.adjust:
            method.set_gradients(method.adjust(method.gradients(), draw))
        self._draw, self._rows = None, nullcontext()
        # Every parameter that trains takes part in the loop's own backward pass.
        return replace(method.meter.take(), all_trained=False)

    def _built(self, epoch: int, batch_size: int) -> GradientMethod:
        assert self._run.loss is not None, "a run of a workload has its loss"
        data: Samples = self._kept(epoch) if self._run.samples is None else self._run.samples
        options = options_of(self._name, self.settings, self._run.total_steps)
        if "clusters" in options:  # at most each sample is a cluster of its own
            options["clusters"] = min(options["clusters"], data.count)
        batch_size = min(batch_size, data.count)
        self._method = self._class(
            self._run.model, self._run.loss, data, self._optimizer, batch_size=batch_size, seed=self._seed, **options
        )
        return self._method

    def _kept(self, epoch: int) -> TensorSamples:
        assert self._run.epoch_batches is not None
        self._filled = epoch
        most = int(self.settings.get("kept_samples", 1))  # the others only train the loop's own batches
        return reservoir(self._run.epoch_batches(epoch), most=most, seed=self._seed)

    def measured(self) -> dict[str, Any]:
        if isinstance(self._method, ImportanceSampling):
            return {"effective_samples": self._method.effective_share()}
        if isinstance(self._method, GradientClustering) and self._iteration >= self._run.total_steps:
            self._run.model.train()
            return {"gradient_clusters": json.dumps([asdict(cluster) for cluster in self._method.inspect()])}
        return {}

    def training_state(self) -> dict[str, Any]:
        if self._method is None:
            return {}
        state = {"state": self._method.state_dict(), "batch_size": self._method.batch_size, "epoch": self._filled}
        return {"gradient_method": state}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        super().resume(decision_state, training_state)
        kept = training_state.get("gradient_method")
        if kept is not None:
            self._built(int(kept["epoch"]), int(kept["batch_size"])).load_state_dict(kept["state"])


def check_model(method: str, model: nn.Module, layers: Iterable[str] | None = None) -> None:
    """Raise UserError for a model that no configuration of an estimator can train.

    ``layers`` are names or patterns of the estimated parameters, where they are fixed.
    """
    if method in ("kfac", "gradient_clustering"):
        treatable_layers(model, method)
    if method not in _CLASSES:
        matching_names(model, layers)
    if method == "straight_through":
        binary_activations(model)


_ATTACHED: dict[str, type[SwitchedOn]] = {
    "central_difference": AttachedPerturbations,
    "discrete_gradient": AttachedPerturbations,
    "straight_through": AttachedStraightThrough,
    **dict.fromkeys(_CLASSES, AttachedGradientMethod),
}


def attach(optimizer: Optimizer, config: TrialConfig, run: RunFacts) -> Attached:
    """Attach the configuration's estimator, beside Gradient-Skip where it is joined with it.

    UserError: names that the model does not have, layers that the estimator cannot treat, a forward cache beside a
    method that chooses samples, or a rule of Gradient-Skip that looks at gradients.
    """
    mode = config.gradskip_settings().mode
    if config.skips_gradients and mode not in WEIGHT_RULES:
        raise UserError(
            f"CAC_RULE={mode} can't be combined with zero gradients: its signal would depend on which samples are left "
            "out in the same step; use CAC_RULE=variance or manual stops"
        )
    estimator = _ATTACHED[str(estimator_in(config.method))](optimizer, config, run)
    if not config.skips_gradients:
        return estimator
    return GradskipBeside(gradskip.attach(optimizer, config, run), estimator, "gradients")
