"""The study's result in words. Pure: frames in, text out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.formatting import (
    ROUNDING,
    allowed_text,
    drop_text,
    drop_words,
    metric_words,
    percent,
    plural,
    short_name,
    value_text,
    whole_percent,
)
from analysis.io.checked import number_of, numbers_of
from analysis.metrics.confirmation import compared, confirmation_of, retrained_saving, without_refuted
from analysis.metrics.duplicates import outcomes
from analysis.metrics.noise import is_unsure
from analysis.metrics.ranking import (
    BEATS,
    EQUAL,
    accuracy_when_shorter,
    baseline_of,
    beats_shorter,
    dense_with_held_norms,
    insignificant_difference,
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
#: Gain over the baseline, in allowed drops, above which the baseline is doubted.
_TIMES_ALLOWED = 10
#: Difference of the shares saved in FLOPs and in time above which both are given.
_TIME_APART = 0.1


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


def headline(
    ranking: pd.DataFrame,
    best: pd.Series | None,
    allowed_drop: float | str,
    *,
    confirmation: pd.DataFrame | None = None,
    line: pd.DataFrame | None = None,
    why_little: str = "",
    sure: float = 0.0,
) -> str:
    """Return the result in a few sentences: saving, drop of the metric, confirmation, comparison with a cut dense run.

    Args:
        ranking: from `analysis.rank`.
        best: the recommended trial.
        allowed_drop: allowed drop of the metric, as for `analysis.rank`.
        confirmation: from `analysis.confirm_table`; None if no confirmation was started.
        line: from `analysis.control_line`; None for no comparison with a cut dense run.
        why_little: why the space's settings do little on this run (`StudyInfo.why_little`); said if none is best.
        sure: as for `analysis.best`.
    """
    if len(ranking) == 0:
        return "No trial has completed, so there is nothing to rank."
    quality = quality_of(ranking)
    if not (ranking["role"] == "baseline").any():
        return f"The baseline did not complete, so no {drop_words(quality)} can be stated and nothing is recommended."
    if best is None or saved_of_one(best) <= 0:
        said = _no_recommendation(ranking, allowed_drop, confirmation, sure)
        return f"{said} {why_little[0].upper()}{why_little[1:]}." if why_little else said
    again, words = confirmation_of(confirmation, best), DropWords(best, allowed_drop)
    share = share_words(saving_of(best))
    share += "," if "," in share else ""
    if length := cut_words(best):
        share += f" (train {length}{'' if best['method'] == 'none' else ', with these stops'})"
    here = f"{percent(saved_of_one(best))} of {share} {words.at(best[quality.drop])} in {metric_words(quality)}"
    unsure = ""
    if again is None:
        text = f"You can skip {here} (allowed: {words.allowed}). {one_seed_sentence(best, allowed_drop)}"
        unsure = _less_sure(without_refuted(ranking, confirmation), saved_of_one(best), sure)
    elif again["confirmed"]:
        text = (
            f"You can skip {percent(retrained_saving(again))} of {share} {words.at(again[quality.drop])} in "
            f"{compared(again)} (allowed: {words.allowed}); confirmed over {plural(again['seeds'], 'seed')}: "
            f"{words.at_most(again['drop_high'])} with {whole_percent(again['confidence'])} confidence, and the worst "
            f"seed ended {words.at(again['drop_worst'])}."
        )
    else:
        text = (
            f"No setting was confirmed to stay within the allowed {drop_words(quality)} of {words.allowed}. The best "
            f"on one seed skips {here}; {retraining_sentence(again, words)}."
        )
    if searched_options(best):
        text = f"With {searched_options(best)}, against the baseline of these options: {text[0].lower()}{text[1:]}"
    confirmed = again is not None and bool(again["confirmed"])
    parts = (
        text,
        _on_test_split(best, words) if again is None else "",
        _frozen(best),
        _held_norms_alone(ranking, best, words) or _baseline_warning(ranking, best, allowed_drop),
        time_beside(best),
        unsure,
        _not_retrained(ranking, best, confirmation),
        _against_shorter(best, line, confirmed=confirmed),
    )
    return " ".join(part for part in parts if part)


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

    def at_most(self, high: float) -> str:
        """Return the upper end of an interval as a clause."""
        if high <= 0:
            return "nothing is lost"
        return f"the {drop_words(self.quality)} is at most {drop_text(high, self.quality, allowed=self.limit)}"


def _no_recommendation(
    ranking: pd.DataFrame, allowed_drop: float | str, confirmation: pd.DataFrame | None, sure: float
) -> str:
    quality = quality_of(ranking)
    if unsure := _less_sure(without_refuted(ranking, confirmation), 0.0, sure):
        return f"No setting tried saves compute and is sure enough to hold on another seed. {unsure}"
    text = (
        f"No setting tried saves compute within the allowed {drop_words(quality)} of "
        f"{allowed_text(allowed_drop, quality)}."
    )
    refuted = 0 if confirmation is None else int(confirmation["refuted"].sum())
    return f"{text} {plural(refuted, 'setting')} did on one seed and not on fresh ones." if refuted else text


def one_seed_sentence(best: pd.Series, allowed_drop: float | str) -> str:
    """Return how sure an answer is that was not confirmed."""
    holds, elsewhere = best.get("holds"), best.get("other_seed_drop")
    said, where = "One seed, not confirmed", "on another"
    if elsewhere is not None and not pd.isna(elsewhere):
        ended = DropWords(best, allowed_drop).at(elsewhere)
        said = f"Not confirmed; other seeds ended {ended} on average, against the same baseline"
        where = "on average over all seeds"
    if holds is None or pd.isna(holds):
        return f"{said}."
    return f"{said}; {where} it stays within that with a probability of {whole_percent(holds)}."


def _less_sure(ranking: pd.DataFrame, saved: float, sure: float) -> str:
    """Return a sentence if a trial saves more than this that is not sure to hold on other seeds; empty otherwise."""
    others = ranking[ranking["within_drop"].astype(bool) & is_unsure(ranking, sure)]
    others = others[others[SAVED] > saved + ROUNDING]
    if others.empty:
        return ""
    first = others.iloc[0]
    alone = whole_percent(first["holds"])
    return f"Trial {first['trial']} saves {percent(first[SAVED])} here, but would hold elsewhere with {alone} alone."


def _on_test_split(best: pd.Series, words: DropWords) -> str:
    """Return that more than the allowed drop was lost on the test split; empty otherwise."""
    lost = best.get(words.quality.test_drop)
    if lost is None or pd.isna(lost) or lost <= words.limit + ROUNDING:
        return ""
    return f"On the test split, which decided nothing, it ends {words.at(lost)}."


def _frozen(best: pd.Series) -> str:
    """Return what a setting of explicit stops freezes, and from when; empty for others."""
    found = best.get("stop_events")
    events = json.loads(found) if isinstance(found, str) else []
    if not events or any(event.get("rule") != "manual" or not event.get("name") for event in events):
        return ""
    when = ["the first step" if event["iteration"] <= 0 else f"iteration {event['iteration']}" for event in events]
    parts = [f"all up to {event['name']} from {begin} on" for event, begin in zip(events, when, strict=True)]
    return f"It freezes {', '.join(parts)}."


def _held_norms_alone(ranking: pd.DataFrame, best: pd.Series, words: DropWords) -> str:
    """Return what holding all norms does without a stop, where the best holds them, too; empty otherwise."""
    known = ranking.loc[dense_with_held_norms(ranking)]
    known = known[numbers_of(known, "epochs") == number_of(baseline_of(ranking, best), "epochs")]
    if known.empty or best.get("CAC_NORM_STATISTICS") != "hold_all":
        return ""
    row = known.iloc[0]
    return (
        f"Holding all norms alone (CAC_NORM_STATISTICS=hold_all, trial {row['trial']}) ends "
        f"{words.at(row[words.quality.drop])} and skips nothing."
    )


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
    if 0 < _TIMES_ALLOWED * allowed < -best[quality.drop]:
        return (
            f"Doubtful: so much better than the baseline's {value_text(baseline[quality.name], quality)} that the "
            "baseline may not have reported its last epoch, or not have trained as the others did."
        )
    return ""


def time_beside(row: pd.Series) -> str:
    """Return a sentence on a trial's training time if it differs from its FLOPs by a tenth or in sign; else empty.

    Empty, too, for a study that ranks by other compute than that of training, and where a time is not known.

    >>> time_beside(pd.Series({"compute_saved": 0.26, "time_saved": -0.27}))
    'Its training took 27.0 % longer than that of the baseline (one measurement, beside other trials).'
    >>> time_beside(pd.Series({"compute_saved": 0.4, "time_saved": 0.12}))
    'Its training took 12.0 % less time than that of the baseline (one measurement, beside other trials).'
    >>> time_beside(pd.Series({"compute_saved": 0.26, "time_saved": 0.2}))
    ''
    """
    saved, time = saved_of_one(row), number_of(row, "time_saved")
    if saving_of(row) != TRAINING or not (abs(saved - time) > _TIME_APART or saved * time < 0):
        return ""
    took = f"{percent(time)} less time than" if time >= 0 else f"{percent(-time)} longer than"
    if percent(abs(time)) == percent(0):
        took = "as long as"
    return f"Its training took {took} that of the baseline (one measurement, beside other trials)."


def retraining_sentence(again: pd.Series, words: DropWords) -> str:
    """Return the results on fresh seeds of a setting that they did not confirm."""
    failed = f"it failed on {plural(again['failed'], 'fresh seed')}" if again["failed"] else ""
    if again["seeds"] == 0:
        return failed or "it was not retrained to the end"
    drop = f"{words.at(again[words.quality.drop])} in {compared(again)}"
    found = f"over {plural(again['seeds'], 'fresh seed')} it skips {percent(retrained_saving(again))} {drop}"
    if again["seeds"] >= 2:
        found += f", and {words.at_most(again['drop_high'])}"
    return f"{found}; {failed}" if failed else found


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


def _against_shorter(best: pd.Series, line: pd.DataFrame | None, *, confirmed: bool) -> str:
    """Return a sentence if a cut dense run of the same compute is not beaten, or was not tried; empty otherwise.

    Of a confirmed setting also if it is beaten, because confirmation compares with the baseline only.
    """
    if line is None or len(line) == 0 or saving_of(best) != TRAINING:
        return ""
    reached = float(accuracy_when_shorter(line, [best["compute_saved"]])[0])
    if math.isnan(reached):
        return f"No dense run was cut that short: the shortest saves {percent(line['compute_saved'].max())}."
    word = beats_shorter(best.to_frame().T, line).iloc[0]
    if pd.isna(word) or (word == BEATS and not confirmed):
        return ""
    quality = quality_of(best)
    verb = {BEATS: "It beats", EQUAL: "It is about equal to"}.get(word, "It does not beat")
    said = (
        f"{verb} a dense run cut to the same compute, which reaches {value_text(reached, quality)} on that seed, "
        f"this setting {value_text(best[quality.name], quality)}"
    )
    if word == EQUAL and quality.is_accuracy:
        nothing = float(insignificant_difference(line, (best[quality.name] + reached) / 2))
        said += f" (another seed alone makes about {nothing:.4f})"
    return f"{said}; no cut dense run was trained on fresh seeds." if confirmed else f"{said}."


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
