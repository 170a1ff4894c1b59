"""Mean and variance of gradients, element by element, in one pass over samples of them.

Symbols: T gradients; g_j an element; m_j its mean and V_j its unbiased variance over the T (1 / (T - 1)); P elements of
a layer or of all.

Source: Faghri et al., arXiv:2007.04532, 2020, section 4. Otherwise than in its code, one pool of T gradients gives both
mean and variance (two pools of T overestimate the variance by 1 + 1 / T), and nothing is added to small squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GradientMoments:
    """Statistics of a gradient estimator, of one parameter or of all."""

    mean: float
    """Mean of the m_j."""
    norm: float
    """Norm of the mean gradient, sqrt(sum_j m_j^2)."""
    average_variance: float
    """Mean of the V_j."""
    normalised_variance: float
    """Mean of V_j / E[g_j^2] over the elements that are not always zero; E[g_j^2] is not centred. NaN if all are."""
    snr: float
    """Signal to noise: (sum_j m_j^2 - V_j / T) / sum_j V_j, whose numerator is unbiased and may be below 0."""
    bias: float
    """Norm of the difference of the mean gradient and the reference's."""
    bias_noise: float
    """About the value of `bias` if there were none: the root of the summed variances of both means."""


class RunningMoments:
    """Accumulate mean and squared deviations; scale-free (Welford, 1962), without waiting for the device."""

    def __init__(self) -> None:
        self.count = 0
        """T so far."""
        self.mean: dict[str, Tensor] = {}
        """m, by parameter."""
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

    The bias is relative to the reference's mean, its own if there is none; a reference of one gradient is exact.
    """
    count = estimator.count
    reference = estimator if reference is None else reference
    variances = estimator.variances()
    others = {} if reference is estimator or reference.count < 2 else reference.variances()
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
