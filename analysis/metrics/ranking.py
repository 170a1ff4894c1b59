"""Ranking of trials by compute saved and accuracy loss, or the drop of another metric; docs/analysis.md defines it.

What is said of accuracy holds for a study's own metric, too: a higher accuracy is a better value of it. The front uses
accuracy among trials of one study, workload and seed; among several, and among combinations of searched options of the
workload, it uses the accuracy loss of each against its own baseline. A trial that lacks one of the two objectives comes
after the others of its kind, and is on no front.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import ROUNDING
from analysis.io.checked import check_distinct_trials, group_codes, is_value, keys_of, number_of, numbers_of, plain
from analysis.metrics.duplicates import duplicate_of
from analysis.metrics.noise import resolution_of, seed_noise
from analysis.metrics.over_seeds import (
    LESS,
    OTHER_SEED,
    SHORTER_ON_SEED,
    OverSeeds,
    losses_of,
    over_seeds,
    shorter_of,
    with_seeds,
)
from analysis.metrics.pareto import non_dominated
from analysis.metrics.saving import quality_of, ranks_by_training, saved_of
from trainables.errors import UserError
from trainables.metrics import RELATIVE
from trainables.quality import ACCURACY, Quality, allowed_amount, default_drop, read_drop
from trainables.savings import SAVED, share_saved


def reference_values(rows: pd.DataFrame, quality: Quality) -> pd.Series[float]:
    """Return the baseline's value for each row, which is the row's own value and its drop."""
    return rows[quality.name] + quality.sign * rows[quality.drop]


def allowed_limit(ranking: pd.DataFrame, allowed_drop: float | str) -> float:
    """Return an allowed drop in the metric's unit, a relative one of the mean baseline; NaN where there is none."""
    baselines = ranking[is_value(ranking, "role", "baseline")]
    return float(allowed_amount(allowed_drop, float(numbers_of(baselines, quality_of(ranking).name).mean())))


#: Column added, and the column of which it is the saved share.
_SAVED = {
    "time_saved": "train_time_s",
    "communication_saved": "gradient_bytes",
    "optimizer_bytes_saved": "optimizer_bytes",
    "peak_memory_saved": "peak_memory_bytes",
}
#: Columns of the baseline with which trials are compared, beside those of the metric.
_REFERENCE = ("epochs", "dense_flops", "backward_flops", *_SAVED.values())


def relative_names(quality: Quality) -> list[str]:
    """Return the columns that `relative_to_baseline` adds to trials of this metric, in order."""
    own = {"accuracy_drop": quality.drop, "test_accuracy_drop": quality.test_drop}
    return [own.get(metric.name, metric.name) for metric in RELATIVE]


def relative_to_baseline(trials: pd.DataFrame) -> pd.DataFrame:
    """Return trials with the columns of `trainables.metrics.RELATIVE`: drops of the metric, shares saved.

    Each is compared with the completed trial of role ``baseline`` of its study, workload, seed and searched options (as
    far as there are such columns); with several, with the mean of the longest ones. Without one, columns keep their
    values, NaN where there are none yet. `saved`, the compute that the study ranks by, needs no baseline.

    Of trials with another number of epochs than their baseline, such as a cut dense run, or another full budget in
    FLOPs, such as a script that knows only what it executed, `compute_saved` and `backward_saved` are recomputed
    against the baseline's: ``1 - executed_flops / dense_flops``, and likewise. UserError: a column of numbers holds
    text.

    >>> trials = pd.DataFrame({
    ...     "role": ["baseline", "search", "search"], "status": "completed", "seed": [0, 0, 1],
    ...     "accuracy": [0.97, 0.96, 0.99], "train_time_s": [10.0, 8.0, 8.0],
    ... })
    >>> relative_to_baseline(trials)[["accuracy_drop", "time_saved"]].round(3).values.tolist()
    [[0.0, 0.0], [0.01, 0.2], [nan, nan]]
    """
    attrs, trials = trials.attrs, plain(trials)
    _add_relative(trials)
    trials.attrs = dict(attrs)
    return trials


def _add_relative(trials: pd.DataFrame) -> None:
    """Add the columns of `relative_to_baseline` to a frame; columns are replaced, so a shallow copy is sufficient."""
    quality = quality_of(trials)
    baseline, compared = _baseline_of_each(trials, quality)

    def saved(spent: str, whole: str) -> pd.Series[float]:
        return share_saved(numbers_of(trials, spent), baseline[whole].where(baseline[whole] > 0))

    relative = {
        name: quality.sign * (baseline[measured] - numbers_of(trials, measured)) + 0.0  # no negative zero
        for name, measured in ((quality.drop, quality.name), (quality.test_drop, quality.test))
    }
    relative |= {name: saved(spent, spent) for name, spent in _SAVED.items()}
    for name, values in relative.items():
        trials[name] = values if compared.all() else values.where(compared, numbers_of(trials, name))
    epochs = numbers_of(trials, "epochs")
    other_length = epochs.notna() & baseline["epochs"].notna() & (epochs != baseline["epochs"])
    # The mean budget of several baselines may differ from each of them by rounding.
    whole = baseline["dense_flops"]
    other_budget = (numbers_of(trials, "dense_flops") - whole).abs() > 1e-9 * whole.where(whole > 0)
    for name, spent, budget in (
        ("compute_saved", "executed_flops", "dense_flops"),
        ("backward_saved", "backward_flops", "backward_flops"),
    ):
        restated = saved(spent, budget)
        here = other_length | (other_budget & restated.notna())
        if here.any():
            trials[name] = numbers_of(trials, name).where(~here, restated)
    if "compute_saved" in trials.columns:
        trials[SAVED] = saved_of(trials)


def _baseline_of_each(trials: pd.DataFrame, quality: Quality) -> tuple[pd.DataFrame, pd.Series[bool]]:
    """Return the baseline's values for each trial (float64, NaN where there is none), and whether it has a baseline."""
    group, done = _groups(trials), _is_done_baseline(trials)
    numbers = pd.DataFrame(
        {name: numbers_of(trials, name).to_numpy() for name in (quality.name, quality.test, *_REFERENCE)}
    )
    candidates, own = numbers[done], group[done]
    most = candidates["epochs"].groupby(own).transform("max")
    longest = ((candidates["epochs"] == most) | most.isna()).to_numpy()
    found = candidates[longest].groupby(own[longest]).mean().reindex(group).set_axis(trials.index)
    return found, pd.Series(np.isin(group, own), index=trials.index)


def _is_done_baseline(trials: pd.DataFrame) -> NDArray[np.bool_]:
    """Return a mask of the completed baselines, those on further seeds among them."""
    found = is_value(trials, "role", "baseline")
    if "candidate" in trials.columns:
        again = is_value(trials, "control", OTHER_SEED) & trials["candidate"].isin(trials.loc[found, "trial"])
        found |= again.fillna(False).astype(bool)
    return (found & is_value(trials, "status", "completed")).to_numpy()


def _baseline_numbers(trials: pd.DataFrame) -> pd.Series[int] | None:
    """Return the number of the baseline that each trial is compared with; None unless studies search options."""
    if "options" not in trials.columns or trials["options"].nunique() < 2:
        return None
    done, group = _is_done_baseline(trials), _groups(trials)
    first = trials.loc[done, "trial"].groupby(group[done]).first()
    return first.reindex(group).set_axis(trials.index).astype("Int64")


def baseline_of(trials: pd.DataFrame, row: pd.Series) -> pd.Series:
    """Return the row of a baseline in a study, of the options of a trial if the study searches options."""
    rows = trials[trials["role"] == "baseline"]
    own = row.get("options")
    if own is not None and not pd.isna(own):
        rows = rows[rows["options"] == own]
    return rows.iloc[0]


def _groups(trials: pd.DataFrame) -> NDArray[np.int64]:
    """Return (N,) group numbers; trials of equal study, workload, seed and searched options share a baseline."""
    return group_codes(trials, keys_of(trials))


def _are_several(trials: pd.DataFrame) -> bool:
    return len(np.unique(_groups(trials))) > 1


# --- Controls: cut dense runs of the same compute ---------------------------------------------------------------------
# A setting that saves 30 % of the compute with an accuracy loss of 0.3 points is useless if training for 70 % of the
# epochs, with the schedule shortened accordingly, reaches the same accuracy. Settings are compared with a line through
# the baseline, which saves nothing, and the cut dense runs. At a saving s its value is the larger of:
#
# - the linear interpolation between the neighbours of s (a length in between would give about this accuracy);
# - the best accuracy of all cut dense runs that save at least s, as a larger saving is acceptable, too.
#
# The line ends at the shortest of them; settings that save more are not compared. Both sides are single trainings:
# within one sample of the validation split, and within the noise of another seed (`noise`), they are alike.
# Compute is always that of training: in a study that ranks by inference compute, or by both, no trial is compared.

#: Role of a cut dense run that is a result of its own: the search chose its length, and searches stops on it.
CUT = "cut"
#: Value of the column ``control``; `over_seeds` has those of runs on further seeds.
SHORTER = "shorter"
#: Results of the comparison of a setting with a cut dense run.
AHEAD, ALIKE, BEHIND = "ahead", "alike", "behind"


def is_control(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the rows that are controls."""
    return trials["role"] == "control"


def is_cut(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the rows that train fewer epochs than their study's full run."""
    return trials["of_epochs"].notna() if "of_epochs" in trials.columns else pd.Series(False, index=trials.index)


def is_shorter(trials: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of the cut dense runs, whose savings and values are the line of `control_line`."""
    return is_value(trials, "control", SHORTER)


def dense_alike(trials: pd.DataFrame, control: pd.Series) -> list[Any] | None:
    """Return the labels of whole runs that stop nothing, are no controls, and have one's norms and learning rates.

    None for a control without such settings, which trains as the baseline.
    """
    if number_of(control, "CAC_VAR_START_THR") != -1:
        return None
    factors, factor = numbers_of(trials, "CAC_LR_FACTOR"), number_of(control, "CAC_LR_FACTOR")
    alike = (numbers_of(trials, "CAC_VAR_START_THR") == -1) & ~is_cut(trials) & ~is_value(trials, "role", "control")
    alike &= is_value(trials, "CAC_NORM_STATISTICS", "hold_all") == (
        str(control.get("CAC_NORM_STATISTICS")) == "hold_all"
    )
    alike &= factors.fillna(1.0) == (1.0 if math.isnan(factor) else factor)
    return list(trials.index[alike])


def control_line(trials: pd.DataFrame) -> pd.DataFrame:
    """Return savings and accuracies of the baseline and of the controls of kind ``shorter`` of one study, ascending.

    Columns: ``trial``, ``epochs``, ``compute_saved`` (against the baseline's budget), ``accuracy`` or the study's
    metric; no rows without a completed baseline or cut dense run. ``line.attrs``: ``quality`` (the metric),
    ``resolution`` (one sample of the validation split as a fraction, None where it is not known), ``losses`` and
    ``expected`` (of all settings on further seeds, see `over_seeds.losses_of`), and ``epochs`` and ``saved`` of the
    dense runs cut to the compute of a setting there, by its number. UserError: a column is missing or holds text
    instead of numbers; the controls are of several studies or seeds.

    >>> trials = pd.DataFrame({
    ...     "trial": [0, 1, 2, 3], "role": ["baseline", "search", "control", "control"], "status": "completed",
    ...     "control": [None, None, "shorter", "shorter"], "epochs": [10, 10, 8, 6],
    ...     "accuracy": [0.97, 0.965, 0.968, 0.95], "compute_saved": [0.0, 0.3, 0.2, 0.4],
    ... })
    >>> control_line(trials).values.tolist()
    [[0.0, 10.0, 0.0, 0.97], [2.0, 8.0, 0.2, 0.968], [3.0, 6.0, 0.4, 0.95]]
    """
    quality = quality_of(trials)
    columns = ["trial", "epochs", "compute_saved", quality.name]
    trials = plain(trials, needed=("trial", "role", "status", *columns[1:]))
    done = trials[is_value(trials, "status", "completed")]
    # A script that reports only `compute_saved` has none for another number of epochs.
    shorter = done[is_shorter(done) & done["compute_saved"].notna()]
    if _are_several(shorter):
        raise UserError("a line of controls is of one study and seed, got several: pick the rows of one")
    same = np.isin(_groups(done), _groups(done)[is_shorter(done).to_numpy()])
    baseline = done[is_value(done, "role", "baseline") & same].head(1)
    if len(shorter) and (alike := dense_alike(done, shorter.iloc[0])) is not None:
        # They begin where such a run ends uncut.
        baseline = done.loc[alike].head(1)
    line = pd.concat([baseline, shorter])[columns]
    if shorter.empty or baseline.empty:
        line = line.iloc[:0]
    line = line.iloc[np.lexsort((line[quality.name] * quality.sign, line["compute_saved"]))].reset_index(drop=True)
    line.attrs["quality"] = quality
    if len(line):
        line.attrs["resolution"] = resolution_of(done[quality.name]) if quality.is_accuracy else None
        line.attrs["losses"], line.attrs["expected"] = losses_of(trials)
        on_seeds = trials[is_value(trials, "control", SHORTER_ON_SEED)]
        if len(on_seeds):
            of_each = on_seeds.groupby(on_seeds["candidate"].astype(int))
            line.attrs["epochs"] = of_each["epochs"].last().astype(int)
            line.attrs["saved"] = of_each["compute_saved"].mean()
    return line


def _quality_of(line: pd.DataFrame) -> Quality:
    found: Quality = line.attrs.get("quality", ACCURACY)
    return found


def accuracy_when_shorter(line: pd.DataFrame, saved: Any) -> NDArray[np.float64]:
    """Return (N,) values of the metric that cut dense runs reach at these savings; NaN beyond the shortest.

    >>> line = pd.DataFrame({"compute_saved": [0.0, 0.2, 0.4], "accuracy": [0.97, 0.968, 0.95]})
    >>> accuracy_when_shorter(line, [0.1, 0.3, 0.5]).round(4).tolist()
    [0.969, 0.959, nan]
    """
    wanted = np.asarray(saved, dtype=np.float64)
    found = np.full(wanted.shape, np.nan)
    if len(line) == 0:
        return found
    quality = _quality_of(line)
    at, good = line["compute_saved"].to_numpy(float), quality.sign * line[quality.name].to_numpy(float)
    best_beyond = np.maximum.accumulate(good[::-1])[::-1]  # among the trainings that save at least as much
    place = np.searchsorted(at, wanted - ROUNDING)
    inside = place < len(at)
    found[inside] = quality.sign * np.maximum(np.interp(wanted[inside], at, good), best_beyond[place[inside]])
    return found


def insignificant_difference(line: pd.DataFrame, accuracy: Any) -> NDArray[np.float64]:
    """Return the difference up to which a setting and a cut dense run are alike: a sample or the seed noise.

    The accuracy may have any shape. Of other metrics than an accuracy neither is known: 0.
    """
    quality = _quality_of(line)
    if not quality.is_accuracy:
        return np.zeros_like(np.asarray(accuracy, dtype=np.float64))
    resolution = line.attrs.get("resolution") or resolution_of(line[quality.name])
    return np.maximum(seed_noise(accuracy, resolution), resolution or 0.0)


def beats_shorter(trials: pd.DataFrame, line: pd.DataFrame) -> pd.Series[Any]:
    """Return whether each trial is better in the metric than a cut dense run of the same compute.

    That is ``ahead``, ``behind`` or ``alike``: over further seeds where that run was trained on them (`over_shorter`),
    else by one seed (`beats_on_one_seed`), NA beyond the line's end. NA for the line's own points, for trials that save
    nothing or did not complete, and where the study ranks by other compute than that of training.

    >>> line = pd.DataFrame({"compute_saved": [0.0, 0.2, 0.4], "accuracy": [0.97, 0.968, 0.95]})
    >>> trials = pd.DataFrame({
    ...     "status": "completed", "accuracy": [0.97, 0.9, 0.99, 0.96, 0.97],
    ...     "compute_saved": [0.0, 0.1, 0.3, 0.3, 0.6],
    ... })
    >>> beats_shorter(trials, line).tolist()
    [<NA>, 'behind', 'ahead', 'alike', <NA>]
    """
    words = beats_on_one_seed(trials, line)
    if line.attrs.get("losses") and "trial" in trials:
        trials = plain(trials)
        for place in np.flatnonzero(_may_beat(trials)):
            if (found := ahead_of_shorter(trials.iloc[place], line)) is not None:
                words.iloc[int(place)] = over_shorter(found[2])
    return words


def beats_on_one_seed(trials: pd.DataFrame, line: pd.DataFrame) -> pd.Series[Any]:
    """Return `beats_shorter` by the study's own seed alone, within `insignificant_difference`."""
    quality = _quality_of(line)
    trials = plain(trials, needed=("status", quality.name, "compute_saved"))
    saved, value = trials["compute_saved"].astype(float), trials[quality.name].astype(float).to_numpy()
    reached = accuracy_when_shorter(line, saved)
    more = quality.sign * (value - reached)
    nothing = insignificant_difference(line, (value + reached) / 2) + ROUNDING
    words = pd.Series(np.select([more > nothing, more < -nothing], [AHEAD, BEHIND], ALIKE), index=trials.index)
    return words.astype("string").mask(~_may_beat(trials).to_numpy() | np.isnan(reached))


def _may_beat(trials: pd.DataFrame) -> pd.Series[bool]:
    saves = trials["compute_saved"].astype(float) > ROUNDING
    return is_value(trials, "status", "completed") & saves & ~is_shorter(trials) & ranks_by_training(trials)


def over_shorter(ahead: OverSeeds) -> str:
    """Return the word for what a setting loses less than a cut dense run over further seeds, by its interval."""
    low, high = ahead.interval
    return AHEAD if low > 0 else BEHIND if high < 0 else ALIKE


def ahead_of_shorter(best: pd.Series, line: pd.DataFrame) -> tuple[int, OverSeeds, OverSeeds] | None:
    """Return the epochs of the dense run cut to a setting's compute, its loss, and what the setting loses less.

    Both are over further seeds; None where that run was not trained on them.
    """
    losses, expected = line.attrs.get("losses", {}), line.attrs.get("expected", 0.0)
    number = int(best["trial"])
    own, its = losses.get(number, {}), losses.get(shorter_of(number), {})
    its = {seed: loss for seed, loss in its.items() if math.isfinite(loss - own.get(seed, math.nan))}  # none failed
    if not its:
        return None
    found = over_seeds({0: [*its.values()], 1: [loss - own[seed] for seed, loss in its.items()]}, expected)
    return line.attrs["epochs"][number], found[0], found[1]


#: Decimals of an accuracy loss that count: differences of equal counts over equal splits agree to about 1e-16.
_DECIMALS = 12


def rank(trials: pd.DataFrame, *, allowed_drop: float | str | None = None) -> pd.DataFrame:
    """Return the completed trials, best first.

    First trials within the allowed accuracy loss by `saved`, then the others by their loss (smallest first). Ties are
    ordered by higher accuracy, then by earlier trial.

    Args:
        trials: one row per trial.
        allowed_drop: largest accuracy loss allowed against the baseline, a fraction in [0, 1); of another metric its
            largest drop in its unit, >= 0; or text such as ``2%`` of the baseline's value. By default 0.005, and 1 % of
            a metric that is no fraction.

    Before the other columns stand `rank` (from 1), `within_drop`, `on_front` (the Pareto front of accuracy and `saved`)
    and `duplicate_of` (Int64: an earlier trial, see `duplicates`); where a study searches options of the workload also
    `baseline` (Int64: the trial of the same options that it is compared with), and where the search trained settings on
    further seeds, what `over_seeds.with_seeds` adds.

    UserError: the allowed loss is out of range, a column is missing, or a trial occurs twice. UserWarning: some of
    several studies, workloads or seeds have no completed baseline, or there is none at all.

    >>> trials = pd.DataFrame({
    ...     "trial": [0, 1, 2, 3], "role": ["baseline", "search", "search", "search"], "status": "completed", "seed": 0,
    ...     "accuracy": [0.975, 0.972, 0.95, 0.94], "compute_saved": [0.0, 0.3, 0.5, 0.4],
    ... })
    >>> rank(trials, allowed_drop=0.005)[["rank", "trial", "within_drop", "on_front"]].values.tolist()
    [[1, 1, True, True], [2, 0, True, True], [3, 2, False, True], [4, 3, False, False]]
    """
    quality = quality_of(trials)
    allowed_drop = default_drop(quality) if allowed_drop is None else read_drop(allowed_drop, quality)
    attrs, trials = trials.attrs, plain(trials, needed=("trial", "role", "status", quality.name, "compute_saved"))
    trials = trials.reset_index(drop=True).copy()  # one block a type: pandas warns of frames in more than 100
    check_distinct_trials(trials)
    _add_relative(trials)
    done = trials[is_value(trials, "status", "completed") & ~is_value(trials, "role", "control")].copy(deep=False)
    several = _are_several(done)
    if several or not is_value(trials, "role", "baseline").any():
        _warn_of_missing_baselines(done, trials)
    limit = allowed_amount(allowed_drop, reference_values(done, quality))
    done["within_drop"] = (done[quality.drop] <= limit + ROUNDING).astype(bool)  # False where it is not known
    gain = -done[quality.drop].round(_DECIMALS) if several else quality.sign * numbers_of(done, quality.name)
    values = np.column_stack([gain, done[SAVED]])
    known = np.flatnonzero(~np.isnan(values).any(axis=1))
    done["on_front"] = np.isin(np.arange(len(done)), known[non_dominated(values[known])])
    done["duplicate_of"] = duplicate_of(done)
    if not several:
        done = with_seeds(done, trials, pd.Series(limit, index=done.index))
    if "seeds" in done:  # what one of them says is no longer asked
        over = done["within_over_seeds"].fillna(True).where(done["seeds"].notna(), done["within_drop"])
        done["within_drop"] = over.astype(bool)
    front = ["trial", "role", "within_drop", "on_front", quality.name, quality.drop, "compute_saved", "duplicate_of"]
    if (numbers := _baseline_numbers(trials)) is not None:
        done["baseline"] = numbers
        front.insert(2, "baseline")
    keys = (  # the last one is the primary one
        done["trial"],
        -quality.sign * done[quality.name],
        -on_average(done).where(done["within_drop"], 0),
        done[quality.drop].where(~done["within_drop"], 0),
        ~done["within_drop"],
    )
    done = done.iloc[np.lexsort(keys)].reset_index(drop=True)
    done = done[front + [name for name in done.columns if name not in front]]
    done.insert(0, "rank", np.arange(1, len(done) + 1))
    done.attrs = dict(attrs)
    return done


def on_average(ranking: pd.DataFrame, saved: str = SAVED) -> pd.Series[float]:
    """Return a share saved by each setting: its mean over further seeds, where rules stop otherwise, else its own."""
    return numbers_of(ranking, f"{saved}_mean").fillna(numbers_of(ranking, saved))


def best(ranking: pd.DataFrame) -> pd.Series | None:
    """Return the setting that saves most of those whose mean over further seeds is within the allowed accuracy loss.

    Of those with most seeds: a search may have ended amid a setting's. What saves nothing on average is none. Where
    there is none: the first that is within it on the search's own seed, of those that were not tried on others and save
    less than what was. None if there is none.

    >>> ranking = pd.DataFrame({"trial": [2, 1, 0], "within_drop": [False, True, True]})
    >>> int(best(ranking)["trial"])
    1
    >>> best(ranking.head(1)) is None
    True
    >>> within = pd.array([True, True, True], dtype="boolean")
    >>> int(best(ranking.assign(within_over_seeds=within, seeds=[3, 1, 3]))["trial"])
    0
    """
    within = ranking[ranking["within_drop"].astype(bool)]
    if "within_over_seeds" in ranking:
        tried = within[within["within_over_seeds"].fillna(False) & ~(numbers_of(within, "saved_mean") <= 0)]
        if tried.empty:  # as where time was up before the next one's turn
            least = numbers_of(ranking, SAVED)[ranking["seeds"].notna()].min()  # NaN where a confirmation refuted all
            within = within[within["seeds"].isna() & ~(numbers_of(within, SAVED) > least - LESS + ROUNDING)]
        else:
            within = tried[tried["seeds"] == tried["seeds"].max()]
    return within.iloc[0] if len(within) else None


def _warn_of_missing_baselines(done: pd.DataFrame, trials: pd.DataFrame) -> None:
    """Warn of trials without an accuracy loss; both frames are indexed by position."""
    quality = quality_of(done)
    without = done[done[quality.drop].isna() & ~_baseline_of_each(trials, quality)[1].loc[done.index]]
    if without.empty:
        return
    keys = [name for name in keys_of(done) if done[name].nunique(dropna=False) > 1]
    named = [
        " ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True))
        for values in without[keys].drop_duplicates().itertuples(index=False)
    ]
    shown = ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
    warnings.warn(
        f"no completed baseline of {shown}: the accuracy loss of {len(without)} of the {len(done)} trials is not "
        "known, so they come last and are on no front"
        if keys
        else "no completed baseline: no accuracy loss is known, and no trial is within the allowed one",
        stacklevel=3,
    )
