"""Directions from straight-through estimators, by averaging, weighting, a proposal distribution, or NES.

Symbols: w all parameters that are trained, as one vector; L(w) the loss with plain sign activations; g_1..g_n sampled
gradients; t `trial_step`. The *effect* of a direction d is L(w) - L(w - t d / |d|), measured on the same batch with the
same random numbers.

- sign, stochastic_rounding, backward_noise: g_i is a backward pass in that mode, see
  `trainables.gradients.straight_through`.
- proposal: stochastic-rounding samples g_1..g_n define a Gaussian of their mean and covariance (deviations
  times `spread`); candidates are the mean and `candidates` draws from it, weighted by effect.
- nes: (1 / 2 n sigma) sum_i (L(w + sigma e_i) - L(w - sigma e_i)) e_i, e_i ~ N(0, I) (Wierstra et al. 2014, JMLR 15,
  with antithetic samples, Salimans et al. 2017, arXiv:1703.03864): an estimate of the gradient of E L(w + sigma e).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import DEFAULTS, STE_ESTIMATORS, STE_WEIGHTINGS
from trainables.gradients.flop_meter import FlopMeter
from trainables.gradients.gradient_method import Gradients, Loss, ModelLoss, check_option, norm_of, scalar
from trainables.gradients.straight_through import activation_mode
from trainables.gradskip.variables import is_number
from trainables.runtime.isolation import seed_generators

_DEFAULTS = DEFAULTS["straight_through"]


@dataclass(frozen=True, kw_only=True)
class StraightThroughSettings:
    """Settings of an estimator: `GradientFields` without their prefix has their meanings.

    There is 1 sample for sign, 2 at least for proposal. A single sample is never weighted, those of proposal always are
    by effect, those of nes never. UserError: a value out of range, or two that do not fit together.
    """

    estimator: str = _DEFAULTS["ste_estimator"]
    samples: int = _DEFAULTS["ste_samples"]
    weighting: str = _DEFAULTS["ste_weighting"]
    normalise: bool = _DEFAULTS["ste_normalised"]
    trial_step: float = _DEFAULTS["ste_trial_step"]
    candidates: int = _DEFAULTS["ste_candidates"]
    spread: float = _DEFAULTS["ste_spread"]
    sigma: float = _DEFAULTS["ste_sigma"]

    def __post_init__(self) -> None:
        if self.estimator not in STE_ESTIMATORS:
            raise unknown_name("straight-through estimator", str(self.estimator), STE_ESTIMATORS)
        if self.weighting not in STE_WEIGHTINGS:
            raise unknown_name("weighting of a straight-through estimator", str(self.weighting), STE_WEIGHTINGS)
        for name in ("samples", "candidates"):
            count = getattr(self, name)
            check_option(name, count, type(count) is int and count >= 1, "an integer >= 1")
        for name in ("trial_step", "spread", "sigma"):
            number = getattr(self, name)
            check_option(name, number, is_number(number) and number > 0, "a number above 0")
        estimator, samples = self.estimator, self.samples
        check_option("samples", samples, estimator != "sign" or samples == 1, "1 for sign, whose samples are equal")
        check_option("samples", samples, estimator != "proposal" or samples > 1, "at least 2 for proposal")
        is_possible = estimator != "nes" or self.weighting == "uniform"
        check_option("weighting", self.weighting, is_possible, "uniform for nes, which weights by losses itself")


@dataclass(frozen=True, kw_only=True)
class Direction:
    """A direction, and the passes that it cost."""

    gradient: Gradients
    """Estimate by parameter name; parameters that the loss does not use, or that are not trained, are left out."""
    forward_passes: int
    backward_passes: int


def straight_through_direction(
    loss: Loss,
    model: nn.Module,
    settings: StraightThroughSettings,
    seed: int,
    *,
    meter: FlopMeter | None = None,
    key: Hashable = (),
) -> Direction:
    """Return a direction, equal for equal seeds; model, gradients, buffers, modes and generators stay as they were.

    Args:
        loss: maps the model to a scalar, such as ``lambda m: F.cross_entropy(m(x), y)``; all of one batch.
        model: with `BinaryActivation` modules, unless the estimator is nes.
        settings: the estimator and its settings.
        seed: seed of all that is drawn, by the estimator and by layers such as dropout.
        meter: counts the FLOPs of the passes; None counts nothing.
        key: what the FLOPs depend on beside the model, such as the shapes of the batch.

    UserError: no binary activations, nothing to train, or a loss that is not a scalar.
    """
    search = _Search(loss, model, settings, seed, meter, key)
    with search.loss.evaluating():
        gradient = search.nes() if settings.estimator == "nes" else search.straight_through()
    if settings.normalise:
        length = norm_of(gradient.values())
        gradient = {name: part / length for name, part in gradient.items()} if length > 0 else gradient
    return Direction(gradient=gradient, forward_passes=search.forward_passes, backward_passes=search.backward_passes)


class _Search:
    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        settings: StraightThroughSettings,
        seed: int,
        meter: FlopMeter | None,
        key: Hashable,
    ) -> None:
        self.forward_passes = self.backward_passes = 0
        self._meter, self._key = meter, key
        self.loss = ModelLoss(loss, model)
        self._model, self._settings, self._seed = model, settings, seed
        self._mode = STE_ESTIMATORS[settings.estimator]
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise UserError("a direction needs a parameter with requires_grad, got a model that has none")

    def straight_through(self) -> Gradients:
        """Return the direction of all estimators but nes."""
        settings = self._settings
        seed_generators(self._seed, self.loss.device)
        samples = [self._sample() for _ in range(settings.samples)]
        weighted = settings.weighting == "effect" and len(samples) > 1
        if settings.estimator == "proposal":
            samples, weighted = self._proposed(samples), True
        if not weighted:
            return combined(samples, [1 / len(samples)] * len(samples))
        before = self._plain_loss({}, 0.0)
        effects = []
        for sample in samples:
            length = norm_of(sample.values())
            effects.append(before - self._plain_loss(sample, -settings.trial_step / length if length > 0 else 0.0))
        gains = [max(effect, 0.0) for effect in effects]  # without any, all count the same
        total = sum(gains)
        return combined(samples, [gain / total if total > 0 else 1 / len(gains) for gain in gains])

    def nes(self) -> Gradients:
        """Return the antithetic estimate."""
        settings = self._settings
        noise = torch.Generator().manual_seed(self._seed)
        total: Gradients = {}
        for _ in range(settings.samples):
            # On the CPU, so that a seed has the same meaning on every device.
            drawn = {
                name: torch.randn(p.shape, generator=noise, dtype=torch.float32).to(p)
                for name, p in self._parameters.items()
            }
            above, below = (self._plain_loss(drawn, sign * settings.sigma) for sign in (1, -1))
            slope = (above - below) / (2 * settings.sigma * settings.samples)
            total = combined([total, drawn], [1.0, slope])
        return total

    def _sample(self) -> Gradients:
        assert self._mode is not None
        with activation_mode(self._model, self._mode), torch.enable_grad():
            value = self._value({})
            if not value.requires_grad:
                raise UserError("the loss must depend on the model's parameters: return it as a tensor, not detached")
            with nullcontext() if self._meter is None else self._meter.backward(self._key):
                found = torch.autograd.grad(value, list(self._parameters.values()), allow_unused=True)
        self.backward_passes += 1
        return {name: part for name, part in zip(self._parameters, found, strict=True) if part is not None}

    def _proposed(self, samples: Sequence[Gradients]) -> list[Gradients]:
        """Return the mean of the samples, and draws from the Gaussian of their mean and covariance."""
        settings, count = self._settings, len(samples)
        noise = torch.Generator().manual_seed(self._seed)
        found = [combined(samples, [1 / count] * count)]
        for _ in range(settings.candidates):
            # sum_i z_i (g_i - mean) / sqrt(n - 1) has the samples' covariance; as weights of the samples themselves:
            z = torch.randn(count, generator=noise, dtype=torch.float64) * settings.spread / math.sqrt(count - 1)
            found.append(combined(samples, (z - z.mean() + 1 / count).tolist()))
        return found

    def _plain_loss(self, direction: Gradients, step: float) -> float:
        """Return L(w + step * direction), always with the same random numbers."""
        moved = {name: torch.add(self._parameters[name], part, alpha=step) for name, part in direction.items()}
        seed_generators(self._seed, self.loss.device)
        with nullcontext() if self._mode is None else activation_mode(self._model, "sign"):
            return float(self._value(moved))

    def _value(self, changed: Gradients) -> Tensor:
        self.forward_passes += 1
        with nullcontext() if self._meter is None else self._meter.forward(self._key):
            return scalar(self.loss.at(changed))


def combined(parts: Sequence[Gradients], weights: Sequence[float]) -> Gradients:
    """Return the weighted sum of gradients; a name that some of them lack counts as zero there."""
    total: Gradients = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, value in part.items():
            total[name] = total[name] + weight * value if name in total else weight * value
    return total
