"""Parameter importance: the effect of each parameter on each objective."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.io.journal import JournalTrial, read_study
from analysis.io.layout import STUDY_NAME, Layout
from analysis.io.studies import recognise
from analysis.metrics.noise import is_constant
from trainables.errors import UserError
from trainables.metrics import OBJECTIVES
from trainables.quality import Quality, quality_in
from trainables.savings import TRAINING, objectives_of

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

#: Fewest trials that are evaluated. In 20 draws of 20 random trials with seven parameters, two of them effective with
#: weights 2 and 1, fANOVA ranked the first correctly in all and the second in 16; with 40 trials, both in all; with 10,
#: both in 6.
LEAST_TRIALS = 20
#: Seed of every draw and forest, so that the same study gives the same numbers.
SEED = 0
#: Most trials for fANOVA, whose time grows faster than linearly; of more trials, a seeded draw is used.
_MOST_FANOVA_TRIALS = 200
_FANOVA_TREES = 32
#: PED-ANOVA evaluates what the best trials have in common: this share of the trials, but at least five.
_TOP_SHARE, _LEAST_TOP = 0.1, 5


def importance(path: str | Path) -> pd.DataFrame:
    """Compute the importance of each parameter for each objective with Optuna's evaluators.

    If all trials have the same parameters with the same ranges, the evaluator is fANOVA (Hutter, Hoos and
    Leyton-Brown 2014, "An Efficient Approach for Assessing Hyperparameter Importance"): the share of the objective's
    variance over the searched ranges that a parameter explains alone. fANOVA handles only parameters that all trials
    have, so in a conditional space the evaluator is Optuna's default, PED-ANOVA (Watanabe, Bansal and Hutter 2023, and
    its extension to conditional parameters): how much the best tenth of the trials, at least five, agree on a
    parameter. Of the two, fANOVA ranks better with few trials. Seeded: the same study gives the same numbers.

    Only completed trials of role ``search`` count: the baseline and the controls have no parameters, published defaults
    may lie outside the searched ranges, and trials that were known to stop nothing never ran.

    Args:
        path: a study's folder, or its Optuna journal.

    Returns:
        Columns ``objective``, ``parameter`` (as in the Optuna study, ``linear.CAC_RULE_DEPTH`` for one of a branch),
        ``importance`` in [0, 1], largest first, with the sum 1 for each objective. An objective that cannot be
        analysed has no rows. ``df.attrs``: ``reason`` (why rows are missing, empty if none are), ``evaluator``,
        ``trials`` (number of trials used), and for fANOVA ``explained``: for each objective the summed share of the
        variance that the parameters explain individually, in [0, 1]. The rest is interactions and noise: where little
        is explained, the importances mean little.

    Raises:
        UserError: there is no study.
    """
    trials = _search_trials(_journal_of(path))
    attrs: dict[str, Any] = {"evaluator": "", "trials": len(trials), "explained": {}}
    rows, reasons = [], []
    if len(trials) < LEAST_TRIALS:
        reasons.append(
            f"{len(trials)} completed trials of the search with parameters are too few, {LEAST_TRIALS} are needed"
        )
    else:
        conditional = any(trial.distributions != trials[0].distributions for trial in trials)
        attrs["evaluator"] = "PED-ANOVA" if conditional else "fANOVA"
        # The values in Optuna's study are those of the objectives that the study ranks by.
        config = trials[0].user_attrs.get("config", {})
        quality = quality_in(config)
        for place, objective in enumerate(objectives_of(config.get("saving") or TRAINING, quality.name)):
            if is_constant([trial.values[place] for trial in trials]):
                reasons.append(f"{objective} is the same in all {len(trials)} trials")
                continue
            found = _evaluated(trials, place, quality, conditional=conditional)
            total = sum(found.values())
            if total <= 0:
                reasons.append(f"no parameter explains {objective}")
                continue
            if not conditional:
                attrs["explained"][objective] = total
            ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
            rows += [(objective, name, value / total) for name, value in ordered]
    dtypes = {"objective": "string", "parameter": "string", "importance": "float64"}
    frame = pd.DataFrame(rows, columns=list(dtypes)).astype(dtypes)
    frame.attrs |= {**attrs, "reason": "; ".join(reasons)}
    return frame


def _journal_of(path: str | Path) -> Path:
    path = Path(path)
    kind = recognise(path)
    journal = path if kind == "journal" else Layout(path).journal
    if kind not in ("journal", "study") or not journal.is_file():
        raise UserError(
            f"importance needs a study with its Optuna journal, {path} has none: give the folder that a search wrote"
        )
    return journal


def _search_trials(journal: Path) -> list[FrozenTrial]:
    """Return the trials that count, in the order of their numbers."""
    from optuna.distributions import FloatDistribution
    from optuna.trial import create_trial

    study = read_study(journal)
    if study.name != STUDY_NAME:
        raise UserError(f"the journal {journal} holds no study of a search: importance needs one")
    found = []
    for trial in filter(_counts, study.trials):
        # Floats lie anywhere in their range: a search moves thresholds off the space's grid.
        ranges = {
            name: FloatDistribution(one.low, one.high) if isinstance(one, FloatDistribution) and one.step else one
            for name, one in trial.distributions().items()
        }
        with suppress(ValueError):  # a value of a starting point may lie outside its range
            found.append(
                create_trial(
                    params=trial.params(), distributions=ranges, values=trial.values, user_attrs=trial.user_attrs
                )
            )
    return found


def _counts(trial: JournalTrial) -> bool:
    return (
        trial.state == "COMPLETE"
        and trial.user_attrs.get("role", "search") == "search"
        and len(trial.stored_params) > 0
        and trial.values is not None
        and len(trial.values) == len(OBJECTIVES)
        and bool(np.isfinite(trial.values).all())
    )


def _evaluated(trials: Sequence[FrozenTrial], place: int, quality: Quality, *, conditional: bool) -> dict[str, float]:
    """Return the importances for one objective by its place, not normalized, so that all zeros stay visible."""
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, PedAnovaImportanceEvaluator

    evaluator: Any
    if conditional:
        evaluator = PedAnovaImportanceEvaluator(target_quantile=max(_TOP_SHARE, _LEAST_TOP / len(trials)))
        # It evaluates low values, whatever the study's directions; the saving is to be maximised.
        sign = -1 if place > 0 else -int(quality.sign)
    else:
        evaluator = FanovaImportanceEvaluator(n_trees=_FANOVA_TREES, seed=SEED)
        sign = 1
        if len(trials) > _MOST_FANOVA_TRIALS:
            chosen = np.random.default_rng(SEED).choice(len(trials), _MOST_FANOVA_TRIALS, replace=False)
            trials = [trials[i] for i in np.sort(chosen)]
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(directions=[quality.optuna_direction, "maximize"])
        study.add_trials(trials)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that normalize is experimental, and the direction of the target
            found = optuna.importance.get_param_importances(
                study, evaluator=evaluator, target=lambda trial: sign * trial.values[place], normalize=False
            )
    finally:
        optuna.logging.set_verbosity(level)
    return {name: float(value) for name, value in found.items()}
