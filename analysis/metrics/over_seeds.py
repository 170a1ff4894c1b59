"""Loss of settings over seeds that did not choose them: its mean, how closely that is known, and what it decides.

A search chooses settings on one seed, whose noise favours some of them. What would be the answer is trained on further
seeds, beside the baseline, and its losses there, each against the baseline of the same seed, are taken as normal. The
value of a run is the mean of both splits', which varies less from seed to seed than either.

Symbols: d (n,) losses of a setting on n further seeds; s standard deviation of d, pooled over all settings; s0 what it
is expected to be (`noise.seed_noise`), which counts as much as `EXPECTED_DF` degrees of freedom. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.formatting import ROUNDING
from analysis.io.checked import is_value, numbers_of
from analysis.metrics.noise import resolution_of, seed_noise
from analysis.metrics.saving import quality_of
from trainables.savings import SAVED

#: Values of the column ``control``: a setting, or the baseline, that is trained again on a further seed, its number in
#: the column ``candidate``; and the dense run cut to the compute of a setting of that number.
OTHER_SEED, SHORTER_ON_SEED = "other seed", "shorter on other seed"
#: Confidence of the interval that is stated.
CONFIDENCE = 0.95
#: Probability that the mean over all seeds is within the allowed loss below which a setting gets no more seeds. To ask
#: of an answer that its mean is certainly within costs more than it gives (docs/findings.md "Seeds").
HOPELESS = 0.1
#: Compute that a setting saves less, at least, than one that lost too much, a fraction: closer ones would only be
#: further chances of the same.
LESS = 0.01
#: Degrees of freedom of the expected deviation.
EXPECTED_DF = 2
#: What is decided of a setting.
WITHIN, BEYOND, OPEN = "within", "beyond", "open"


@dataclass(frozen=True, kw_only=True)
class OverSeeds:
    """Losses of a setting over further seeds, in the metric's unit."""

    n: int  # seeds; >= 1
    mean: float  # infinite if a run failed
    worst: float  # loss of the worst seed
    deviation: float  # standard deviation of the mean; NaN where nothing is known of the noise
    df: int  # its degrees of freedom

    def at_most(self, confidence: float) -> float:
        """Return the upper end of the mean's one-sided interval; NaN where nothing is known of the noise."""
        from scipy import stats

        return self.mean + float(stats.t.ppf(confidence, self.df)) * self.deviation if self.df else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Return both ends of the mean's two-sided interval."""
        high = self.at_most((1 + CONFIDENCE) / 2)
        return 2 * self.mean - high, high

    def is_within(self, allowed: float) -> bool:
        """Return whether the mean is within the allowed loss."""
        return self.mean <= allowed + ROUNDING

    def decides(self, allowed: float, seeds: int) -> str:
        """Return whether the mean is within the allowed loss or beyond, with so many further seeds planned.

        Given n losses the mean of N varies around theirs by s sqrt(1 / n - 1 / N).
        """
        from scipy import stats

        if math.isinf(self.mean):
            return BEYOND
        if self.n >= seeds:
            return WITHIN if self.is_within(allowed) else BEYOND
        if not self.df:
            return OPEN
        one = self.deviation * math.sqrt(self.n)
        z = (allowed - self.mean) / max(one * math.sqrt(1 / self.n - 1 / seeds), ROUNDING)
        return BEYOND if stats.t.cdf(z, self.df) < HOPELESS else OPEN


def over_seeds(losses: Mapping[int, Sequence[float]], expected: float) -> dict[int, OverSeeds]:
    """Return what the losses of each setting say, by its number; settings without any are left out.

    >>> found = over_seeds({7: [0.004, 0.0], 9: [0.01]}, 0.0)
    >>> found[7].n, found[7].df, round(found[7].deviation, 4), round(found[9].deviation, 4)
    (2, 1, 0.002, 0.0028)
    """
    known = {number: np.asarray(one, float) for number, one in losses.items() if len(one)}
    finite = [one for one in known.values() if np.isfinite(one).all()]
    expected_df = EXPECTED_DF if expected > 0 else 0
    df = expected_df + sum(len(one) - 1 for one in finite)
    squares = expected_df * expected**2 + sum(float(((one - one.mean()) ** 2).sum()) for one in finite)
    df = df if squares > ROUNDING**2 else 0  # equal losses tell nothing of the noise
    deviation = math.sqrt(squares / df) if df else math.nan
    return {
        number: OverSeeds(
            n=len(one), mean=float(one.mean()), worst=float(one.max()), deviation=deviation / math.sqrt(len(one)), df=df
        )
        for number, one in known.items()
    }


def expected_deviation(value: float, values: pd.Series, tests: pd.Series | None) -> float:
    """Return the expected standard deviation of a difference of two runs' values, of accuracies on these splits."""
    variances = [float(seed_noise(value, resolution_of(one))) ** 2 for one in (values, tests) if one is not None]
    return math.sqrt(sum(variances)) / len(variances)


def compared_column(trials: pd.DataFrame) -> str:
    """Return the metric's column for comparing runs: of the test split, else of the validation split."""
    quality = quality_of(trials)
    known = quality.test in trials.columns and trials[quality.test].notna().any()
    return quality.test if known or quality.name not in trials.columns else quality.name


def shorter_of(number: int) -> int:
    """Return the number that stands for the dense run cut to the compute of a setting; again, the setting's.

    >>> shorter_of(7), shorter_of(shorter_of(7))
    (-8, 7)
    """
    return -1 - number


def number_of_run(control: str, candidate: int) -> int:
    """Return the number of the setting, or of the cut dense run (`shorter_of`), that a run on a further seed trains."""
    return shorter_of(candidate) if control == SHORTER_ON_SEED else candidate


def compared_values(trials: pd.DataFrame) -> pd.Series[float]:
    """Return what runs are compared by over seeds: the mean of both splits, or the only split's value."""
    quality = quality_of(trials)
    values = numbers_of(trials, quality.name)
    return (values + numbers_of(trials, quality.test)) / 2 if compared_column(trials) == quality.test else values


def ignores_seed(trials: pd.DataFrame) -> bool:
    """Return whether baseline and settings are the same on further seeds, as of a script that does not read them.

    Of the baseline alone that is not told: all of a small split may be right on every seed. Nor where training losses
    differ: of 50 samples as many are right by chance for both on one seed in 7.
    """
    again, first = _on_seeds(trials), trials[is_value(trials, "role", "baseline")]["trial"]

    def change(values: pd.Series[float]) -> pd.Series[float]:
        own = again["candidate"].map(values.set_axis(trials["trial"]).groupby(level=0).first())
        return values[again.index] - own

    both = again["candidate"].isin(first).nunique() == 2
    trained_alike = (change(numbers_of(trials, "train_loss")).fillna(0) == 0).all()
    return both and bool((change(compared_values(trials)) == 0).all() and trained_alike)


def _on_seeds(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the completed runs of the baseline and of settings on further seeds."""
    return trials[is_value(trials, "control", OTHER_SEED) & is_value(trials, "status", "completed")]


def mean_over_seeds(trials: pd.DataFrame, column: str) -> pd.Series[float]:
    """Return the mean of a column over the completed runs of each setting on further seeds, by its number."""
    again = _on_seeds(trials)
    return numbers_of(again, column).groupby(numbers_of(again, "candidate").astype(int)).mean()


def losses_of(trials: pd.DataFrame, split: str | None = None) -> tuple[dict[int, dict[int, float]], float]:
    """Return the losses of a study's settings on further seeds, by number and seed, and their expected deviation.

    Each is against the baseline of the same seed, infinite of a run that failed; there are none where seeds change
    nothing (`ignores_seed`). They are of `compared_values`, or of the column ``split`` alone.
    """
    quality = quality_of(trials)
    if not {"control", "candidate"} <= set(trials):
        return {}, 0.0
    ended = trials[
        trials["control"].isin([OTHER_SEED, SHORTER_ON_SEED]) & trials["status"].isin(["completed", "failed"])
    ]
    baselines = trials[is_value(trials, "role", "baseline") & is_value(trials, "status", "completed")]
    if ended.empty or baselines.empty or ignores_seed(trials):
        return {}, 0.0
    values = numbers_of(trials, split) if split else compared_values(trials)
    expected = 0.0
    if quality.is_accuracy:
        tests = numbers_of(trials, quality.test) if compared_column(trials) == quality.test else None
        own = float(compared_values(trials)[baselines.index[0]])
        expected = expected_deviation(own, numbers_of(trials, quality.name), tests)
    found: dict[int, dict[int, float]] = {}
    shown = values[ended.index].where(ended["status"] == "completed")
    numbers = map(number_of_run, ended["control"], ended["candidate"].astype(int))
    for number, seed, value in zip(numbers, ended["seed"].astype(int), shown, strict=True):
        found.setdefault(number, {})[seed] = value
    beside = {seed: one for seed, one in found.pop(int(baselines["trial"].iloc[0]), {}).items() if math.isfinite(one)}
    losses = {
        number: {
            seed: quality.lost(value, beside[seed]) if math.isfinite(value) else math.inf
            for seed, value in one.items()
            if seed in beside
        }
        for number, one in found.items()
    }
    return losses, expected


#: Columns that `with_seeds` adds: number of further seeds, mean loss with its interval, loss of the worst seed, by how
#: much the mean losses of both splits differ, NaN with one split, whether the mean is within the allowed loss, and the
#: mean shares of compute and time saved.
SEED_COLUMNS = (
    "seeds", "drop_mean", "drop_low", "drop_high", "drop_worst", "drop_splits", "within_over_seeds", "saved_mean",
    "time_saved_mean",
)  # fmt: skip


def with_seeds(ranking: pd.DataFrame, trials: pd.DataFrame, limit: pd.Series) -> pd.DataFrame:
    """Return completed trials with what their settings lose over further seeds, where they were trained on some.

    Args:
        ranking: the completed trials.
        trials: all trials of the study, with what they save (`ranking.relative_to_baseline`).
        limit: the allowed loss of each completed trial.
    """
    losses, expected = losses_of(trials)
    found = over_seeds({number: list(one.values()) for number, one in losses.items()}, expected)
    if not found:
        return ranking
    quality, rows = quality_of(trials), {}
    saved = [mean_over_seeds(trials, name) for name in (SAVED, "time_saved")]
    both = compared_column(trials) == quality.test and quality.name in trials
    splits = [losses_of(trials, name)[0] for name in (quality.name, quality.test)] if both else []
    for number, one in found.items():
        if number < 0:
            continue
        allowed = float(limit[ranking["trial"] == number].max())
        means = [float(np.mean([*split[number].values()])) for split in splits] if math.isfinite(one.mean) else []
        apart = float(np.ptp(means)) if means else math.nan
        means = [float(mean.get(number, math.nan)) for mean in saved]
        rows[number] = (one.n, one.mean, *one.interval, one.worst, apart, one.is_within(allowed), *means)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(SEED_COLUMNS)).reindex(ranking["trial"])
    kinds: dict[str, Any] = {**dict.fromkeys(SEED_COLUMNS, "float64"), "seeds": "Int64", "within_over_seeds": "boolean"}
    return ranking.assign(**{name: table[name].astype(kinds[name]).set_axis(ranking.index) for name in SEED_COLUMNS})
