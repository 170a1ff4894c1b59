"""Results of a study's confirmation: which of its best settings lose no more than allowed on unused seeds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from analysis.formatting import ROUNDING, compared_words
from analysis.io.checked import group_codes, plain
from analysis.io.studies import load
from analysis.io.study_files import Layout
from analysis.metrics.duplicates import outcomes
from analysis.metrics.noise import is_constant, resolution_of
from analysis.metrics.over_seeds import compared_column
from analysis.metrics.saving import quality_of, saved_of
from trainables.errors import UserError
from trainables.quality import Quality, allowed_amount, read_drop
from trainables.savings import SAVED

# --- Confidence of accuracy losses ------------------------------------------------------------------------------------
# A confirmation study trains candidates and the baseline on the same fresh seeds. The difference for a seed compares
# two runs with the same initial weights and data order; therefore pairs are compared and not two means. An interval
# covers retraining with another seed on the same test split, not a change of the test split.

#: Bootstrap resamples of one interval, from a generator with a constant seed.
RESAMPLES = 9999


def confirm_columns(quality: Quality) -> list[str]:
    """Return the columns of `confirm_table` of a study of this metric."""
    return [
        "candidate", "seeds", "failed", "compute_saved", "compute_saved_low", "compute_saved_high",
        "saved", "saved_low", "saved_high", quality.drop, "drop_low", "drop_high", "drop_worst", "confidence",
        "confirmed", "refuted", "compared",
    ]  # fmt: skip


_DTYPES = {
    **dict.fromkeys(("candidate", "seeds", "failed"), "int64"),
    **dict.fromkeys(("confirmed", "refuted"), "bool"),
    "compared": "string",
}
#: Fewest pairs for a confirmation: two differences say almost nothing about their variance.
FEWEST_PAIRS = 3


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Mean of a sample with its confidence interval."""

    mean: float  # mean of the sample
    low: float  # lower end
    high: float  # upper end
    confidence: float  # probability that it and all others of the same comparison cover their means
    n: int  # size of the sample


def paired_interval(
    differences: ArrayLike, *, confidence: float = 0.95, comparisons: int = 1, resolution: float | None = None
) -> Interval:
    """Return the interval of `mean_limits` for one sample of paired differences.

    The (n,) differences are finite, one per seed, n >= 2; ``confidence`` is that of ``comparisons``, >= 1, together;
    ``resolution`` is the least half-width, > 0. UserError: a number is out of range.

    >>> found = paired_interval([0.001, 0.002, 0.0, 0.001], comparisons=5, resolution=0.0005)
    >>> round(found.mean, 4), round(found.low, 4), round(found.high, 4)
    (0.001, -0.0014, 0.0034)
    """
    sample = np.asarray(differences, dtype=float)
    if sample.ndim != 1:
        raise UserError(f"the differences must be one number a seed, got an array of shape {sample.shape}")
    low, high = mean_limits(sample, confidence=confidence, comparisons=comparisons, resolution=resolution)
    return Interval(mean=float(sample.mean()), low=float(low), high=float(high), confidence=confidence, n=len(sample))


def mean_limits(
    samples: ArrayLike,
    *,
    confidence: float = 0.95,
    comparisons: int = 1,
    resolution: float | None = None,
    resamples: int = RESAMPLES,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute confidence intervals for the population mean of each small sample.

    Each covers its mean with probability 1 - (1 - confidence) / comparisons, so that all of them do with `confidence`
    (Bonferroni). Each end is the outermost of three intervals:

    - the bootstrap's percentile interval (`scipy.stats.bootstrap`), taken at the wider level Phi(-sqrt(n / (n - 1)) t)
      instead of Phi(-z), t being Student's quantile with n - 1 degrees of freedom (the *expanded* percentile interval
      of Hesterberg 2015, "What Teachers Should Know About the Bootstrap"). It never extends beyond the smallest and the
      largest value; from about 8 values on it is sometimes the widest;
    - Student's t interval, which is exact for normal samples;
    - the t interval shifted by g (1 + 2 t^2) / (6 n) standard deviations, g being the sample's skewness (Johnson 1978,
      "Modified t tests and confidence intervals for asymmetrical populations", with the quadratic term kept).

    Coverage in %, with Student's t interval alone in brackets; 20,000 samples of size n per cell, standard error below
    0.3; 99 % is 95 % with 5 comparisons. The row *discrete* draws differences of counts over a test set of 599, Poisson
    with means 1 and 0.3 samples; the last row is the same with `resolution` = 1 / 599.

    | differences            | 95 %, n = 3 | n = 5       | n = 10      | 99 %, n = 3 | n = 5       | n = 10      |
    |------------------------|-------------|-------------|-------------|-------------|-------------|-------------|
    | normal                 | 95.6 (94.9) | 95.9 (95.1) | 95.9 (95.2) | 99.2 (99.0) | 99.3 (99.0) | 99.3 (99.1) |
    | heavy-tailed (t, 3 df) | 96.8 (96.3) | 96.6 (96.0) | 96.4 (96.1) | 99.4 (99.2) | 99.6 (99.4) | 99.5 (99.4) |
    | skewed (exponential)   | 89.8 (88.3) | 90.0 (87.8) | 92.4 (89.8) | 97.0 (96.1) | 96.2 (94.8) | 97.0 (95.2) |
    | discrete               | 91.6 (91.6) | 95.5 (95.5) | 95.6 (94.7) | 92.0 (92.0) | 98.9 (98.7) | 98.9 (98.6) |
    | discrete, resolution   | 99.0 (91.6) | 98.4 (95.5) | 99.7 (94.7) | 99.5 (92.0) | 99.9 (98.7) | 99.9 (98.6) |

    The nominal coverage is reached for symmetric differences, including heavy tails. It is not reached where few seeds
    lose much accuracy and most lose none (exponential): three to ten seeds cannot show how long this tail is.

    Equal values give an interval of zero width. This is correct for compute saved, which is counted exactly. An
    accuracy is a count of test samples, so equal differences show only that they vary by less than one sample:
    `resolution` = 1 / number of test samples is then the least distance of either end from the mean.

    Args:
        samples: (..., n) finite numbers, n >= 2; an interval for each sample along the last axis.
        confidence: in (0, 1).
        comparisons: number of intervals, >= 1, that have the confidence together.
        resolution: least half-width in the samples' unit, > 0; None for none.
        resamples: of the bootstrap, >= 1.

    Returns:
        Low and high, each of shape (...). The same samples always give the same interval.

    Raises:
        UserError: a number is out of range.
    """
    values = np.asarray(samples, dtype=float)
    _check_levels(confidence, comparisons, resolution)
    count = values.shape[-1] if values.ndim else 0
    if count < 2:
        raise UserError(f"an interval needs at least two seeds, got {count}: train on more seeds")
    if not np.isfinite(values).all():
        raise UserError("an interval needs finite numbers: leave out seeds without a result")
    from scipy import stats

    quantile = float(stats.t.isf((1 - confidence) / comparisons / 2, count - 1))
    mean, deviation = values.mean(axis=-1), values.std(axis=-1, ddof=1)
    half, least = quantile * deviation / math.sqrt(count), resolution or 0.0
    third = ((values - mean[..., None]) ** 3).mean(axis=-1)
    skewness = np.divide(third, deviation**3, out=np.zeros_like(mean), where=deviation > 0)
    shift = skewness * (1 + 2 * quantile**2) / (6 * count) * deviation
    tail = float(stats.norm.cdf(-math.sqrt(count / (count - 1)) * quantile))
    resampled = stats.bootstrap(
        (values,),
        np.mean,
        axis=-1,
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, 4_000_000 // values.size),
        confidence_level=1 - 2 * tail,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    low = np.min([resampled.low, mean - half, mean - half + shift, mean - least], axis=0)
    high = np.max([resampled.high, mean + half, mean + half + shift, mean + least], axis=0)
    return low, high


def expected_half_width(deviation: float, seeds: int, *, confidence: float = 0.95, comparisons: int = 1) -> float:
    """Return the half-width of Student's interval of a mean of ``seeds`` differences that deviate by so much.

    >>> round(expected_half_width(0.0065, 5), 4)
    0.0081
    """
    from scipy import stats

    return float(stats.t.isf((1 - confidence) / comparisons / 2, seeds - 1)) * deviation / math.sqrt(seeds)


def _check_levels(confidence: float, comparisons: int, resolution: float | None) -> None:
    if not 0 < confidence < 1:
        raise UserError(f"the confidence must be a fraction between 0 and 1, such as 0.95, got {confidence}")
    if comparisons < 1:
        raise UserError(f"the number of comparisons must be >= 1, got {comparisons}")
    if resolution is not None and not (math.isfinite(resolution) and resolution > 0):
        raise UserError(f"the resolution must be > 0, such as 1 / number of test samples, got {resolution}")


def looks_at(seeds: int) -> list[int]:
    """Return the numbers of seeds after which a confirmation that ends once it is decided looks at its results.

    They are fixed before it begins; what share of the error each has is said by `shares_of_error`.

    >>> looks_at(3), looks_at(16)
    ([3], [3, 6, 12, 16])
    """
    found = [FEWEST_PAIRS]
    while found[-1] < seeds:
        found.append(min(seeds, 2 * found[-1]))
    return found


def shares_of_error(seeds: int, looks: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the share of the error that the look at a setting with so many seeds has, and that of all looks so far.

    ``looks`` has the numbers of seeds at which each call of a confirmation was the first to look at its results. The
    first call has the whole error: it may be the only one. The k-th has 2^-k of it beside that: seeds that are added
    because too little was decided are a further chance of being wrong, and all calls together err 1.5 times as often at
    most. The looks of a call, fixed before it begins, share equally (Bonferroni; alpha spending as of Pocock 1977 would
    spend it on the same looks, a little less carefully). A setting keeps the share of the look that its seeds were
    trained for, so that what was decided stays so while other settings go on.

    >>> [shares_of_error(seeds, [[3, 6], [12], [16]]) for seeds in (3, 6, 12, 16)]
    [(0.5, 1.0), (0.5, 1.0), (0.25, 1.25), (0.125, 1.375)]
    """
    calls = {n: call for call, own in enumerate(looks) for n in own}
    if not calls:
        return 1.0, 1.0
    call = calls[min((n for n in calls if n >= seeds), default=max(calls))]
    return (0.5 ** (call + 1) if call else 1) / len(looks[call]), 1.5 - 0.5 ** (call + 1)


def rate_excluded(seeds: int, confidence: float = 0.95) -> float:
    """Return the share of seeds with a large loss that is excluded by as many without one, with this confidence.

    >>> round(rate_excluded(5), 3), round(rate_excluded(59), 3)
    (0.451, 0.05)
    """
    return float(1 - (1 - confidence) ** (1 / seeds))


def confirm_table(
    trials: pd.DataFrame,
    *,
    allowed_drop: float | str,
    confidence: float = 0.95,
    resolution: float | None = None,
    planned: int = 0,
    looks: Sequence[Sequence[int]] = (),
) -> pd.DataFrame:
    """Return what retraining each candidate on fresh seeds showed.

    The accuracy loss is baseline minus candidate in `test_accuracy`, on data the search never used (in `accuracy` where
    the runs have no test split), over the seeds on which both completed; a seed trained several times counts once, with
    its mean. The intervals of each column have `confidence` together, all candidates and looks counting.

    A candidate is *confirmed* if it was trained on at least 3 seeds, failed on none, has mean savings above 0 there,
    and the upper end of its accuracy loss is within the allowed one. It is *refuted* if even the lower end exceeds the
    allowed loss, or if it failed on at least as many seeds as it completed. Equal losses whose resolution is not known
    confirm nothing.

    Args:
        trials: trials of a confirmation study: roles ``baseline`` and ``candidate``, and a column `candidate` with the
            number of the trial that a row confirms.
        allowed_drop: largest accuracy loss allowed, as for `rank`; a relative one is of the baselines' mean.
        confidence: in (0, 1).
        resolution: 1 / number of test samples, see `mean_limits`; only for accuracy losses.
        planned: number of selected candidates, where some have not begun yet.
        looks: those of its calls, see `shares_of_error`; none for one look.

    One row per candidate, confirmed ones first, then by `saved`, largest first: `candidate`, `seeds` (pairs), `failed`
    (seeds on which it failed and the baseline did not), means and intervals of training compute saved, of the compute
    that the study ranks by (`saved`) and of the accuracy loss (fractions; intervals NaN below two pairs), the largest
    loss of a seed, `confidence`, `confirmed`, `refuted`, and `compared`, the accuracy that was compared, in words.
    UserError: a number is out of range, or the trials are not of a confirmation study.

    >>> trials = pd.DataFrame({
    ...     "role": ["baseline"] * 3 + ["candidate"] * 3, "candidate": [None] * 3 + [17] * 3, "seed": [1, 2, 3] * 2,
    ...     "status": "completed", "test_accuracy": [0.97, 0.96, 0.98, 0.968, 0.957, 0.979],
    ...     "compute_saved": [0.0] * 3 + [0.3] * 3,
    ... })
    >>> table = confirm_table(trials, allowed_drop=0.005)
    >>> table[["candidate", "seeds", "accuracy_drop", "drop_low", "drop_high", "confirmed"]].round(4).values.tolist()
    [[17, 3, 0.002, -0.0005, 0.0045, True]]
    """
    quality = quality_of(trials)
    allowed_drop = read_drop(allowed_drop, quality)
    _check_levels(confidence, 1, resolution)
    if "candidate" not in trials.columns:
        raise UserError(
            "the trials have no column 'candidate': give those of a confirmation study (python -m tune_cac confirm)"
        )
    needed = ["role", "candidate", "seed", "status", "compute_saved"]
    trials = plain(trials, needed=needed if quality.name in trials else [*needed, quality.test])
    # A run's baseline has its seed and, where the study searched options of the workload, its options.
    trials["pair"] = group_codes(trials, [column for column in ("seed", "options") if column in trials.columns])
    name = compared_column(trials)
    baseline = trials[(trials["status"] == "completed") & (trials["role"] == "baseline")].groupby("pair")[name].mean()
    attempts = trials[(trials["role"] == "candidate") & trials["candidate"].notna()].astype({"candidate": "int64"})
    done = attempts[attempts["status"] == "completed"]
    done = done.assign(**{SAVED: saved_of(done)})
    runs = done.groupby(["candidate", "pair"])[[name, "compute_saved", SAVED]].mean().reset_index()
    references = runs["pair"].map(baseline).astype(float)
    runs["drop"] = quality.sign * (references - runs[name])
    runs["limit"] = allowed_amount(allowed_drop, references)
    runs = runs.dropna(subset=["drop", "compute_saved", SAVED])
    words = compared_words(quality, tested=name == quality.test)
    candidates = attempts["candidate"].unique()
    comparisons = max(len(candidates), planned)
    rows = []
    for number in candidates:
        own = runs[runs["candidate"] == number]
        failures = attempts[(attempts["candidate"] == number) & (attempts["status"] == "failed")]
        failed = (set(failures["pair"]) & set(baseline.index)) - set(own["pair"])
        limit = float(own["limit"].mean()) + ROUNDING
        share, spent = (1 - confidence) * np.array(shares_of_error(len(own), looks))
        compute, saved, drop = (
            _mean_and_limits(own[column], 1 - share, comparisons, unit)
            for column, unit in (("compute_saved", None), (SAVED, None), ("drop", resolution))
        )
        varies = resolution is not None or not is_constant(own["drop"])
        within = drop[2] <= limit and varies  # NaN is not
        confirmed = within and len(own) >= FEWEST_PAIRS and not failed and saved[0] > 0
        refuted = drop[1] > limit or (bool(failed) and len(failed) >= len(own))
        found = (int(number), len(own), len(failed), *compute, *saved, *drop, own["drop"].max())
        rows.append((*found, 1 - spent, confirmed, refuted, words))
    columns = confirm_columns(quality)
    table = pd.DataFrame(rows, columns=columns).astype({column: _DTYPES.get(column, "float64") for column in columns})
    return table.sort_values(["confirmed", SAVED, "candidate"], ascending=[False, False, True], ignore_index=True)


def _mean_and_limits(
    column: pd.Series, confidence: float, comparisons: int, resolution: float | None
) -> tuple[float, float, float]:
    values = column.to_numpy(dtype=float)
    if len(values) < 2:
        return (float(values[0]) if len(values) else math.nan, math.nan, math.nan)
    found = paired_interval(values, confidence=confidence, comparisons=comparisons, resolution=resolution)
    return (found.mean, found.low, found.high)


def read_confirmation(layout: Layout, ranking: pd.DataFrame, *, allowed_drop: float | str) -> pd.DataFrame | None:
    """Return the table of a study's confirmation (`analysis.confirm_table`), None where there is none or no candidate.

    Candidates get the number of their outcome in the study's ranking (`duplicates`), as a trial that ended later may
    have the same outcome. Warns where the confirmation cannot be read, and returns None.
    """
    child = layout.confirmation
    if not child.info.is_file() or not child.journal.is_file():
        return None
    try:
        trials, info = load(child.root), child.read_info()
    except UserError as error:
        warnings.warn(f"the confirmation cannot be read: {error}", stacklevel=2)
        return None
    table = confirm_table(
        trials,
        allowed_drop=allowed_drop,
        resolution=resolution_of(trials[compared_column(trials)]) if quality_of(trials).is_accuracy else None,
        planned=len(info.candidates),
        looks=info.looks,
    )
    named = dict(zip(ranking["trial"], outcomes(ranking), strict=True))
    table["candidate"] = table["candidate"].map(lambda number: named.get(number, number)).astype("int64")
    return table if len(table) else None


def confirmation_of(confirmation: pd.DataFrame | None, trial: pd.Series) -> pd.Series | None:
    """Return the confirmation's row for the outcome of a ranked trial; None where that was not retrained."""
    if confirmation is None:
        return None
    earlier = trial.get("duplicate_of")  # its outcome is that of the earliest trial
    number = trial["trial"] if earlier is None or pd.isna(earlier) else earlier
    rows = confirmation[confirmation["candidate"] == int(number)]
    return None if rows.empty else rows.iloc[0]


def compared(row: pd.Series) -> str:
    """Return the name of the accuracy that was compared, such as "test accuracy".

    Earlier versions compared only the accuracy on the test split and did not record its name.
    """
    return str(row.get("compared", "test accuracy"))


def retrained_saving(row: pd.Series) -> float:
    """Return what a candidate saves of the ranked compute on fresh seeds; in old tables, of the training compute."""
    return float(row.get("saved", row["compute_saved"]))


def without_refuted(ranking: pd.DataFrame, confirmation: pd.DataFrame | None) -> pd.DataFrame:
    """Return the ranking without the outcomes that the confirmation refuted."""
    if confirmation is None:
        return ranking
    return ranking[~outcomes(ranking).isin(confirmation.loc[confirmation["refuted"], "candidate"])]
