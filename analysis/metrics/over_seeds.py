"""Loss of settings over seeds that did not choose them: its mean, how closely that is known, and what it decides.

A search chooses settings on one seed, whose noise favours some of them. What would be the answer is trained on further
seeds, beside the baseline, and its losses there, each against the baseline of the same seed, are taken as normal. The
value of a run is the mean of both splits', which varies less from seed to seed than either.

Symbols: d (n,) losses of a setting on n further seeds; s standard deviation of d, pooled over all settings; s0 what it
is expected to be (`noise.seed_noise`), which counts as much as `EXPECTED_DF` degrees of freedom. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.formatting import ROUNDING
from analysis.io.checked import is_value, numbers_of
from analysis.metrics.noise import resolution_of, seed_noise
from analysis.metrics.saving import quality_of
from trainables.quality import Quality

#: Values of the column ``control``: a setting, or the baseline, that is trained again on a further seed, its number in
#: the column ``candidate``; and the dense run cut to the compute of a setting of that number.
OTHER_SEED, SHORTER_ON_SEED = "other seed", "shorter on other seed"
#: Confidence of the interval that is stated.
CONFIDENCE = 0.95
#: One-sided confidence with which the mean is within the allowed loss, of an answer that has all its seeds, and with
#: which it is within or beyond that, so that no more are trained. More certainty costs more than it gives
#: (docs/findings.md "Seeds").
DECIDES, DECIDES_EARLY = 2 / 3, 0.95
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

    def is_within(self, allowed: float, confidence: float) -> bool:
        """Return whether the mean is within the allowed loss with a confidence; by itself where no noise is known."""
        return (self.at_most(confidence) if self.df else self.mean) <= allowed + ROUNDING

    def decides(self, allowed: float, seeds: int) -> str:
        """Return whether the mean is within the allowed loss or beyond, with so many further seeds planned."""
        if math.isinf(self.mean):
            return BEYOND
        if self.n >= seeds:
            return WITHIN if self.is_within(allowed, DECIDES) else BEYOND
        if self.n > 1 and self.df and self.is_within(allowed, DECIDES_EARLY):
            return WITHIN
        return BEYOND if self.at_most(1 - DECIDES_EARLY) > allowed else OPEN


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
    deviation = math.sqrt(squares / df) if df else math.nan
    return {
        number: OverSeeds(
            n=len(one), mean=float(one.mean()), worst=float(one.max()), deviation=deviation / math.sqrt(len(one)), df=df
        )
        for number, one in known.items()
    }


def paired_losses(
    runs: Iterable[tuple[int, int, float]], baseline: int, own: float, quality: Quality
) -> dict[int, dict[int, float]]:
    """Return the losses against the baseline of the same seed, by setting and seed; none where seeds change nothing.

    Args:
        runs: number of the setting, seed, and value of the metric; NaN of a run that failed, whose loss is infinite.
        baseline: the baseline's number.
        own: its value on the study's own seed.
        quality: the metric.
    """
    values: dict[int, dict[int, float]] = {}
    for number, seed, value in runs:
        values.setdefault(number, {})[seed] = value
    baselines = {seed: value for seed, value in values.pop(baseline, {}).items() if math.isfinite(value)}
    if ignores_seed(own, list(baselines.values())):
        return {}
    return {
        number: {
            seed: quality.lost(value, baselines[seed]) if math.isfinite(value) else math.inf
            for seed, value in found.items()
            if seed in baselines
        }
        for number, found in values.items()
    }


def ignores_seed(own: float, others: Sequence[float]) -> bool:
    """Return whether a run has the same value on several further seeds, as that of a script that does not read them."""
    return len(others) > 1 and all(value == own for value in others)


def both_splits(values: Any, test: Any) -> Any:
    """Return the mean of the values of both splits, which may have any shape; that of validation without a test split.

    >>> both_splits(0.5, 0.75), both_splits(0.5, None)
    (0.625, 0.5)
    """
    return values if test is None else (values + test) / 2


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


def losses_of(trials: pd.DataFrame) -> tuple[dict[int, dict[int, float]], float]:
    """Return the losses of a study's settings on further seeds (`paired_losses`), and their expected deviation."""
    quality = quality_of(trials)
    if "control" not in trials:
        return {}, 0.0
    ended = trials[
        trials["control"].isin([OTHER_SEED, SHORTER_ON_SEED]) & trials["status"].isin(["completed", "failed"])
    ]
    baselines = trials[is_value(trials, "role", "baseline") & is_value(trials, "status", "completed")]
    if ended.empty or baselines.empty or "candidate" not in trials:
        return {}, 0.0
    first, tests = baselines.iloc[0], None
    if compared_column(trials) == quality.test:
        tests = numbers_of(trials, quality.test)
    values = both_splits(numbers_of(trials, quality.name), tests)
    own, expected = float(values[baselines.index[0]]), 0.0
    if quality.is_accuracy:
        expected = expected_deviation(own, numbers_of(trials, quality.name), tests)
    shown = values[ended.index].where(ended["status"] == "completed")
    numbers = map(number_of_run, ended["control"], ended["candidate"].astype(int))
    runs = zip(numbers, ended["seed"].astype(int), shown, strict=True)
    return paired_losses(runs, int(first["trial"]), own, quality), expected


#: Columns that `with_seeds` adds: number of further seeds, mean loss with its interval, loss of the worst seed, and
#: whether the mean is within the allowed loss: NA where it is, but not with enough confidence.
SEED_COLUMNS = ("seeds", "drop_mean", "drop_low", "drop_high", "drop_worst", "within_over_seeds")


def with_seeds(ranking: pd.DataFrame, trials: pd.DataFrame, limit: pd.Series) -> pd.DataFrame:
    """Return completed trials with what their settings lose over further seeds, where they were trained on some.

    Args:
        ranking: the completed trials.
        trials: all trials of the study.
        limit: the allowed loss of each completed trial.
    """
    losses, expected = losses_of(trials)
    found = over_seeds({number: list(one.values()) for number, one in losses.items()}, expected)
    if not found:
        return ranking
    rows = {}
    for number, one in found.items():
        if number < 0:
            continue
        allowed = float(limit[ranking["trial"] == number].max())
        within = True if one.is_within(allowed, DECIDES) else False if one.mean > allowed + ROUNDING else pd.NA
        rows[number] = (one.n, one.mean, *one.interval, one.worst, within)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(SEED_COLUMNS)).reindex(ranking["trial"])
    kinds: dict[str, Any] = {**dict.fromkeys(SEED_COLUMNS, "float64"), "seeds": "Int64", "within_over_seeds": "boolean"}
    return ranking.assign(**{name: table[name].astype(kinds[name]).set_axis(ranking.index) for name in SEED_COLUMNS})
