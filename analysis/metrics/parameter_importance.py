"""Parameter importance: the effect of each parameter on each objective."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.io.journal import JournalTrial, read_study
from analysis.io.layout import STUDY_NAME, Layout
from analysis.io.studies import load, recognise
from analysis.metrics.noise import is_constant
from analysis.metrics.saving import quality_of, saving_of
from trainables.config import field_kinds
from trainables.errors import UserError
from trainables.metrics import objective_keys
from trainables.quality import Quality, quality_in
from trainables.savings import TRAINING, objectives_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
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
    if len(trials) < LEAST_TRIALS:
        return result_frame([], ["parameter", "importance"], [too_few(len(trials))], attrs)
    conditional = any(trial.distributions != trials[0].distributions for trial in trials)
    attrs["evaluator"] = "PED-ANOVA" if conditional else "fANOVA"
    rows: list[dict[str, Any]] = []
    reasons = []
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
        shares = {name: value / total for name, value in found.items()}
        ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
        rows += [{"objective": objective, "parameter": name, "importance": share} for name, share in ordered]
    return result_frame(rows, ["parameter", "importance"], reasons, attrs)


def _journal_of(path: str | Path) -> Path:
    path = Path(path)
    kind = recognise(path)
    if kind == "journal":
        return path
    journal = Layout(path).journal
    if kind != "study" or not journal.is_file():
        raise UserError(
            f"importance needs a study with its Optuna journal, {path} has none: give the folder that a search wrote"
        )
    return journal


def _search_trials(journal: Path) -> list[FrozenTrial]:
    """Return the trials that count, in the order of their numbers."""
    from optuna.trial import create_trial

    study = read_study(journal)
    if study.name != STUDY_NAME:
        raise UserError(f"the journal {journal} holds no study of a search: importance needs one")
    found = []
    for trial in study.trials:
        if _counts(trial):
            with suppress(ValueError):  # a value of a starting point may lie outside its range
                found.append(
                    create_trial(
                        params=trial.params(),
                        distributions=_without_steps(trial.distributions()),
                        values=trial.values,
                        user_attrs=trial.user_attrs,
                    )
                )
    return found


def _without_steps(distributions: Mapping[str, BaseDistribution]) -> dict[str, BaseDistribution]:
    """Return distributions whose floats lie anywhere in their range: a search moves thresholds off the space's grid."""
    from optuna.distributions import FloatDistribution

    return {
        name: FloatDistribution(one.low, one.high) if isinstance(one, FloatDistribution) and one.step else one
        for name, one in distributions.items()
    }


def _counts(trial: JournalTrial) -> bool:
    return (
        trial.state == "COMPLETE"
        and trial.user_attrs.get("role", "search") == "search"
        and len(trial.stored_params) > 0
        and trial.values is not None
        and len(trial.values) == len(objective_keys())
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
        trials = [trials[i] for i in drawn(len(trials), _MOST_FANOVA_TRIALS)]
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


def drawn(count: int, most: int) -> NDArray[np.int64]:
    """Select at most `most` of `count` indices, ascending; by a seeded draw where there are more."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(SEED).choice(count, most, replace=False))


def too_few(count: int) -> str:
    """Return the reason text for too few trials."""
    return f"{count} completed trials of the search with parameters are too few, {LEAST_TRIALS} are needed"


def result_frame(
    rows: list[dict[str, Any]], columns: list[str], reasons: Sequence[str], attrs: dict[str, Any]
) -> pd.DataFrame:
    """Build a frame with `objective` and `columns` (the last one numeric), and `attrs` with `reason` added."""
    frame = pd.DataFrame(rows, columns=["objective", *columns])
    number = columns[-1]
    frame = frame.astype({name: "float64" if name == number else "string" for name in frame.columns})
    frame.attrs.update(attrs, reason="; ".join(reasons))
    return frame


# --- Interactions of pairs of parameters ------------------------------------------------------------------------------

#: Random forest: trees, most trials for training, most trials for partial dependences.
_TREES, _MOST_FITTED, _MOST_POINTS = 128, 1000, 40
#: Below this out-of-bag R^2 the forest does not predict the objective, so its interactions are noise.
_LEAST_R2 = 0.2
#: Least share of a pair's joint effect in the prediction's variance. Without this limit, H^2 of two parameters
#: without effect would be a ratio of noise.
_LEAST_EFFECT = 0.05


def interactions(path: str | Path) -> pd.DataFrame:
    """Return pairs of parameters whose joint effect is not the sum of their single effects.

    Friedman and Popescu's statistic H^2 (2008, "Predictive learning via rule ensembles", section 8.1) of a seeded
    random forest: the share of the variance of a pair's joint partial dependence that is not the sum of the two
    single ones. On simulated trials it is 0.00 to 0.03 for additive objectives and 0.59 to 1 for a pure product of
    centred parameters from 120 trials; with few trials a forest underestimates interactions.

    Args:
        path: path of one study, as for `analysis.load`.

    Returns:
        Columns ``objective``, ``first``, ``second``, ``strength`` in [0, 1], strongest first. Pairs whose
        joint effect is below a twentieth of the forest's variance are left out. Parameters are the columns of
        `analysis.load` that vary and that every trial has; lists are left out. An objective that cannot be analysed has
        no rows. ``df.attrs``: ``reason`` (why rows are missing, empty if none are), ``trials`` (number of trials used)
        and ``r2`` (for each objective the forest's out-of-bag R^2, the part of the variance that it can predict).

    Raises:
        UserError: nothing can be read.
    """
    trials = load(path)
    objectives = objectives_of(saving_of(trials), quality_of(trials).name)
    done = trials[(trials["status"] == "completed") & (trials["role"] == "search")].dropna(subset=list(objectives))
    columns = ["first", "second", "strength"]
    attrs: dict[str, Any] = {"trials": len(done), "r2": {}}
    if len(done) < LEAST_TRIALS:
        return result_frame([], columns, [too_few(len(done))], attrs)
    points = _parameters(done)
    if points.shape[1] < 2:
        reason = "an interaction needs two parameters that every trial has and that vary"
        return result_frame([], columns, [reason], attrs)
    rows: list[dict[str, Any]] = []
    reasons = []
    for objective in objectives:
        values = done[objective].to_numpy(dtype="float64")
        if is_constant(values):
            reasons.append(f"{objective} is the same in all {len(done)} trials")
            continue
        forest = _forest(points.to_numpy(), values)
        attrs["r2"][objective] = float(forest.oob_score_)
        if forest.oob_score_ < _LEAST_R2:
            reasons.append(f"{objective} cannot be predicted from the parameters (R^2 {forest.oob_score_:.2f})")
            continue
        evaluated = points.to_numpy()[drawn(len(points), _MOST_POINTS)]
        found = [
            {"objective": objective, "first": points.columns[j], "second": points.columns[k], "strength": strength}
            for j, k, strength, effect in pair_strengths(forest.predict, evaluated)
            if effect >= _LEAST_EFFECT
        ]
        if not found:
            reasons.append(f"no pair of parameters moves {objective}")
        rows += sorted(found, key=lambda row: -row["strength"])
    return result_frame(rows, columns, reasons, attrs)


def pair_strengths(
    predict: Callable[[NDArray[np.float64]], NDArray[np.float64]], points: NDArray[np.float64]
) -> list[tuple[int, int, float, float]]:
    """Compute Friedman and Popescu's H^2 of every pair of columns (2008, equation 44).

    Args:
        predict: maps (M, P) points to (M,) values.
        points: (N, P) points at which partial dependences are evaluated and over which they are averaged;
            N^2 P (P + 1) / 2 predictions.

    Returns:
        For each pair j < k: j, k, H^2 in [0, 1] (0 where the pair has no effect), and the variance of its joint
        partial dependence as a share of that of the prediction.
    """
    count = points.shape[1]
    single = [_partial_dependence(predict, points, (j,)) for j in range(count)]
    variance = float(np.var(predict(points)))
    found = []
    for j, k in combinations(range(count), 2):
        joint = _partial_dependence(predict, points, (j, k))
        effect, beyond = float(np.mean(joint**2)), float(np.mean((joint - single[j] - single[k]) ** 2))
        # On few points the ratio may slightly exceed 1, as the single effects are not exactly uncorrelated.
        strength = min(1.0, beyond / effect) if effect > 1e-12 * variance else 0.0
        found.append((j, k, strength, effect / variance if variance > 0 else 0.0))
    return found


def _partial_dependence(
    predict: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    points: NDArray[np.float64],
    columns: tuple[int, ...],
) -> NDArray[np.float64]:
    """Return (N,) centred mean predictions with these columns from one point, the others averaged over all points."""
    number, width = points.shape
    grid = np.tile(points, (number, 1, 1))  # [point, background, column]
    for column in columns:
        grid[:, :, column] = points[:, column, None]
    means = predict(grid.reshape(-1, width)).reshape(number, number).mean(axis=1)
    return means - means.mean()


def _forest(points: NDArray[np.float64], values: NDArray[np.float64]) -> Any:
    from sklearn.ensemble import RandomForestRegressor  # slow to load, and not needed for a study of few trials

    chosen = drawn(len(points), _MOST_FITTED)
    forest = RandomForestRegressor(n_estimators=_TREES, oob_score=True, random_state=SEED)
    return forest.fit(points[chosen], values[chosen])


def _parameters(done: pd.DataFrame) -> pd.DataFrame:
    """Return the hyperparameters that vary and that every trial has, as numbers; text by alphabetical order."""
    found = {}
    for name, kind in field_kinds().items():
        if kind is tuple or name not in done.columns or done[name].isna().any() or done[name].nunique() < 2:
            continue
        column = done[name].astype("category").cat.codes if kind is str else done[name]
        found[name] = column.astype("float64").to_numpy()
    return pd.DataFrame(found)
