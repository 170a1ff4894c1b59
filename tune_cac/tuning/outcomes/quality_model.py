"""Gaussian process of the loss of quality that outcomes cause, with the luck of one seed.

The mean has two slopes: one on how long layers sit out, one on how much of the run is cut (docs/findings.md has the
measurements behind both). What outcomes lose beyond that is smooth in the shares of the run that layers train. A full
run without stops loses nothing.

A loss is measured against one baseline, and another seed would give another one. Runs of one length share their
beginning, and so their luck, the less the more their layers' shares of training differ; a shorter run shares nothing
with the baseline. So the losses of all shorter runs have the baseline's
luck in common, those of one length also that length's, and a model that does not know this takes a lucky length for a
good one.

Slopes, length, amplitude and noise are those of a grid with the highest marginal likelihood (Rasmussen and Williams,
Gaussian Processes for Machine Learning, sections 2.2, 2.7 and 5.4.1) times a prior on the slopes.

Shapes: n outcomes trained, m candidates, k layers. Features (n, k + 2): compute saved, share of the full run at which
the outcome's run ends, shares of the full run that the layers train.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

#: Lengths in features, amplitudes and noises in units of the allowed loss.
_LENGTHS, _AMPLITUDES, _NOISES = (0.2, 0.5), (0.3, 1.0, 3.0), (0.1, 0.3, 0.8)
#: Expected slopes on `trend`, in the same unit, each as large as its standard deviation; and the usual ones.
_SLOPES, _USUAL_SLOPES = tuple(product((1.0, 4.0, 16.0), (0.25, 1.0, 4.0))), (4.0, 1.0)
#: Luck of two runs of one length correlates by exp(-this times the mean squared difference of the shares of their run
#: that layers train), as measured on digits.
_PARTING = 1.5


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Loss of quality of m candidates, in the unit of the observed losses."""

    mean: NDArray[np.float64]
    """(m,) expected loss, on average over seeds."""
    spread: NDArray[np.float64]
    """(m,) its standard deviation."""
    luck: NDArray[np.float64]
    """(m,) standard deviation of the luck that another seed adds."""
    own_mean: NDArray[np.float64]
    """(m,) expected loss on the study's own seed, with the luck that its runs have in common."""
    own_spread: NDArray[np.float64]
    """(m,) its standard deviation, without the noise of a run."""
    noise: float
    """Standard deviation of the noise of one seed."""

    def other_share_within(self, allowed: float) -> NDArray[np.float64]:
        """Return (m,) probabilities that a run loses at most the allowed loss on another seed."""
        return _normal_share((allowed - self.mean) / np.sqrt(self.spread**2 + self.luck**2 + self.noise**2))

    def own_share_within(self, allowed: float) -> NDArray[np.float64]:
        """Return (m,) probabilities that the loss on the study's own seed is at most the allowed one.

        The noise of a run is left out, with which every further training would be a ticket in a lottery.
        """
        return _normal_share((allowed - self.own_mean) / np.maximum(self.own_spread, 1e-12))

    def area_gained(
        self, saved: NDArray[np.float64], front: Sequence[tuple[float, float]], worst: float
    ) -> NDArray[np.float64]:
        """Return (m,) areas by which the candidates are expected to raise a front's hypervolume.

        The saving of a candidate is known and its loss is normal, so this is an integral over one variable (16 nodes of
        Gauss and Hermite). The noise of a run is left out, as above; and so is what lies below no loss, where only
        noise is to be won (Emmerich, Deutz and Klinkenberg, CEC 2011).

        Args:
            saved: (m,) compute that the candidates save, fractions.
            front: (loss, saved) of what was trained.
            worst: loss of the reference point, whose saving is 0.
        """
        deviations, weights = np.polynomial.hermite_e.hermegauss(16)
        losses = np.maximum(self.own_mean[:, None] + self.own_spread[:, None] * deviations, 0.0)
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


def _normal_share(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])


def trend(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (n, 2) what losses grow with: how long layers sit out, and how much of the run is cut.

    Stops near a run's end cost hardly anything, and a shorter run suffers more from a stop: the mean share of its own
    run that its layers sit out, to the third power, over its length. A cut run with a schedule of its own costs what it
    lacks, relative to its length.

    >>> trend(np.array([[0.0, 1.0, 1.0, 1.0], [0.4, 0.5, 0.25, 0.5]])).tolist()
    [[0.0, 0.0], [0.03125, 1.0]]

    Args:
        features: (n, k + 2).
    """
    ended, trained = features[:, 1], features[:, 2:]
    out = 1 - trained.mean(axis=1) / ended if trained.shape[1] else np.zeros(len(features))
    return np.column_stack([out**3 / ended, 1 / ended - 1])


def posterior(
    trained: NDArray[np.float64],
    losses: NDArray[np.float64],
    candidates: NDArray[np.float64],
    *,
    unit: float,
    luck: float = 0.0,
) -> Posterior:
    """Return what trained outcomes say of candidates.

    Args:
        trained: (n, k + 2) features.
        losses: (n,) their losses against the baseline.
        candidates: (m, k + 2) features.
        unit: typical loss, such as the allowed one; > 0.
        luck: standard deviation of the quality of one run over seeds, in units.
    """
    # Diverged trainings are as bad as one that lost ten times the unit: the fit must not follow them.
    scaled = np.clip(losses / unit, -10.0, 10.0)
    common = luck**2 * _shared_luck(trained, trained)
    rising, rising_to = trend(trained), trend(candidates)
    alike = {length: _likeness_beyond_dense(trained, trained, length) for length in _LENGTHS}
    best: tuple[float, _Fit] | None = None
    for length, amplitude, slopes in product(_LENGTHS, _AMPLITUDES, _SLOPES):
        kernel = _kernel(rising, rising, slopes, amplitude, alike[length])
        beyond = scaled - rising @ slopes
        for noise in _NOISES:
            fit = _Fit(length=length, amplitude=amplitude, slopes=slopes, noise=noise)
            likelihood = _likelihood(fit, kernel, common, beyond)
            if best is None or likelihood > best[0]:
                best = likelihood, fit
    assert best is not None  # the grid is not empty
    fit = best[1]
    kernel = _kernel(rising, rising, fit.slopes, fit.amplitude, alike[fit.length])
    beyond = scaled - rising @ fit.slopes
    factor = np.linalg.cholesky(_covariance(fit, kernel, common))
    weights = np.linalg.solve(factor, beyond)

    def conditional(across: NDArray[np.float64], own: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        explained = np.linalg.solve(factor, across)
        mean = rising_to @ fit.slopes + explained.T @ weights
        return [mean * unit, np.sqrt(np.maximum(own - (explained**2).sum(axis=0), 0.0)) * unit]

    alike_to = _likeness_beyond_dense(trained, candidates, fit.length)
    across = _kernel(rising, rising_to, fit.slopes, fit.amplitude, alike_to)
    own = ((rising_to * fit.slopes) ** 2).sum(axis=1)
    own += fit.amplitude**2 * (1 - _likeness_to_dense(candidates, fit.length) ** 2)
    here = luck**2 * _shared_luck(trained, candidates)
    mean, spread = conditional(across, own)
    with_baseline = _alike_in_luck(candidates, _dense(candidates.shape[1]))[:, 0]
    of_seed = 2 * luck**2 * (1 - with_baseline)
    own_mean, own_spread = conditional(across + here, own + of_seed)
    return Posterior(
        mean=mean, spread=spread, luck=np.sqrt(of_seed) * unit, own_mean=own_mean, own_spread=own_spread,
        noise=fit.noise * unit,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Hyperparameters, losses in the unit."""

    length: float
    amplitude: float
    slopes: tuple[float, float]
    """Expected slopes on `trend`."""
    noise: float


def _shared_luck(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the covariance of the luck in the losses of two lists of one study's outcomes, in one run's variance.

    A loss has the luck of its run, less that of the baseline.
    """
    dense = _dense(a.shape[1])
    found: NDArray[np.float64] = _alike_in_luck(a, b) - _alike_in_luck(a, dense) - _alike_in_luck(dense, b) + 1.0
    return found


def _alike_in_luck(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the correlation of the luck of two lists of runs on one seed; 0 of runs of different lengths."""
    shares = [runs[:, 2:] / runs[:, 1:2] for runs in (a, b)]
    apart = ((shares[0][:, None, :] - shares[1][None, :, :]) ** 2).mean(axis=2) if a.shape[1] > 2 else 0.0
    found: NDArray[np.float64] = np.isclose(a[:, None, 1], b[None, :, 1]) * np.exp(-_PARTING * apart)
    return found


def _dense(features: int) -> NDArray[np.float64]:
    return np.array([[0.0, *np.ones(features - 1)]])


def _covariance(fit: _Fit, kernel: NDArray[np.float64], common: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (n, n) covariance of the observations."""
    found: NDArray[np.float64] = kernel + common + fit.noise**2 * np.eye(len(kernel))
    return found


def _likelihood(
    fit: _Fit, kernel: NDArray[np.float64], common: NDArray[np.float64], beyond: NDArray[np.float64]
) -> float:
    """Return the logarithm of the likelihood times the prior of slopes, without what all fits share.

    Their logarithms deviate from that of the usual one by a normal number of variance 1.
    """
    factor = np.linalg.cholesky(_covariance(fit, kernel, common))
    weights = np.linalg.solve(factor, beyond)
    unusual = sum(math.log(slope / usual) ** 2 for slope, usual in zip(fit.slopes, _USUAL_SLOPES, strict=True))
    return -0.5 * float(weights @ weights) - float(np.log(np.diag(factor)).sum()) - 0.5 * unusual


def _kernel(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    slopes: tuple[float, float],
    amplitude: float,
    alike: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the covariance of two lists of outcomes' losses, from their `trend` and `_likeness_beyond_dense`."""
    found: NDArray[np.float64] = (a * np.square(slopes)) @ b.T + amplitude**2 * alike
    return found


def _likeness_beyond_dense(a: NDArray[np.float64], b: NDArray[np.float64], length: float) -> NDArray[np.float64]:
    """Return the correlation of two lists of outcomes, given that a full run without stops loses nothing."""
    return _likeness(a, b, length) - np.outer(_likeness_to_dense(a, length), _likeness_to_dense(b, length))


def _likeness_to_dense(a: NDArray[np.float64], length: float) -> NDArray[np.float64]:
    return _likeness(a, _dense(a.shape[1]), length)[:, 0]


def _likeness(a: NDArray[np.float64], b: NDArray[np.float64], length: float) -> NDArray[np.float64]:
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).mean(axis=2)
    found: NDArray[np.float64] = np.exp(-0.5 * distance / length**2)
    return found
