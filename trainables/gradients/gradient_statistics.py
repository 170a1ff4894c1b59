"""Statistics of gradient estimators in the course of a training, which they do not disturb by a bit.

Symbols: T gradients of a measurement; g_j an element; m_j its mean and V_j its unbiased variance over the T (1 / (T -
1)); P elements of a layer or of all.

Source: Faghri et al., arXiv:2007.04532, 2020, section 4. Otherwise than in its code, one pool of T gradients gives both
mean and variance (two pools of T overestimate the variance by 1 + 1 / T), and nothing is added to small squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainables.gradients.flop_meter import FlopMeter
from trainables.gradients.gradient_method import GradientMethod, check_interval, check_option
from trainables.workloads.base import Batch
from trainables.workloads.seeded_loader import epoch_seed


@dataclass(frozen=True, kw_only=True)
class GradientMoments:
    """Statistics of a gradient estimator, of one parameter or of all."""

    mean: float  # mean of the m_j
    norm: float  # norm of the mean gradient, sqrt(sum_j m_j^2)
    average_variance: float  # mean of the V_j
    normalised_variance: float
    """Mean of V_j / E[g_j^2] over the elements that are not always zero; E[g_j^2] is not centred. NaN if all are."""
    snr: float  # signal to noise: (sum_j m_j^2 - V_j / T) / sum_j V_j, whose numerator is unbiased and may be below 0
    bias: float  # norm of the difference of the mean gradient and the reference's
    bias_noise: float  # about the value of `bias` if there were none: the root of the summed variances of both means


class RunningMoments:
    """Accumulate mean and squared deviations; scale-free (Welford, 1962), without waiting for the device."""

    def __init__(self) -> None:
        self.count = 0  # T so far
        self.mean: dict[str, Tensor] = {}  # m, by parameter
        self._deviations: dict[str, Tensor] = {}

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add one gradient, by parameter."""
        self.count += 1
        given = (gradient.detach() for gradient in gradients.values())
        new = [gradient.float() if gradient.dtype.itemsize < 4 else gradient for gradient in given]
        if not self.mean:
            self.mean = {name: value.clone() for name, value in zip(gradients, new, strict=True)}
            self._deviations = {name: torch.zeros_like(value) for name, value in self.mean.items()}
            return
        means = list(self.mean.values())
        before = torch._foreach_sub(new, means)
        torch._foreach_add_(means, before, alpha=1 / self.count)
        after = torch._foreach_sub(new, means)
        torch._foreach_addcmul_(list(self._deviations.values()), list(before), list(after))

    def variances(self) -> dict[str, Tensor]:
        """Return V, by parameter; needs T >= 2."""
        return {name: value / (self.count - 1) for name, value in self._deviations.items()}


def moments_of(estimator: RunningMoments, reference: RunningMoments | None = None) -> dict[str, GradientMoments]:
    """Return the statistics of T >= 2 gradients by parameter, and of all together under the name ``""``.

    The bias is relative to the reference's mean, its own if there is none.
    """
    count = estimator.count
    reference = reference or estimator
    variances = estimator.variances()
    others = {} if reference is estimator else reference.variances()
    sums: list[Tensor] = []
    for name, value in estimator.mean.items():
        mean, variance = value.double(), variances[name].double()
        squares = mean.square() + variance * ((count - 1) / count)
        some = squares > 0
        noise = variance.sum() / count
        if name in others:
            noise = noise + others[name].double().sum() / reference.count
        sums.append(torch.stack([
            mean.sum(), mean.square().sum(), variance.sum(), torch.tensor(float(mean.numel()), device=mean.device),
            (variance / squares.where(some, torch.ones_like(squares))).sum(), some.sum().double(),
            (mean - reference.mean[name].double()).square().sum(), noise,
        ]))  # fmt: skip
    table = torch.stack(sums).cpu()  # the only wait for the device
    rows = {**dict(zip(estimator.mean, table, strict=True)), "": table.sum(0)}
    return {name: _moments(row.tolist(), count) for name, row in rows.items()}


def _moments(row: list[float], count: int) -> GradientMoments:
    total, squares, variance, elements, normalised, some, bias, noise = row
    return GradientMoments(
        mean=total / elements,
        norm=squares**0.5,
        average_variance=variance / elements,
        normalised_variance=normalised / some if some else float("nan"),
        snr=(squares - variance / count) / variance if variance else float("inf") if squares else float("nan"),
        bias=bias**0.5,
        bias_noise=noise**0.5,
    )


@dataclass(frozen=True, kw_only=True)
class GradientMeasurement:
    """Statistics of one estimator at one step."""

    step: int  # steps before
    estimator: str  # name of the method; ``sgd`` for batches drawn uniformly
    layers: dict[str, GradientMoments]  # by parameter
    total: GradientMoments  # of all parameters together
    forward_flops: int  # FLOPs of forward passes that the measurement executed for this estimator
    backward_flops: int  # FLOPs of backward passes, and of what turns gradients into the estimate
    gradient_evaluations: float  # both in gradients of a batch of SGD's


class GradientStatistics:
    """Measure estimators at equal distances of a training.

    Each measurement takes T gradients of SGD and of each other estimator at the model's current weights. Weights,
    buffers, gradients, every random generator, the methods' counters and the loader's position are left bit for bit as
    they were. A measured estimator is the one of the method's ``gradient``, before momentum and learning rates.

    Args:
        model: in the mode in which it is trained.
        data: what `samples_of` takes.
        measurements: how many there are in a training, >= 1, the first at step 0.
        samples: T, >= 2.
        loss: (model, batch) -> mean loss.
        total_steps: steps of the training; None: every call of `measure` measures.
        batch_size: samples of a batch; None: the data's own.
        seed: of the measured batches.

    UserError: an option out of range, or data without numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        measurements: int = 20,
        samples: int = 50,
        *,
        loss: Callable[[nn.Module, Batch], Tensor],
        total_steps: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        check_interval("measurements", measurements)
        check_option("samples", samples, samples >= 2, "an integer >= 2, since one gradient has no variance")
        self.sgd = GradientMethod(model, loss, data, batch_size=batch_size, seed=seed)
        """The estimator that others are compared with."""
        self.measurements, self.samples = measurements, samples
        self.total_steps, self._seed = total_steps, seed
        self.history: list[GradientMeasurement] = []  # all measurements so far

    def is_due(self, step: int) -> bool:
        """Return whether a training with ``total_steps`` is measured before this step, from 0."""
        if self.total_steps is None:
            return True
        count = min(self.measurements, self.total_steps)
        # Step i T // n of T steps is the i-th of n measurements.
        number = -(-step * count // self.total_steps)
        return number < count and number * self.total_steps // count == step

    def measure(self, step: int, *methods: GradientMethod) -> list[GradientMeasurement]:
        """Measure SGD and these methods of its model if the step, from 0, is due; return that, SGD's first."""
        if not self.is_due(step):
            return []
        sgd, spent = self._sampled(self.sgd, step)
        unit = max(1, spent.forward_flops + spent.backward_flops) / self.samples
        found = []
        for name, sampled, cost in (
            ("sgd", sgd, spent), *((method.name, *self._sampled(method, step)) for method in methods)
        ):  # fmt: skip
            moments = moments_of(sampled, sgd)
            flops = {"forward_flops": cost.forward_flops, "backward_flops": cost.backward_flops}
            evaluations = sum(flops.values()) / unit
            total = moments.pop("")
            found.append(
                GradientMeasurement(
                    step=step, estimator=name, total=total, layers=moments, gradient_evaluations=evaluations, **flops
                )
            )
        self.history += found
        return found

    def _sampled(self, method: GradientMethod, step: int) -> tuple[RunningMoments, FlopMeter]:
        moments = RunningMoments()
        generator = torch.Generator().manual_seed(epoch_seed(step, self._seed + 1))
        # All others draw from the same data as SGD.
        draws = method if method.chooses_samples else self.sgd
        with method.meter.apart() as spent:
            for _ in range(self.samples):
                moments.add(method.gradient(draws.draw(generator)))
        return moments, spent

    def rows(self) -> list[dict[str, Any]]:
        """Return the history as rows of a table: step, estimator, layer (empty for all) and the statistics."""
        return [
            {"step": found.step, "estimator": found.estimator, "layer": layer, **asdict(moments)}
            for found in self.history
            for layer, moments in {"": found.total, **found.layers}.items()
        ]
