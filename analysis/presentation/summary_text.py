"""The study's result in words. Pure: frames in, text out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.formatting import (
    ROUNDING,
    allowed_text,
    drop_number,
    drop_text,
    drop_words,
    metric_words,
    percent,
    plural,
    short_name,
    unit_of_drop,
    value_text,
    whole_percent,
)
from analysis.io.checked import number_of, numbers_of
from analysis.metrics.confirmation import compared, confirmation_of, retrained_saving
from analysis.metrics.duplicates import outcomes
from analysis.metrics.over_seeds import CONFIDENCE
from analysis.metrics.ranking import (
    AHEAD,
    ALIKE,
    BEHIND,
    accuracy_when_shorter,
    ahead_of_shorter,
    baseline_of,
    beats_on_one_seed,
    dense_alike,
    insignificant_difference,
    on_average,
    over_shorter,
    reference_values,
)
from analysis.metrics.saving import quality_of, saved_of_one, saving_of
from analysis.presentation.settings_text import compression_text, cut_words, estimator_text, recipe_text
from trainables.config import TrialConfig, field_kinds
from trainables.gradients.fields import ESTIMATORS, estimator_in
from trainables.gradskip.variables import BY_NAME
from trainables.quality import Quality, allowed_amount
from trainables.savings import SAVED, TRAINING, share_words

#: Caption of the stage tree's picture.
TREE_CAPTION = (
    "Every bar is a stretch of training that begins where its trials did something that the others did not; what "
    "trials have in common was trained once and is drawn once."
)
#: Trials whose metric may be alike by chance: fewer than so many.
_FEW = 4
#: Gain over the baseline, in allowed drops, above which the baseline is doubted.
_TIMES_ALLOWED = 10


def config_of(row: pd.Series) -> TrialConfig:
    """Return the configuration of a row of `analysis.load`."""
    return TrialConfig(**_hyperparameters(row))


def _hyperparameters(row: pd.Series) -> dict[str, Any]:
    """Return the fields that are set in a row, each in its own type."""
    values = {}
    for name, kind in field_kinds().items():
        value = row.get(name)  # a study of an earlier version may lack a column
        if value is not None and not pd.isna(value):
            # By the field's type, not the column's: pandas stores integers as floats if values are missing.
            values[name] = tuple(json.loads(value)) if kind is tuple else kind(value)
    return values


def settings_text(row: pd.Series) -> str:
    """Return a row's settings in short form: ``MT_THR=0.97 SAMPLES=5; s: conv1 0.5``; ``-`` for the baseline.

    Options of the workload that the space searched come first, of the baseline, too: ``lr=0.1; MT_THR=0.97``.
    The variables' common prefix is left out. Lists and flags are written in the format of the variables.
    """
    method = str(row["method"])
    length = f"EPOCHS={int(row['epochs'])}" if cut_words(row) else ""
    if method == "none":
        return "; ".join(part for part in (searched_options(row), length) if part) or "-"
    values = _hyperparameters(row)
    for name in values.pop("unnamed", ()):
        values.pop(name, None)
    named = () if method in ("compression", *ESTIMATORS) else [name for name in values if name in BY_NAME]
    variables = [f"{short_name(name)}={short(values[name])}" for name in named]
    parts = (
        searched_options(row),
        " ".join([*([length] if length else []), *variables]),
        compression_text(values) if "compression" in method else "",
        estimator_text(values, digits=4) if estimator_in(method) else "",
        recipe_text(values),
    )
    return "; ".join(part for part in parts if part)


def searched_options(row: pd.Series) -> str:
    """Return the options of the workload that the space searched, ``lr=0.1 width=16``; empty if it searched none."""
    options = row.get("options")
    return "" if options is None or pd.isna(options) else str(options)


def compression_of(row: pd.Series) -> str:
    """Return the part of `settings_text` that no variable sets; empty for a trial that does not compress."""
    return compression_text(_hyperparameters(row)) if "compression" in str(row["method"]) else ""


def short(value: Any) -> str:
    """Return a value in the format of its variable, floats to four significant digits."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A study's answer in numbers; losses in the metric's unit, below 0 where it is better than the baseline."""

    trial: int
    saved: float  # of the compute that the study ranks by, a fraction; mean over the seeds
    time_saved: float | None  # a fraction; mean over the search's further seeds, else of one run
    loss: float  # mean over the seeds
    low: float | None  # ends of its interval; None for the search's own seed, and where nothing is known of the noise
    high: float | None
    worst: float | None  # loss of the worst seed
    splits: float | None = None  # by how much the losses on both splits differ, which other data could, too
    seeds: int  # seeds that chose nothing; 0: all is of the search's own
    confidence: float | None  # of the interval; None without one
    compared: str  # what the loss is of, such as "test accuracy"
    confirmed: bool | None = None  # by fresh seeds; None where none were trained


def answer_of(best: pd.Series, confirmation: pd.DataFrame | None = None) -> Answer:
    """Return the numbers of a study's answer, of its confirmation where it was retrained there."""
    quality, again = quality_of(best), confirmation_of(confirmation, best)
    seeds = 0 if pd.isna(best.get("seeds")) else int(best["seeds"])
    saved, time = (float(on_average(best.to_frame().T, name).iloc[0]) for name in (SAVED, "time_saved"))
    common: dict[str, Any] = {
        "trial": int(best["trial"]),
        "time_saved": None if math.isnan(time) or saving_of(best) != TRAINING else time,
    }
    if again is not None and again["seeds"] > 1:
        return Answer(
            **common, saved=retrained_saving(again), loss=float(again[quality.drop]), low=float(again["drop_low"]),
            high=float(again["drop_high"]), worst=float(again["drop_worst"]), seeds=int(again["seeds"]),
            confidence=float(again["confidence"]), compared=compared(again), confirmed=bool(again["confirmed"]),
        )  # fmt: skip
    common |= {"saved": saved, "seeds": seeds}
    if not seeds:
        words = metric_words(quality)
        return Answer(
            **common, loss=float(best[quality.drop]), low=None, high=None, worst=None, confidence=None, compared=words
        )
    tested = not pd.isna(best.get(quality.test))
    words = f"{quality.name} of both splits" if tested else metric_words(quality)
    low, high, splits = (
        None if pd.isna(best.get(name)) else float(best[name]) for name in ("drop_low", "drop_high", "drop_splits")
    )
    return Answer(
        **common, loss=float(best["drop_mean"]), low=low, high=high, splits=splits, worst=float(best["drop_worst"]),
        confidence=None if low is None else CONFIDENCE, compared=words,
    )  # fmt: skip


def headline(
    ranking: pd.DataFrame,
    best: pd.Series | None,
    allowed_drop: float | str,
    *,
    confirmation: pd.DataFrame | None = None,
    line: pd.DataFrame | None = None,
    why_little: str = "",
) -> str:
    """Return the result: one sentence on what to train, what it saves and loses, and what has to be known beside it.

    Args:
        ranking: from `analysis.rank`.
        best: the recommended trial.
        allowed_drop: allowed drop of the metric, as for `analysis.rank`.
        confirmation: from `analysis.confirm_table`; None if no confirmation was started.
        line: from `analysis.control_line`; None for no comparison with a cut dense run.
        why_little: why the space's settings do little on this run (`StudyInfo.why_little`); said if none is best.
    """
    if len(ranking) == 0:
        return "No trial has completed, so there is nothing to rank."
    quality = quality_of(ranking)
    if not (ranking["role"] == "baseline").any():
        return f"The baseline did not complete, so no {drop_words(quality)} can be stated and nothing is recommended."
    if best is None or saved_of_one(best) <= 0:
        said = _no_recommendation(ranking, allowed_drop, confirmation)
        return f"{said} {why_little[0].upper()}{why_little[1:]}." if why_little else said
    words, again = DropWords(best, allowed_drop), confirmation_of(confirmation, best)
    text = answer_sentence(best, allowed_drop, confirmation)
    if options := searched_options(best):
        text = f"With {options}, against the baseline of these options: {text[0].lower()}{text[1:]}"
    if again is not None and not again["confirmed"]:
        text = (
            f"No setting was confirmed to stay within the allowed {drop_words(quality)} of {words.allowed}. The best "
            f"of the search: {text[0].lower()}{text[1:]}"
        )
        if again["failed"] or not again["seeds"]:
            text += f" {retraining_sentence(again)[0].upper()}{retraining_sentence(again)[1:]}."
    parts = (
        text,
        "Confirmed on fresh seeds." if again is not None and again["confirmed"] else "",
        _on_test_split(best, words) or _never_moves(ranking, quality)
        if not answer_of(best, confirmation).seeds
        else "",
        _refused(ranking, best),
        recipe_alone(ranking, best, words) or _baseline_warning(ranking, best, allowed_drop),
        _not_retrained(ranking, best, confirmation),
        against_shorter(best, line, allowed_drop, confirmation),
    )
    return " ".join(part for part in parts if part)


def answer_sentence(best: pd.Series, allowed_drop: float | str, confirmation: pd.DataFrame | None = None) -> str:
    """Return what to train, what that saves and what it loses, in one sentence; in another how certain that is not."""
    words, found = DropWords(best, allowed_drop), answer_of(best, confirmation)
    saving = f"{percent(found.saved)} of {share_words(saving_of(best))}"
    if found.time_saved is not None:
        time = percent(abs(found.time_saved))
        saving += f" ({time} of the time)" if found.time_saved >= 0 else f" (in {time} more time)"
    lost, allowed = words.change(found.loss), f"{drop_text(words.limit, words.quality)} allowed."
    if not found.seeds:
        lost += f" on one seed, {allowed}"
        if confirmation_of(confirmation, best) is None:
            lost += " What other seeds give is not known."
    else:
        about = []
        if found.low is not None and found.high is not None and found.confidence is not None:
            about.append(f"{whole_percent(found.confidence)}: {words.range(found.low, found.high)}")
        if found.seeds > 1 and found.worst is not None:
            about.append(f"worst seed {words.change(found.worst, unit=False)}")
        if found.splits is not None:
            about.append(f"splits {drop_number(found.splits, words.quality)} apart")
        lost += f" on average over {found.seeds} seeds" if found.seeds > 1 else " on one further seed"
        lost += f" ({'; '.join(about)}), {allowed}" if about else f", {allowed}"
        if found.confirmed is False and found.loss <= words.limit + ROUNDING:
            lost += " That is not certain to be within the allowed loss."
    return f"{what_to_train(best)}: saves {saving}; {found.compared} {lost}"


def what_to_train(best: pd.Series) -> str:
    """Return what a setting does, as the beginning of a sentence."""
    parts = [f"train {length}"] if (length := cut_words(best)) else []
    found = best.get("stop_events")
    events = json.loads(found) if isinstance(found, str) else []
    method, named = str(best["method"]), bool(events) and all(event.get("name") for event in events)
    if named:
        first, last = events[0], events[-1]
        at_once = [event["name"] for event in events if event["iteration"] <= 0]
        begin = f"freeze all up to {at_once[-1]}" if at_once else f"stop layers from step {first['iteration']} on"
        if last["iteration"] > 0:
            later = f"all up to {last['name']} from step {last['iteration']} on"
            apart = first["iteration"] < last["iteration"]
            begin = f"{begin},{' then' if at_once else ''} {later}" if apart else f"stop {later}"
        parts.append(begin)
    if not parts or method not in ("none", "gradskip" if named else "none"):
        parts.append(f"take the settings of trial {best['trial']}")
    elif named:
        parts[-1] += " in evaluation mode" if str(best.get("CAC_PREFIX_MODE")) == "eval" else ""
        further = _recipe_of(best)
        parts[-1] += f", with {' and '.join(further)}" if further else ""
    text = " and ".join(parts)
    return f"{text[0].upper()}{text[1:]}"


def whole_run(row: pd.Series) -> tuple[bool, float]:
    """Return whether all norms hold from the first step on, and the factor of the learning rates."""
    factor = number_of(row, "CAC_LR_FACTOR")
    return str(row.get("CAC_NORM_STATISTICS")) == "hold_all", 1.0 if math.isnan(factor) else factor


class DropWords:
    """Words for drops of one study's metric, given a trial of it with a value and a drop."""

    def __init__(self, row: pd.Series, allowed_drop: float | str) -> None:
        self.quality: Quality = quality_of(row)
        baseline = float(reference_values(row.to_frame().T, self.quality).iloc[0])
        self.limit = float(allowed_amount(allowed_drop, baseline))
        self.allowed = allowed_text(allowed_drop, self.quality, baseline=baseline)  # the allowed drop

    def at(self, drop: float) -> str:
        """Return ``at a loss of ...``, or that nothing is lost."""
        how = "loss" if self.quality.direction == "max" else "rise"
        if drop > ROUNDING:
            return f"at a {how} of {drop_text(drop, self.quality, allowed=self.limit)}"
        return f"at no {how}{'' if drop >= -ROUNDING else f' ({drop_text(-drop, self.quality)} better)'}"

    def change(self, drop: float, *, unit: bool = True) -> str:
        """Return a drop as a change of the metric, with its sign."""
        if math.isnan(drop):
            return "-"
        change = -self.quality.sign * drop
        number = drop_number(abs(change), self.quality, allowed=self.limit if drop > 0 else None)
        sign = "" if float(number) == 0 else "-" if change < 0 else "+"
        return f"{sign}{number} {unit_of_drop(self.quality) if unit else ''}".rstrip()

    def range(self, low: float, high: float) -> str:
        """Return an interval of drops as changes of the metric, the lower one first."""
        ends = (high, low) if self.quality.direction == "max" else (low, high)
        return " to ".join(self.change(end, unit=False) for end in ends)


def _no_recommendation(ranking: pd.DataFrame, allowed_drop: float | str, confirmation: pd.DataFrame | None) -> str:
    quality = quality_of(ranking)
    text = (
        f"No setting tried saves compute within the allowed {drop_words(quality)} of "
        f"{allowed_text(allowed_drop, quality)}."
    )
    refuted = 0 if confirmation is None else int(confirmation["refuted"].sum())
    if refuted:
        return f"{text} {plural(refuted, 'setting')} did on one seed and not on fresh ones."
    return " ".join(filter(None, (text, nearest_sentence(ranking, allowed_drop))))


def nearest_sentence(ranking: pd.DataFrame, allowed_drop: float | str) -> str:
    """Return what loses least of what saves something, over further seeds if any was tried there; empty for none."""
    column = "drop_mean" if "seeds" in ranking else quality_of(ranking).drop
    tried = ranking[(ranking[column] < math.inf) & (on_average(ranking) > 0)]
    if tried.empty:
        return ""
    nearest = tried.iloc[int(tried[column].argmin())]
    said = answer_sentence(nearest, allowed_drop)
    return f"Nearest is trial {nearest['trial']}: {said[0].lower()}{said[1:]}"


def _on_test_split(best: pd.Series, words: DropWords) -> str:
    """Return that more than the allowed drop was lost on the test split; empty otherwise."""
    lost = best.get(words.quality.test_drop)
    if lost is None or pd.isna(lost) or lost <= words.limit + ROUNDING:
        return ""
    return f"On the test split, which decided nothing, it ends {words.at(lost)}."


def _never_moves(ranking: pd.DataFrame, quality: Quality) -> str:
    """Return that the metric is the same for every trial, on the test split, too, if it is; empty otherwise."""
    values = [ranking[name] for name in (quality.name, quality.test) if name in ranking]
    if len(ranking) < _FEW or any(value.nunique(dropna=False) > 1 for value in values):
        return ""
    value = value_text(values[0].iloc[0], quality)
    return f"Doubtful: all {len(ranking)} trials end at the same {quality.name}, {value}, so it tells nothing of them."


def _refused(ranking: pd.DataFrame, best: pd.Series) -> str:
    """Return, of an answer of one seed, how many settings were refused over further ones; empty for none."""
    if "seeds" not in ranking or not pd.isna(best["seeds"]):
        return ""
    tried = ranking[ranking["seeds"].notna() & (ranking[SAVED] > saved_of_one(best))]
    within = tried["within_over_seeds"].fillna(False).astype(bool)
    nothing = within & (numbers_of(tried, "saved_mean") <= 0)  # others may be those that a confirmation refuted
    counts = {"lost too much": int((~within).sum()), "saved nothing": int(nothing.sum())}
    return " ".join(
        f"{plural(count, 'setting')} that saved more {did} over further seeds."
        for did, count in counts.items()
        if count
    )


def recipe_alone(ranking: pd.DataFrame, best: pd.Series, words: DropWords) -> str:
    """Return what the best's norms and learning rates do without a stop; empty where they are the baseline's.

    Where the best loses more than is allowed against that, it is followed by what saves most within the allowed loss of
    it: whoever holds the norms anyway asks for this.
    """
    known = ranking.loc[dense_alike(ranking, pd.Series({**best, "CAC_VAR_START_THR": -1.0})) or []]
    known = known[numbers_of(known, "epochs") == number_of(baseline_of(ranking, best), "epochs")]
    if known.empty or not (parts := _recipe_of(best, held="Holding all norms")):
        return ""
    row, what, drop = known.iloc[0], " with ".join(parts), words.quality.drop
    said = f"{what} alone (trial {row['trial']}) ends {words.at(row[drop])} and skips nothing"
    most = row[drop] + words.limit + ROUNDING
    if best[drop] <= most:
        return f"{said}."
    near = ranking[(numbers_of(ranking, drop) <= most) & (ranking[SAVED] > 0)]
    if near.empty:
        return f"{said}; nothing that saves compute is within the allowed {drop_words(words.quality)} of that."
    first = near.loc[near[SAVED].idxmax()]
    return (
        f"{said}; within the allowed {drop_words(words.quality)} of that, trial {first['trial']} saves most, "
        f"{percent(first[SAVED])} (its settings: export --trial {first['trial']})."
    )


def _recipe_of(row: pd.Series, *, held: str = "all norms held") -> list[str]:
    """Return in words what a setting does in the whole run, whatever stops; ``held`` are those for held norms."""
    holds, factor = whole_run(row)
    found = [held] if holds else []
    return found if factor == 1 else [*found, f"{factor:g} times the learning rate"]


def _baseline_warning(ranking: pd.DataFrame, best: pd.Series, allowed_drop: float | str) -> str:
    """Return a sentence if the baseline seems not to have reported its end; empty otherwise."""
    baseline, quality = baseline_of(ranking, best), quality_of(ranking)
    alike = ranking[numbers_of(ranking, "epochs") == number_of(baseline, "epochs")]
    most, own = numbers_of(alike, "epoch").max(), number_of(baseline, "epoch")
    if most > own:  # neither is where one of them is not known
        return (
            f"Doubtful: the baseline reported {plural(int(own), 'epoch')} and other trials {int(most)}, so its last "
            "report was lost or it ended early."
        )
    allowed = float(allowed_amount(allowed_drop, baseline[quality.name]))
    if 0 < _TIMES_ALLOWED * allowed < -best[quality.drop] and not _recipe_of(best):
        return (
            f"Doubtful: so much better than the baseline's {value_text(baseline[quality.name], quality)} that the "
            "baseline may not have reported its last epoch, or not have trained as the others did."
        )
    return ""


def retraining_sentence(again: pd.Series) -> str:
    """Return on how many fresh seeds a setting failed that they did not confirm; empty for none."""
    failed = f"it failed on {plural(again['failed'], 'fresh seed')}" if again["failed"] else ""
    return failed or ("" if again["seeds"] else "it was not retrained to the end")


def _not_retrained(ranking: pd.DataFrame, best: pd.Series, confirmation: pd.DataFrame | None) -> str:
    """Return a sentence if a trial that was not retrained saves more than the best; empty otherwise."""
    if confirmation is None:
        return ""
    others = ranking[ranking["within_drop"] & ~outcomes(ranking).isin(confirmation["candidate"])]
    others = others[others[SAVED] > saved_of_one(best) + ROUNDING]
    if others.empty:
        return ""
    first = others.iloc[0]
    return f"Trial {first['trial']} saves {percent(first[SAVED])} on one seed and was not retrained."


def against_shorter(
    best: pd.Series, line: pd.DataFrame | None, allowed_drop: float | str, confirmation: pd.DataFrame | None
) -> str:
    """Return whether a setting is ahead of a dense run cut to the same compute, or that none was tried.

    Over the search's further seeds where the answer is of these: a confirmation trains no cut dense run on its own.
    Where the setting is not ahead and the cut run is within the allowed loss, too, it is said what that saves.
    """
    if line is None or len(line) == 0 or saving_of(best) != TRAINING:
        return ""
    quality, again = quality_of(best), confirmation_of(confirmation, best)
    if (found := ahead_of_shorter(best, line)) is not None and (again is None or again["seeds"] <= 1):
        epochs, its, ahead = found
        words, (low, high), word = DropWords(best, 0.0), ahead.interval, over_shorter(ahead)
        by = words.change(-ahead.mean, unit=False)
        if not math.isnan(low):
            by += f", {whole_percent(CONFIDENCE)}: {words.range(-high, -low)}"
        does_too = ""
        if word != AHEAD and its.is_within(DropWords(best, allowed_drop).limit):
            does_too = f" saves {percent(line.attrs['saved'][best['trial']])} and is within the allowed loss, too"
        return (
            f"Simply training {plural(epochs, 'epoch')}{does_too}: {words.change(its.mean)}; the setting "
            f"{_VERBS[word]} that on {'these seeds' if its.n > 1 else 'this seed'} ({by})."
        )
    reached = float(accuracy_when_shorter(line, [best["compute_saved"]])[0])
    if math.isnan(reached):
        return f"No dense run was cut that short: the shortest saves {percent(line['compute_saved'].max())}."
    word = beats_on_one_seed(best.to_frame().T, line).iloc[0]
    if pd.isna(word):
        return ""
    said = (
        f"On one seed it {_VERBS[word]} a dense run cut to the same compute, which reaches "
        f"{value_text(reached, quality)}, this setting {value_text(best[quality.name], quality)}"
    )
    if word == ALIKE and quality.is_accuracy:
        nothing = float(insignificant_difference(line, (best[quality.name] + reached) / 2))
        said += f" (another seed alone makes about {nothing:.4f})"
    return f"{said}."


_VERBS = {AHEAD: "is ahead of", BEHIND: "is behind", ALIKE: "cannot be told from"}


def trial_numbers(trials: Sequence[int]) -> str:
    """Return the numbers of trials in words; beyond six they are only counted.

    >>> trial_numbers((0, 7)), trial_numbers(range(8))
    ('trials 0, 7', 'trials 0, 1, 2, 3, 4, 5 and 2 more')
    """
    more = f" and {len(trials) - 6} more" if len(trials) > 6 else ""
    return f"trial{'' if len(trials) == 1 else 's'} {', '.join(map(str, trials[:6]))}{more}"


def is_answer(best: pd.Series | None) -> bool:
    """Return whether a study recommends a setting: a trial that saves compute by a method or by fewer epochs."""
    return best is not None and (best["method"] != "none" or bool(cut_words(best))) and saved_of_one(best) > 0
