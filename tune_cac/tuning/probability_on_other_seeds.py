"""Model of the quality that a search chooses outcomes by: a Gaussian process of the losses that outcomes cause.

The mean has two slopes: one on how long layers sit out, one on how much of the run is cut (docs/findings.md has the
measurements behind both). What outcomes lose beyond that is smooth in the shares of the run that layers train.

A loss is measured on one seed against one baseline, and another seed would give another one. Runs of one length share
their beginning, and so the effect of the seed, the less the more their layers' shares of training differ; a shorter run
shares nothing with the baseline. A model that does not know this takes a lucky length for a good one.

Slopes, length, amplitude and noise are those of a grid with the highest marginal likelihood (Rasmussen and Williams,
Gaussian Processes for Machine Learning, sections 2.2, 2.7 and 5.4.1) times a prior on the slopes.

Shapes: n outcomes trained, m candidates, k layers, ascending by depth. Features (n, k + 2): compute saved, share of the
full run at which the outcome's run ends, shares of the full run that the layers train. A stop is known by its share of
the full run and its depth, the share of the backward pass's FLOPs that it spares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.metrics.noise import resolution_of, seed_noise
from analysis.metrics.pareto import hypervolume, non_dominated
from analysis.trace_replay.traces import RunTrace, trains_after
from trainables.errors import UserError
from trainables.quality import Quality, allowed_amount
from trainables.savings import share_saved

Array = NDArray[np.float64]

# --- Features ---------------------------------------------------------------------------------------------------------


class Depths:
    """Share of a model's backward FLOPs that stops through its layers spare, by a recorded training of it."""

    def __init__(self, trace: RunTrace) -> None:
        _, whole = trace.costs_of(trace.trains).before(trace.steps_per_epoch)
        found: dict[int, float] = {}
        for blueprint in trace.facts.values():
            for unit in blueprint.plan.units[: blueprint.stoppable]:
                try:
                    left = trace.costs_of(trains_after(trace, blueprint, unit.end)).before(trace.steps_per_epoch)[1]
                except UserError:  # a plan whose settings were never drawn
                    continue
                # An event of auto mode names the layer's weight, one of manual mode the last parameter.
                found[unit.number] = found[blueprint.plan.order[unit.end]] = float(share_saved(left, whole))
        self._known = found
        self._plans = [blueprint.plan for blueprint in trace.facts.values()]
        self.levels = sorted(set(found.values()))  # depths of the layers, ascending

    def of(self, number: int) -> float:
        """Return the depth of a stop through a parameter; that of the last layer that stops with it if it is none."""
        if number in self._known:
            return self._known[number]
        plan = next((plan for plan in self._plans if number in plan.order), None)
        stopped = () if plan is None else plan.order[: plan.position_of_stop(number) + 1]
        return max((self._known[one] for one in stopped if one in self._known), default=0.0)


def features_of(stops: Iterable[tuple[float, float]], depths: Sequence[float], *, end: float, saved: float) -> Array:
    """Return (k + 2,) features of a run; a layer's share is the mean over the depths that the layer takes up.

    ``stops`` are (share of the full run, depth), ``depths`` those at which the layers end, ascending.

    >>> features_of([(0.1, 0.3), (0.5, 0.6)], [0.2, 0.4, 0.8], end=1.0, saved=0.5).round(9).tolist()
    [0.5, 1.0, 0.1, 0.3, 0.75]
    """
    stops = list(stops)

    def trained(depth: float) -> float:
        return min((when for when, through in stops if through >= depth - 1e-9), default=end)

    shares = []
    for low, high in pairwise([0.0, *depths]):
        if high - low < 1e-9:
            shares.append(trained(high))
            continue
        cuts = sorted({low, high, *(through for _, through in stops if low < through < high)})
        shares.append(sum((b - a) * trained(b) for a, b in pairwise(cuts)) / (high - low))
    return np.array([saved, end, *shares])


def trend(features: Array) -> Array:
    """Return (n, 2) what losses grow with: how long layers sit out, and how much of the run is cut.

    That is the mean share of its own run that its layers sit out, to the third power, over its length: late stops cost
    hardly anything. A cut run with a schedule of its own costs what it lacks, relative to its length.

    >>> trend(np.array([[0.0, 1.0, 1.0, 1.0], [0.4, 0.5, 0.25, 0.5]])).tolist()
    [[0.0, 0.0], [0.03125, 1.0]]
    """
    ended, trained = features[:, 1], features[:, 2:]
    out = 1 - trained.mean(axis=1) / ended if trained.shape[1] else np.zeros(len(features))
    return np.column_stack([out**3 / ended, 1 / ended - 1])


# --- Scale of losses --------------------------------------------------------------------------------------------------

#: The unit of losses is at least this share of the seed noise, or of the baseline's value where that is not known: an
#: allowed loss far below tells nothing of how large losses are.
_SHARE_OF_NOISE, _SHARE_OF_VALUE, _LEAST = 0.5, 0.001, 1e-12


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Losses on one split against one baseline, in the metric's unit."""

    allowed: float  # loss that is allowed
    limit: float  # smooth loss up to which a run on the study's own seed counts as within it (`limit_between_counts`)
    seed_noise: float  # standard deviation of a run's quality over seeds; `unit` where that is not known
    unit: float  # usual loss, which the model of the quality counts in: the allowed one, unless that is too small; > 0

    @property
    def other_limit(self) -> float:
        """Return the smooth loss up to which a run on another seed counts as within the allowed one."""
        return max(self.allowed, self.limit)


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

#: Lengths in features, amplitudes and noises in units of the allowed loss.
_LENGTHS, _AMPLITUDES, _NOISES = (0.2, 0.5), (0.3, 1.0, 3.0), (0.1, 0.3, 0.8)
#: Expected slopes on `trend`, in the same unit, each as large as its standard deviation; and the usual ones.
_SLOPES, _USUAL_SLOPES = tuple(product((1.0, 4.0, 16.0), (0.25, 1.0, 4.0))), (4.0, 1.0)
#: Seed effects of two runs of one length correlate by exp(-this times the mean squared difference of the shares of
#: their run that layers train), as measured on digits.
_PARTING = 1.5


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Losses of quality of m candidates, normal, in the unit of the observed ones."""

    mean: Array  # (m,) expected loss on the study's own seed
    deviation: Array  # (m,) its standard deviation, without a run's noise: else each training were a lottery ticket
    other_mean: Array  # (m,) expected loss on another seed
    other_deviation: Array  # (m,) its standard deviation

    def share_within(self, limit: float) -> Array:
        """Return (m,) probabilities that a loss on the study's own seed is at most the limit."""
        return _normal_share((limit - self.mean) / np.maximum(self.deviation, 1e-12))

    def other_share_within(self, limit: float) -> Array:
        """Return (m,) probabilities that a loss on another seed is at most the limit."""
        return _normal_share((limit - self.other_mean) / self.other_deviation)

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


def _normal_share(z: Array) -> Array:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])


def posterior(trained: Array, losses: Array, candidates: Array, *, unit: float, noise: float = 0.0) -> Posterior:
    """Return what trained outcomes say of candidates.

    Args:
        trained: (n, k + 2) features.
        losses: (n,) their losses against the baseline.
        candidates: (m, k + 2) features.
        unit: usual loss, > 0.
        noise: standard deviation of a run's quality over seeds.
    """
    # Diverged trainings are as bad as one that lost ten times the unit: the fit must not follow them.
    scaled = np.clip(losses / unit, -10.0, 10.0)
    seed_variance = (noise / unit) ** 2
    in_common = seed_variance * _seed_covariance(trained, trained)
    rising, rising_to = trend(trained), trend(candidates)
    best = -math.inf
    for length in _LENGTHS:
        alike = _likeness_beyond_dense(trained, trained, length)
        for amplitude, slopes in product(_AMPLITUDES, _SLOPES):
            kernel = (rising * np.square(slopes)) @ rising.T + amplitude**2 * alike
            beyond = scaled - rising @ slopes
            # The logarithms of the slopes deviate from those of the usual ones by normal numbers of variance 1.
            unusual = sum(math.log(slope / usual) ** 2 for slope, usual in zip(slopes, _USUAL_SLOPES, strict=True))
            for rest in _NOISES:
                factor = np.linalg.cholesky(kernel + in_common + rest**2 * np.eye(len(kernel)))
                weights = np.linalg.solve(factor, beyond)
                likelihood = -0.5 * float(weights @ weights) - float(np.log(np.diag(factor)).sum()) - 0.5 * unusual
                if likelihood > best:
                    best, fit = likelihood, (length, amplitude, slopes, rest, factor, weights)
    length, amplitude, slopes, rest, factor, weights = fit

    def conditional(across: Array, own: Array) -> tuple[Array, Array]:
        explained = np.linalg.solve(factor, across)
        mean = rising_to @ slopes + explained.T @ weights
        return mean * unit, np.sqrt(np.maximum(own - (explained**2).sum(axis=0), 0.0)) * unit

    across = (rising * np.square(slopes)) @ rising_to.T
    across = across + amplitude**2 * _likeness_beyond_dense(trained, candidates, length)
    own = ((rising_to * slopes) ** 2).sum(axis=1)
    own += amplitude**2 * (1 - _likeness_to_dense(candidates, length) ** 2)
    of_seed = 2 * seed_variance * (1 - _alike_in_seed(candidates, _dense(candidates))[:, 0])
    mean, deviation = conditional(across + seed_variance * _seed_covariance(trained, candidates), own + of_seed)
    other_mean, spread = conditional(across, own)
    other_deviation = np.sqrt(spread**2 + (np.sqrt(of_seed) * unit) ** 2 + (rest * unit) ** 2)
    return Posterior(mean=mean, deviation=deviation, other_mean=other_mean, other_deviation=other_deviation)


def _seed_covariance(a: Array, b: Array) -> Array:
    """Return the covariance of the seed's effects, on runs less on the baseline, in one run's variance."""
    dense = _dense(a)
    found: Array = _alike_in_seed(a, b) - _alike_in_seed(a, dense) - _alike_in_seed(dense, b) + 1.0
    return found


def _alike_in_seed(a: Array, b: Array) -> Array:
    """Return the correlation of the seed's effects on runs; 0 for different lengths."""
    shares = [runs[:, 2:] / runs[:, 1:2] for runs in (a, b)]
    apart = ((shares[0][:, None, :] - shares[1][None, :, :]) ** 2).mean(axis=2) if a.shape[1] > 2 else 0.0
    found: Array = np.isclose(a[:, None, 1], b[None, :, 1]) * np.exp(-_PARTING * apart)
    return found


def _dense(runs: Array) -> Array:
    return np.array([[0.0, *np.ones(runs.shape[1] - 1)]])


def _likeness_beyond_dense(a: Array, b: Array, length: float) -> Array:
    """Return the correlation of outcomes, given that a full run without stops loses nothing."""
    return _likeness(a, b, length) - np.outer(_likeness_to_dense(a, length), _likeness_to_dense(b, length))


def _likeness_to_dense(a: Array, length: float) -> Array:
    return _likeness(a, _dense(a), length)[:, 0]


def _likeness(a: Array, b: Array, length: float) -> Array:
    distance = ((a[:, None, :] - b[None, :, :]) ** 2).mean(axis=2)
    found: Array = np.exp(-0.5 * distance / length**2)
    return found


# --- Improvements that an outcome promises, and the least that is worth a training ------------------------------------

#: Expected improvement of the answer, or of the front, a fraction of the compute, below which no outcome is worth its
#: training; or this share of what they are, where that is less, but no less than the last.
WORTHWHILE, WORTHWHILE_AREA, _WORTHWHILE_SHARE, _LEAST_WORTHWHILE = 0.005, 0.01, 0.05, 0.001
#: Difference of the shares of a run that a layer trains below which the quality of two runs cannot be told apart: less
#: than an epoch of 30, whose effect the noise of a seed covers.
ALIKE = 0.02


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

    Two runs of one length cannot if they save alike, to `WORTHWHILE`, and no layer trains longer by `ALIKE` in one.

    >>> trained = np.array([[0.502, 1.0, 0.4, 0.6]])
    >>> are_new(np.array([[0.501, 1.0, 0.41, 0.59], [0.501, 1.0, 0.3, 0.7], [0.501, 0.5, 0.4, 0.6]]), trained).tolist()
    [False, True, True]
    """
    least = np.array([WORTHWHILE, 1e-9, *[ALIKE] * (trained.shape[1] - 2)])
    found: NDArray[np.bool_] = np.array([(np.abs(trained - one) > least).any(axis=1).all() for one in candidates], bool)
    return found
