"""Model of the quality that a search chooses outcomes by: a Gaussian process of the losses that outcomes cause.

The mean rises with the squares of the share of the backward pass that is frozen and of the share of the run that is
cut. Losses beyond it are smooth in features that are shares, so that they mean the same on every network.

A loss is measured on one seed against one baseline, and another seed would give another one. Runs of one length share
their beginning, and so the effect of the seed, the less the more their stops differ; a shorter run shares nothing with
the baseline. A model that does not know this takes a length that one seed favours for a good one. So the process is one
of the quality, over the features and the seed: the baseline is one of its runs, and a loss the difference of two.

Shapes: n outcomes trained, m candidates. Features (n, 3): share of the backward FLOPs of its own run that an outcome
spares, share of the full run at which its run ends, share of its own run at which its first layer stops.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.metrics.noise import resolution_of, seed_noise
from analysis.metrics.pareto import hypervolume, non_dominated
from trainables.quality import Quality, allowed_amount

if TYPE_CHECKING:
    from sklearn.gaussian_process.kernels import Kernel

Array = NDArray[np.float64]

# --- Scale of losses --------------------------------------------------------------------------------------------------

#: The unit of losses is at least this share of the seed noise, or of the baseline's value where that is not known: an
#: allowed loss far below tells nothing of how large losses are.
_SHARE_OF_NOISE, _SHARE_OF_VALUE, _LEAST = 0.5, 0.001, 1e-12


#: Units by which a setting must be expected to lose less than what was refused.
BETTER = 0.1
#: Units beyond the allowed loss up to which what is expected to lose that is tried over further seeds: the model begins
#: with the expectation that half of a run costs just the allowed loss (docs/findings.md "Seeds").
TRIED_BEYOND = 0.2


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Losses on one split against one baseline, in the metric's unit."""

    allowed: float  # loss that is allowed
    limit: float  # smooth loss up to which a run on the study's own seed counts as within it (`limit_between_counts`)
    seed_noise: float  # standard deviation of a run's quality over seeds; `unit` where that is not known
    unit: float  # usual loss, which the model of the quality counts in: the allowed one, unless that is too small; > 0

    @property
    def mean_limit(self) -> float:
        """Return the smooth loss up to which what is expected to lose it over seeds is tried."""
        return max(self.allowed, self.limit) + TRIED_BEYOND * self.unit

    def limit_behind(self, refused: Array) -> float:
        """Return the limit of a mean over seeds once settings were refused, below what is expected of all of these.

        Else one after the other of those that lose nearly as much would be tried.

        Args:
            refused: (r,) expected mean losses over seeds of the refused settings, r >= 0.

        >>> scale = LossScale(allowed=0.005, limit=0.004, seed_noise=0.005, unit=0.005)
        >>> [scale.limit_behind(np.array(means)) for means in ([], [0.007], [0.0045, 0.007])]
        [0.006, 0.006, 0.004]
        """
        return min([self.mean_limit, *(refused - BETTER * self.unit).tolist()])


def loss_scale(baseline: float, others: Sequence[float], quality: Quality, allowed_drop: float | str) -> LossScale:
    """Return the scale of losses against a baseline; the other runs' quality tells how many samples it is measured on.

    Of accuracy alone the deviation over seeds is known (`analysis.metrics.noise`).
    """
    allowed, values = float(allowed_amount(allowed_drop, baseline)), [baseline, *others]
    noise = 0.0
    if quality.is_accuracy:
        noise = float(seed_noise(baseline, resolution_of(pd.Series(values)))) / math.sqrt(2)  # of one run, not of two
    unit = max(allowed, _SHARE_OF_NOISE * noise or _SHARE_OF_VALUE * abs(baseline), _LEAST)
    limit = limit_between_counts(allowed, values, quality)
    return LossScale(allowed=allowed, limit=limit, seed_noise=noise or unit, unit=unit)


def limit_between_counts(allowed: float, values: Sequence[float], quality: Quality) -> float:
    """Return the limit up to which a smooth loss counts as within the allowed one (continuity correction).

    Of 599 samples two may be lost at an allowed loss of 0.005 and three may not. Of other metrics than accuracy all
    losses can be told apart.

    >>> from trainables.quality import ACCURACY
    >>> round(599 * limit_between_counts(0.005, [583 / 599, 590 / 599], ACCURACY), 9)
    2.5
    """
    one = resolution_of(pd.Series(list(values))) if quality.is_accuracy else None
    return allowed if one is None else (math.floor(allowed / one + 1e-9) + 0.5) * one


# --- The Gaussian process ---------------------------------------------------------------------------------------------

#: Loss, in units, that is expected of a run without backward passes, or without steps, before anything is known: that
#: of half of either is the allowed one.
_EXPECTED = 4.0
#: Expected, least and largest standard deviation, in units, of losses beyond the mean and of a run's noise.
_BEYOND, _NOISE = (1.0, 0.1, 10.0), (0.3, 0.05, 1.5)
#: Distance in features over which losses beyond the mean are alike, and effects of one seed on runs of one length.
_LENGTH, _SEED_LENGTH = 1.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Losses of quality of m candidates, normal, in the unit of the observed ones."""

    mean: Array  # (m,) expected loss on the study's own seed
    deviation: Array  # (m,) its standard deviation, without a run's noise: else each training were a lottery ticket
    mean_over_seeds: Array  # (m,) expected loss on a seed of which no run is known

    def share_within(self, limit: float) -> Array:
        """Return (m,) probabilities that a loss on the study's own seed is at most the limit."""
        z = (limit - self.mean) / np.maximum(self.deviation, 1e-12)
        return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])

    def area_gained(self, saved: Array, front: Iterable[tuple[float, float]], worst: float) -> Array:
        """Return (m,) areas by which the candidates are expected to raise a front's hypervolume.

        The saving of a candidate is known and its loss is normal, so this is an integral over one variable (16 nodes of
        Gauss and Hermite; Emmerich, Deutz and Klinkenberg, CEC 2011). Below no loss only noise is to be won.

        Args:
            saved: (m,) fractions.
            front: (loss, saved) of what was trained.
            worst: loss of the reference point, whose saving is 0.
        """
        deviations, weights = np.polynomial.hermite_e.hermegauss(16)
        losses = np.maximum(self.mean[:, None] + self.deviation[:, None] * deviations, 0.0)
        begins, highest = [0.0], [0.0]
        for loss, share in sorted((max(loss, 0.0), share) for loss, share in front if loss < worst and share > 0):
            if share > highest[-1]:
                begins.append(loss)
                highest.append(share)
        gained = np.zeros_like(losses)
        for begin, end, share in zip(begins, [*begins[1:], worst], highest, strict=True):
            width = np.clip(end - np.maximum(losses, begin), 0.0, None)
            gained += width * np.maximum(saved - share, 0.0)[:, None]
        found: Array = gained @ weights / weights.sum()
        return found


def _kernel(noise: float) -> Kernel:
    """Return the covariance of qualities, in units, over features and the seed, of which every two share nothing."""
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel  # the command line starts without it

    (beyond, *beyond_bounds), (of_run, *of_run_bounds) = np.square([_BEYOND, _NOISE])
    smooth = ConstantKernel(beyond, beyond_bounds) * RBF([_LENGTH, _LENGTH, _LENGTH, np.inf], "fixed")
    of_seed = ConstantKernel(noise**2, "fixed") * RBF([_SEED_LENGTH, 1e-6, _SEED_LENGTH, 1e-6], "fixed")
    return smooth + of_seed + WhiteKernel(of_run, of_run_bounds)


def _likeliest(negative: Callable[[Array], tuple[float, Array]], expected: Array, bounds: Array) -> tuple[Array, float]:
    """Return the likeliest hyperparameters, logarithms that deviate by 1 from the expected ones, and their cost."""
    from scipy.optimize import minimize

    def cost(found: Array) -> tuple[float, Array]:
        value, gradient = negative(found)
        return value + float(((found - expected) ** 2).sum()) / 2, gradient + found - expected

    found = minimize(cost, expected, jac=True, bounds=bounds)
    return found.x, found.fun


def posterior(
    trained: Array, losses: Array, candidates: Array, *, unit: float, noise: float = 0.0, seeds: Array | None = None
) -> Posterior:
    """Return what trained outcomes say of candidates.

    Args:
        trained: (n, 3) features; of the baseline on a further seed 0, 1, 1.
        losses: (n,) their losses against the baseline of the same seed.
        candidates: (m, 3) features.
        unit: usual loss, > 0.
        noise: standard deviation of a run's quality over seeds.
        seeds: (n,) numbers of the seeds, 0 for the study's own; None for that alone.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor

    def runs(features: Array, seed: Any, own: float = 0.0) -> Array:
        """Return features and seeds of the baseline and of runs."""
        rows = np.vstack([[[0.0, 1.0, 1.0]], features])
        return np.column_stack([rows, np.append(own, np.broadcast_to(seed, len(features)))])

    frozen, end = np.vstack([trained, candidates])[:, :2].T
    known, expected = np.split(_EXPECTED * (frozen**2 + (1 - end) ** 2), [len(trained)])
    process = GaussianProcessRegressor(_kernel(noise / unit), optimizer=_likeliest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of hyperparameters at their bounds
        # Diverged trainings are as bad as one that lost ten times the unit: the fit must not follow them.
        process.fit(
            runs(trained, 0 if seeds is None else seeds), np.append(0.0, np.clip(losses / unit, -10.0, 10.0) - known)
        )
    here, deviation = process.predict(runs(candidates, 0), return_std=True)
    there = process.predict(runs(candidates, -1, own=-1))
    of_run = process.kernel_.k2.noise_level
    return Posterior(
        mean=(expected + here[1:]) * unit,
        deviation=np.sqrt(np.maximum(deviation[1:] ** 2 - of_run, 0.0)) * unit,
        mean_over_seeds=(expected + there[1:] - there[0]) * unit,
    )


# --- Improvements that an outcome promises, and the least that is worth a training ------------------------------------

#: Expected improvement of the answer, or of the front, a fraction of the compute, below which no outcome is worth its
#: training (docs/findings.md "Seeds"); or this share of what they are, where that is less, but no less than the last.
WORTHWHILE, WORTHWHILE_AREA, _WORTHWHILE_SHARE, _LEAST_WORTHWHILE = 0.02, 0.04, 0.05, 0.001
#: Differences of compute saved, and of the shares of a run after which a layer stops first, below which the quality of
#: two runs cannot be told apart: less than an epoch of 30, whose effect the noise of a seed covers.
ALIKE_SAVED, ALIKE = 0.005, 0.02


def worthwhile(known: float, most: float) -> float:
    """Return the least expected improvement of what is known by now, ``most`` where there is much of it.

    >>> worthwhile(0.5, 0.01), worthwhile(0.06, 0.01), worthwhile(0.0, 0.01)
    (0.01, 0.003, 0.001)
    """
    return min(most, max(_WORTHWHILE_SHARE * known, _LEAST_WORTHWHILE))


def area_of(front: Iterable[tuple[float, float]], worst: float) -> float:
    """Return the mean saving of (loss, saving) points up to a loss ``worst``, gains counted as no loss.

    >>> area_of([(-0.1, 0.2), (0.5, 0.4), (2.0, 0.9), (float("inf"), 1.0)], 1.0)
    0.30000000000000004
    """
    points = np.array([(-max(loss, 0.0), saved) for loss, saved in front if loss < worst and saved > 0])
    return hypervolume(points[non_dominated(points)], (-worst, 0.0)) / worst if len(points) else 0.0


def are_new(candidates: Array, trained: Array) -> NDArray[np.bool_]:
    """Return (m,) whether candidates differ from every run by what can be told apart.

    Two runs of one length cannot if they save alike, to `ALIKE_SAVED`, and begin to stop alike, to `ALIKE`.

    >>> trained = np.array([[0.502, 1.0, 0.4]])
    >>> are_new(np.array([[0.501, 1.0, 0.41], [0.501, 1.0, 0.3], [0.501, 0.5, 0.4]]), trained).tolist()
    [False, True, True]
    """
    least = np.array([ALIKE_SAVED, 1e-9, ALIKE])
    found: NDArray[np.bool_] = np.array([(np.abs(trained - one) > least).any(axis=1).all() for one in candidates], bool)
    return found
