"""What mattered: how much each parameter moves the objectives, and which pairs act together.

Both look at the completed trials of role ``search`` alone: the baseline and the controls have no parameters, and a
published starting point may lie outside the searched ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.metrics import OBJECTIVES

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

#: Fewest trials of which anything is said. In 20 draws of 20 random trials with seven parameters, two of which act with
#: weights 2 and 1, fANOVA had the first right in all and the second in 16; with 40 trials, both in all; with 10, both
#: in 6.
LEAST_TRIALS = 20
#: Most trials that fANOVA takes, as its time grows faster than their number; a seeded draw beyond it.
_MOST_FANOVA_TRIALS = 200
_FANOVA_TREES = 32
#: PED-ANOVA asks what the best trials have in common: this share of them, but at least five.
_TOP_SHARE, _LEAST_TOP = 0.1, 5
#: Forest behind `interactions`: trees, most trials it learns from, most trials it is asked about.
_TREES, _MOST_LEARNED, _MOST_ASKED = 128, 1000, 40
#: Below this out-of-bag R^2 the forest does not know the objective, so its interactions are noise.
_LEAST_R2 = 0.2
#: A pair is listed if its joint effect has this share of the prediction's variance. Without such a floor two
#: parameters that do nothing show the ratio of one noise to another.
_LEAST_EFFECT = 0.05
_SEED = 0


# --- importance -----------------------------------------------------------------------------------------------------


def importance(path: str | Path) -> pd.DataFrame:
    """How much each parameter mattered for each objective, by Optuna's evaluators.

    Where every trial was asked for the same parameters in the same ranges, this is fANOVA (Hutter, Hoos and
    Leyton-Brown 2014, "An Efficient Approach for Assessing Hyperparameter Importance"): the share of the objective's
    variance over the searched ranges that a parameter explains alone. fANOVA knows only parameters that all trials
    have, so in a conditional space it is Optuna's default, PED-ANOVA (Watanabe, Bansal and Hutter 2023, and its
    extension to conditional parameters): how much the best tenth of the trials, at least five, agree on a parameter.
    Of the two, fANOVA ranks better from few trials. Seeded: the same study gives the same numbers.

    Trials that the search never ran, for they were known to stop nothing, are not counted.

    Args:
        path: a study's folder, or its Optuna journal.

    Returns:
        Columns ``objective``, ``parameter`` (as in the Optuna study, ``linear.CAC_RULE_DEPTH`` for one of a branch),
        ``importance`` in [0, 1], greatest first, with the sum 1 for each objective. An objective of which nothing can
        be said has no rows. ``df.attrs``: ``reason`` (why rows are missing, empty if none are), ``evaluator``,
        ``trials`` (how many were looked at).

    Raises:
        UserError: no study there.
    """
    trials = _search_trials(_journal_of(path))
    attrs: dict[str, Any] = {"evaluator": "", "trials": len(trials)}
    if len(trials) < LEAST_TRIALS:
        return _result([], ["parameter", "importance"], [_too_few(len(trials))], attrs)
    conditional = any(trial.distributions != trials[0].distributions for trial in trials)
    attrs["evaluator"] = "PED-ANOVA" if conditional else "fANOVA"
    evaluate = _ped_anova if conditional else _fanova
    rows: list[dict[str, Any]] = []
    reasons = []
    for place, objective in enumerate(OBJECTIVES):
        if _is_constant([trial.values[place] for trial in trials]):
            reasons.append(f"{objective} is the same in all {len(trials)} trials")
            continue
        found = evaluate(trials, place)
        total = sum(found.values())
        if total <= 0:
            reasons.append(f"no parameter explains {objective}")
            continue
        shares = {name: value / total for name, value in found.items()}
        ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
        rows += [{"objective": objective, "parameter": name, "importance": share} for name, share in ordered]
    return _result(rows, ["parameter", "importance"], reasons, attrs)


def _journal_of(path: str | Path) -> Path:
    from analysis.layout import Layout
    from analysis.sources import recognise

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
    """The trials that count, in the order of their numbers."""
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    from analysis.layout import STUDY_NAME

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        study = optuna.load_study(study_name=STUDY_NAME, storage=storage)
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    except KeyError:
        raise UserError(f"the journal {journal} holds no study of a search: importance needs one") from None
    except (ValueError, AssertionError, IndexError, TypeError) as error:  # a damaged line stops Optuna's reader
        raise UserError(f"Optuna cannot read the journal {journal}, so importance cannot be told: {error}") from None
    finally:
        optuna.logging.set_verbosity(level)
    return [trial for trial in trials if _counts(trial)]


def _counts(trial: FrozenTrial) -> bool:
    attrs = trial.user_attrs
    return (
        attrs.get("role", "search") == "search"
        and "skipped" not in attrs
        and len(trial.params) > 0
        and trial.values is not None
        and len(trial.values) == len(OBJECTIVES)
        and bool(np.isfinite(trial.values).all())
        and _within_ranges(trial)
    )


def _within_ranges(trial: FrozenTrial) -> bool:
    """Whether the values are of the ranges they were asked for in; those that a search begins with need not be."""
    from optuna.trial import create_trial

    try:
        create_trial(params=trial.params, distributions=trial.distributions, values=trial.values)
    except ValueError:
        return False
    return True


def _fanova(trials: Sequence[FrozenTrial], place: int) -> dict[str, float]:
    from optuna.importance import FanovaImportanceEvaluator

    drawn = [trials[i] for i in _drawn(len(trials), _MOST_FANOVA_TRIALS)]
    evaluator = FanovaImportanceEvaluator(n_trees=_FANOVA_TREES, seed=_SEED)
    return _evaluated(drawn, evaluator, lambda trial: trial.values[place])


def _ped_anova(trials: Sequence[FrozenTrial], place: int) -> dict[str, float]:
    from optuna.importance import PedAnovaImportanceEvaluator

    share = max(_TOP_SHARE, _LEAST_TOP / len(trials))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=share)
    # It asks what leads to low values, whatever the study's directions; both objectives are better high.
    return _evaluated(trials, evaluator, lambda trial: -trial.values[place])


def _evaluated(
    trials: Sequence[FrozenTrial], evaluator: Any, target: Callable[[FrozenTrial], float]
) -> dict[str, float]:
    """An evaluator's values on these trials alone, not normalised: all zero stays visible."""
    import warnings

    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(directions=["maximize"] * len(OBJECTIVES))
        study.add_trials(trials)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that normalize is experimental, and which way the target goes
            found = optuna.importance.get_param_importances(study, evaluator=evaluator, target=target, normalize=False)
    finally:
        optuna.logging.set_verbosity(level)
    return {name: float(value) for name, value in found.items()}


# --- interaction ----------------------------------------------------------------------------------------------------


def interactions(path: str | Path) -> pd.DataFrame:
    """Pairs of parameters whose effect together is more than the sum of their effects.

    Friedman and Popescu's statistic H^2 (2008, "Predictive learning via rule ensembles", section 8.1) of a seeded
    random forest: the share of the variance of a pair's joint partial dependence that is not the sum of the two
    single ones. On simulated trials it comes to 0.00 to 0.03 for additive objectives and to 0.6 to 1 for a pure
    product of centred parameters from 120 trials; from few trials a forest sees less interaction than there is.

    Args:
        path: what `analysis.load` reads, one study.

    Returns:
        Columns ``objective``, ``first``, ``second``, ``strength`` in [0, 1], strongest first. Pairs that have together
        less than a twentieth of the forest's variance are left out. Parameters are the columns of `analysis.load` that
        vary and that every trial has; lists are left out. An objective of which nothing can be said has no rows.
        ``df.attrs``: ``reason`` (why rows are missing, empty if none are), ``trials`` (how many were looked at) and
        ``r2`` (for each objective the forest's out-of-bag R^2, the part of the variance that it can predict).

    Raises:
        UserError: nothing there that can be read.
    """
    from analysis.loading import load

    trials = load(path)
    done = trials[(trials["status"] == "completed") & (trials["role"] == "search")].dropna(subset=list(OBJECTIVES))
    columns = ["first", "second", "strength"]
    attrs: dict[str, Any] = {"trials": len(done), "r2": {}}
    if len(done) < LEAST_TRIALS:
        return _result([], columns, [_too_few(len(done))], attrs)
    points = _parameters(done)
    if points.shape[1] < 2:
        return _result([], columns, ["an interaction needs two parameters that every trial has and that vary"], attrs)
    rows: list[dict[str, Any]] = []
    reasons = []
    for objective in OBJECTIVES:
        values = done[objective].to_numpy(dtype="float64")
        if _is_constant(values):
            reasons.append(f"{objective} is the same in all {len(done)} trials")
            continue
        forest = _forest(points.to_numpy(), values)
        attrs["r2"][objective] = float(forest.oob_score_)
        if forest.oob_score_ < _LEAST_R2:
            reasons.append(f"{objective} cannot be predicted from the parameters (R^2 {forest.oob_score_:.2f})")
            continue
        asked = points.to_numpy()[_drawn(len(points), _MOST_ASKED)]
        found = [
            {"objective": objective, "first": points.columns[j], "second": points.columns[k], "strength": strength}
            for j, k, strength, effect in pair_strengths(forest.predict, asked)
            if effect >= _LEAST_EFFECT
        ]
        if not found:
            reasons.append(f"no pair of parameters moves {objective}")
        rows += sorted(found, key=lambda row: -row["strength"])
    return _result(rows, columns, reasons, attrs)


def pair_strengths(
    predict: Callable[[NDArray[np.float64]], NDArray[np.float64]], points: NDArray[np.float64]
) -> list[tuple[int, int, float, float]]:
    """Friedman and Popescu's H^2 of every pair of columns (2008, equation 44).

    Args:
        predict: from (M, P) points to (M,) values.
        points: (N, P) points at which, and over which, partial dependences are taken; N^2 P (P + 1) / 2 predictions.

    Returns:
        For each pair j < k: j, k, H^2 in [0, 1] (0 where the pair has no effect), and the variance of its joint
        partial dependence as a share of that of the prediction.
    """
    count = points.shape[1]
    single = [_partial_dependence(predict, points, (j,)) for j in range(count)]
    variance = float(np.var(predict(points)))
    found = []
    for j in range(count):
        for k in range(j + 1, count):
            joint = _partial_dependence(predict, points, (j, k))
            effect, beyond = float(np.mean(joint**2)), float(np.mean((joint - single[j] - single[k]) ** 2))
            # On few points the ratio may pass 1 a little, for the single effects are not exactly uncorrelated.
            strength = min(1.0, beyond / effect) if effect > 1e-12 * variance else 0.0
            found.append((j, k, strength, effect / variance if variance > 0 else 0.0))
    return found


def _partial_dependence(
    predict: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    points: NDArray[np.float64],
    columns: tuple[int, ...],
) -> NDArray[np.float64]:
    """(N,) mean prediction with these columns as at each point and the others as at all points; centred."""
    number, width = points.shape
    grid = np.tile(points, (number, 1, 1))  # [point, background, column]
    for column in columns:
        grid[:, :, column] = points[:, column, None]
    means = predict(grid.reshape(-1, width)).reshape(number, number).mean(axis=1)
    return means - means.mean()


def _forest(points: NDArray[np.float64], values: NDArray[np.float64]) -> Any:
    from sklearn.ensemble import RandomForestRegressor

    drawn = _drawn(len(points), _MOST_LEARNED)
    forest = RandomForestRegressor(n_estimators=_TREES, oob_score=True, random_state=_SEED)
    return forest.fit(points[drawn], values[drawn])


def _parameters(done: pd.DataFrame) -> pd.DataFrame:
    """The hyperparameters that vary and that every trial has, as numbers; text by its place in the alphabet."""
    from trainables.config import field_kinds

    found = {}
    for name, kind in field_kinds().items():
        if kind is tuple or name not in done.columns or done[name].isna().any() or done[name].nunique() < 2:
            continue
        column = done[name].astype("category").cat.codes if kind is str else done[name]
        found[name] = column.astype("float64").to_numpy()
    return pd.DataFrame(found)


# --- both -----------------------------------------------------------------------------------------------------------


def _drawn(count: int, most: int) -> NDArray[np.int64]:
    """Places of at most so many of `count`, ascending; seeded."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(_SEED).choice(count, most, replace=False))


def _is_constant(values: Sequence[float] | NDArray[np.float64]) -> bool:
    return float(np.ptp(np.asarray(values, dtype="float64"))) <= 1e-12


def _too_few(count: int) -> str:
    return f"{count} completed trials of the search with parameters are too few, {LEAST_TRIALS} are needed"


def _result(
    rows: list[dict[str, Any]], columns: list[str], reasons: Sequence[str], attrs: dict[str, Any]
) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["objective", *columns])
    number = columns[-1]
    frame = frame.astype({name: "float64" if name == number else "string" for name in frame.columns})
    frame.attrs.update(attrs, reason="; ".join(reasons))
    return frame
