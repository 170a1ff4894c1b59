"""Gaussian process of the loss of quality that outcomes cause, with the noise of one seed.

The mean is a constant and a slope on the compute saved, both with a broad prior; what a layer's stop does beyond that
is smooth in the shares of the run that layers trained. Length, amplitude and noise are those of a grid with the highest
marginal likelihood (Rasmussen and Williams, Gaussian Processes for Machine Learning, sections 2.2, 2.7 and 5.4.1).

Shapes: n outcomes trained, m candidates, k features; the first feature is the compute saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

#: Lengths in features, amplitudes and noises in units of the allowed loss.
_LENGTHS, _AMPLITUDES, _NOISES = (0.15, 0.3, 0.6), (0.3, 1.0, 3.0), (0.1, 0.3, 0.6, 1.2)
#: Standard deviations of the mean's constant and slope, in the same unit.
_CONSTANT, _SLOPE = 1.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Loss of quality of m candidates, in the unit of the observed losses."""

    mean: NDArray[np.float64]
    """(m,) expected loss."""
    spread: NDArray[np.float64]
    """(m,) standard deviation of the loss without the noise of a seed."""
    noise: float
    """Standard deviation of the noise of one seed."""

    def share_within(self, allowed: float) -> NDArray[np.float64]:
        """Return (m,) probabilities that the loss without the noise of a seed is at most the allowed one."""
        z = (allowed - self.mean) / np.maximum(self.spread, 1e-12)
        return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])

    def area_gained(
        self, saved: NDArray[np.float64], front: Sequence[tuple[float, float]], worst: float
    ) -> NDArray[np.float64]:
        """Return (m,) areas by which the candidates are expected to raise a front's hypervolume.

        The saving of a candidate is known and its loss is normal, so this is an integral over one variable (16 nodes of
        Gauss and Hermite). The noise of a seed is left out, with which every further training would be a ticket in a
        lottery; and so is what lies below no loss, where only noise is to be won (Emmerich, Deutz and Klinkenberg,
        CEC 2011).

        Args:
            saved: (m,) compute that the candidates save, fractions.
            front: (loss, saved) of what was trained.
            worst: loss of the reference point, whose saving is 0.
        """
        deviations, weights = np.polynomial.hermite_e.hermegauss(16)
        losses = np.maximum(self.mean[:, None] + self.spread[:, None] * deviations, 0.0)
        steps = sorted((max(loss, 0.0), share) for loss, share in front if loss < worst and share > 0)
        begins, highest = [0.0], [0.0]
        for loss, share in steps:
            if share > highest[-1]:
                begins.append(loss)
                highest.append(share)
        gained = np.zeros_like(losses)
        for begin, end, share in zip(begins, [*begins[1:], worst], highest, strict=True):
            width = np.clip(end - np.maximum(losses, begin), 0.0, None)
            gained += width * np.maximum(saved - share, 0.0)[:, None]
        found: NDArray[np.float64] = gained @ weights / weights.sum()
        return found


def posterior(
    trained: NDArray[np.float64], losses: NDArray[np.float64], candidates: NDArray[np.float64], *, unit: float
) -> Posterior:
    """Return what trained outcomes say of candidates.

    Args:
        trained: (n, k) features, n >= 1.
        losses: (n,) their losses against the baseline.
        candidates: (m, k) features.
        unit: typical loss, such as the allowed one; > 0.
    """
    # Diverged trainings are as bad as one that lost ten times the unit: the fit must not follow them.
    scaled = np.clip(losses / unit, -10.0, 10.0)
    best: tuple[float, Posterior] | None = None
    for length, amplitude, noise in product(_LENGTHS, _AMPLITUDES, _NOISES):
        factor = np.linalg.cholesky(_kernel(trained, trained, length, amplitude) + noise**2 * np.eye(len(trained)))
        weights = np.linalg.solve(factor, scaled)
        likelihood = -0.5 * float(weights @ weights) - float(np.log(np.diag(factor)).sum())
        if best is None or likelihood > best[0]:
            across = np.linalg.solve(factor, _kernel(trained, candidates, length, amplitude))
            own = _CONSTANT**2 + (_SLOPE * candidates[:, 0]) ** 2 + amplitude**2
            variance = np.maximum(own - (across**2).sum(axis=0), 0.0)
            found = Posterior(mean=across.T @ weights * unit, spread=np.sqrt(variance) * unit, noise=noise * unit)
            best = likelihood, found
    assert best is not None  # the grid is not empty
    return best[1]


def _kernel(a: NDArray[np.float64], b: NDArray[np.float64], length: float, amplitude: float) -> NDArray[np.float64]:
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).mean(axis=2)
    smooth = amplitude**2 * np.exp(-0.5 * distance / length**2)
    return _CONSTANT**2 + _SLOPE**2 * np.outer(a[:, 0], b[:, 0]) + smooth
