"""Gaussian process of the loss of quality that outcomes cause, with the noise of one seed.

The mean is a constant and a slope on the compute saved, both with a broad prior; what a layer's stop does beyond that
is smooth in the shares of the run that layers trained. Length, amplitude and noise are those of a grid with the highest
marginal likelihood (Rasmussen and Williams, Gaussian Processes for Machine Learning, sections 2.2, 2.7 and 5.4.1).

Shapes: n outcomes trained, m candidates, k features; the first feature is the compute saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

#: Lengths in features, amplitudes and noises in units of the allowed loss.
_LENGTHS, _AMPLITUDES, _NOISES = (0.15, 0.3, 0.6), (0.3, 1.0, 3.0), (0.1, 0.3, 0.6, 1.2)
#: Standard deviations of the mean's constant and slope, in the same unit.
_CONSTANT, _SLOPE = 1.0, 10.0
#: By how much earlier studies deviate, as shares of the function's own standard deviation; the expected one, from which
#: the logarithm deviates by a normal number; and noises of their outcomes beside that of a seed, in the unit.
_DEVIATIONS, _DEVIATION, _FURTHER_NOISES = (0.1, 0.3, 1.0, 3.0, 10.0), 0.3, (0.0, 0.5, 1.5)


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
    trained: NDArray[np.float64],
    losses: NDArray[np.float64],
    candidates: NDArray[np.float64],
    *,
    unit: float,
    studies: NDArray[np.int64] | None = None,
    luck: float = 0.0,
) -> Posterior:
    """Return what trained outcomes say of candidates.

    Args:
        trained: (n, k) features, n >= 1.
        losses: (n,) their losses against the baseline.
        candidates: (m, k) features.
        unit: typical loss, such as the allowed one; > 0.
        studies: (n,) number of the study that trained each: 0 for this one, whose candidates they are; None: all of it.
        luck: standard deviation of what all losses of another study have in common, because they are losses against
            one baseline, in units.
    """
    # Diverged trainings are as bad as one that lost ten times the unit: the fit must not follow them.
    scaled = np.clip(losses / unit, -10.0, 10.0)
    studies = np.zeros(len(trained), int) if studies is None else studies
    others = sorted(set(studies.tolist()) - {0})
    best: tuple[float, _Fit] | None = None
    for length, amplitude in product(_LENGTHS, _AMPLITUDES):
        kernel = _kernel(trained, trained, length, amplitude)
        for noise, deviation in product(_NOISES, _DEVIATIONS if others else (0.0,)):
            fit = _Fit(
                length=length, amplitude=amplitude, noise=noise, luck=luck,
                studies=dict.fromkeys(others, (deviation, 0.0)),
            )  # fmt: skip
            likelihood = _likelihood(fit, kernel, scaled, studies)
            if best is None or likelihood > best[0]:
                best = likelihood, fit
    assert best is not None  # the grid is not empty
    fit = best[1]
    kernel = _kernel(trained, trained, fit.length, fit.amplitude)
    for study in others:  # which of them misleads is seen one by one
        fits = [replace(fit, studies={**fit.studies, study: one}) for one in product(_DEVIATIONS, _FURTHER_NOISES)]
        fit = max(fits, key=lambda one: _likelihood(one, kernel, scaled, studies))
    factor = np.linalg.cholesky(_covariance(fit, kernel, studies))
    across = np.linalg.solve(factor, _kernel(trained, candidates, fit.length, fit.amplitude))
    own = _CONSTANT**2 + (_SLOPE * candidates[:, 0]) ** 2 + fit.amplitude**2
    variance = np.maximum(own - (across**2).sum(axis=0), 0.0)
    mean = across.T @ np.linalg.solve(factor, scaled)
    return Posterior(mean=mean * unit, spread=np.sqrt(variance) * unit, noise=fit.noise * unit)


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Hyperparameters, losses in the unit."""

    length: float
    amplitude: float
    noise: float
    luck: float
    """Standard deviation of what the losses of each other study have in common; given, not fitted."""
    studies: Mapping[int, tuple[float, float]]
    """Deviation and further noise of each other study."""


def _covariance(fit: _Fit, kernel: NDArray[np.float64], studies: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (n, n) covariance of the observations: a study deviates from the function by one of the same kind.

    With noise alone many outcomes of a misleading study would be as sure as one's own (Bonilla, Chai and Williams,
    Multi-task Gaussian Process Prediction, NIPS 2007, where tasks correlate by 1 / (1 + deviation^2)).
    """
    full = kernel + fit.noise**2 * np.eye(len(studies))
    for study, (deviation, noise) in fit.studies.items():
        of = studies == study
        full += (deviation**2 * kernel + fit.luck**2) * np.outer(of, of) + noise**2 * np.diag(of)
    return full


def _likelihood(
    fit: _Fit, kernel: NDArray[np.float64], scaled: NDArray[np.float64], studies: NDArray[np.int64]
) -> float:
    """Return the logarithm of the likelihood times the deviations' prior, without what is equal for all fits."""
    factor = np.linalg.cholesky(_covariance(fit, kernel, studies))
    weights = np.linalg.solve(factor, scaled)
    expected = sum(math.log(deviation / _DEVIATION) ** 2 for deviation, _ in fit.studies.values())
    return -0.5 * float(weights @ weights) - float(np.log(np.diag(factor)).sum()) - 0.5 * expected


def _kernel(a: NDArray[np.float64], b: NDArray[np.float64], length: float, amplitude: float) -> NDArray[np.float64]:
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).mean(axis=2)
    smooth = amplitude**2 * np.exp(-0.5 * distance / length**2)
    return _CONSTANT**2 + _SLOPE**2 * np.outer(a[:, 0], b[:, 0]) + smooth
