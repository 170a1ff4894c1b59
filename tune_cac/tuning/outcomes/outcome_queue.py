"""Order in which a search trains distinct outcomes: those whose savings, known before, promise a better answer.

A model of the quality chooses the outcome with the highest expected improvement of answer and front for the compute
that its training executes. The answer is to hold on another seed, too, so what the model does not take to do that with
the wanted probability is trained for the front alone. The search ends when no outcome left is expected to improve them
by a worthwhile share.

Everything is a function of the study's trials and the recorded runs, so a resumed search goes on in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState
from ray import tune

from analysis.formatting import plural
from analysis.metrics.noise import is_less
from analysis.metrics.pareto import hypervolume, non_dominated
from analysis.metrics.ranking import CUT
from analysis.trace_replay.same_run import RESOLUTION, varied_variables
from analysis.trace_replay.traces import RunTrace, read_trace
from trainables.config import TrialConfig
from trainables.quality import Quality
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.outcomes.distinct_outcomes import (
    Depths,
    Drawn,
    LossScale,
    Outcome,
    distinct_outcomes,
    facts_of,
    features_of,
    identity_in,
    is_predicted,
    loss_scale,
    predicted_again,
    shared_steps,
    stops_in,
)
from tune_cac.tuning.outcomes.quality_model import Posterior, posterior
from tune_cac.tuning.outcomes.run_lengths import EPOCHS, OF_EPOCHS, OUTCOME, PREDICTED, UNPREDICTED
from tune_cac.tuning.study_trials import StudyTrials, missing_objectives, saved_of_baseline
from tune_cac.tuning.trial_config import asked_of
from tune_cac.tuning.warm_start.baseline import WarmStart, completed, outcome, predictions, spread

if TYPE_CHECKING:
    from analysis.io.layout import Layout


# --- Probabilities of holding on another seed, as far as a search knows them ------------------------------------------
# They are written after every trial, so that a search that is killed leaves them behind.


class Search(Protocol):
    """A searcher that may choose outcomes."""

    outcomes: OutcomeQueue | None
    """Knows the probabilities; None where a sampler chooses."""

    @property
    def gave_up(self) -> str:
        """Return why the search ended before anything could be known; empty otherwise."""


class HoldsWriter(tune.Callback):
    """Write `StudyInfo.holds` after each trial.

    Args:
        layout: of the study.
        searcher: that knows them, where it chooses outcomes.
    """

    def __init__(self, layout: Layout, searcher: Search) -> None:
        self._layout, self._searcher = layout, searcher

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles its callbacks for a restore that we do not use; a searcher cannot be pickled.
        return {}

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Write them once the searcher has the trial's result."""
        with suppress(OSError):  # Ray would take it for the trial's; they are written again after the next one
            write_holds(self._layout, self._searcher)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Write them without a trial that failed."""
        self.on_trial_complete(iteration, trials, trial)


def write_holds(layout: Layout, searcher: Search) -> None:
    """Write the probabilities of all trained outcomes into `study.json`, unless it has the same."""
    if (known := _known(searcher)) is None:
        return
    holds = {str(trial): share for trial, share in known.holds().items()}
    if (info := layout.read_info()).holds != holds:
        layout.write_info(replace(info, holds=holds))


def unsure_trials(searcher: Search) -> list[int]:
    """Return trials that are less sure to hold on another seed than the answer is to be, as far as that is known."""
    known = _known(searcher)
    return [] if known is None else known.unsure()


def _known(searcher: Search) -> OutcomeQueue | None:
    return None if searcher.gave_up else searcher.outcomes


# --- The middle of the region of settings that train alike: what a search trains of an outcome, and hands out ---------
# A threshold at the edge of its region is one rounding away from another training, on this seed and the more on
# another.

#: Values that are tried between the last one known to train alike and the first one known not to.
_BETWEEN = 15
#: Digits of a threshold.
_DIGITS = 5


def at_middle(one: Outcome, known: WarmStart, trace: RunTrace) -> Outcome:
    """Return an outcome with the variables of its setting's rule in the middle of the values that train alike.

    Each variable in turn is moved to the middle of its own values within the space's range, the others as they are by
    then; whole numbers stay on the space's grid. One that trains alike over all of its range is left as it was drawn:
    it decides nothing on this run, and its middle would say as little.

    Args:
        one: as the trace predicts it.
        known: the space on the run of its length.
        trace: recorded runs of that length.
    """
    drawn, _ = asked_of(known.space, one.parameters, known.context)
    parameter_of = {full.rpartition(".")[2]: full for full in one.parameters}  # those of a branch begin with its name
    for name in varied_variables(TrialConfig.from_mapping(one.config)):
        parameter = parameter_of.get(name, "")
        own, asked = one.parameters.get(parameter), drawn.distributions.get(parameter)
        if own is None or not isinstance(asked, (FloatDistribution, IntDistribution)):
            continue  # one of a few choices
        if not isclose(own, one.config.get(name, np.nan), abs_tol=10.0**-_DIGITS):  # Optuna's steps are not rounded
            continue  # another rule's

        def alike(values: Sequence[Any], one: Outcome = one, name: str = name) -> list[bool]:
            rows = predictions(trace, [{**one.config, name: value} for value in values], branches=True)
            return [row is not None and outcome(row, one.config) == one.identity for row in rows]

        unit = asked.step if isinstance(asked, IntDistribution) else RESOLUTION
        low, high = (_edge(own, end, unit, alike) for end in (asked.low, asked.high))
        middle = _as(own, (low + high) / 2, unit)
        if (low, high) != (asked.low, asked.high) and middle != own and alike([middle])[0]:
            one = replace(one, parameters={**one.parameters, parameter: middle}, config={**one.config, name: middle})
    return one


def _edge(own: float, end: float, unit: float, alike: Callable[[Sequence[Any]], list[bool]]) -> float:
    """Return the last value from a setting's own towards an end that trains alike.

    Steps double until one trains otherwise; then the values between are tried.

    Args:
        own: the setting's value; an int for a variable in iterations.
        end: least or highest value of the space.
        unit: first step; all steps of an int are multiples of it.
        alike: tells of values whether they train as the setting does.
    """
    if own == end:
        return own
    sign, width = (1 if end > own else -1), abs(end - own)
    doubled = [own + sign * step for k in range(64) if (step := unit * 2**k) < width]
    values = [own, *(_as(own, value, unit) for value in doubled), end]
    last = _last_alike(values, alike)
    if last + 1 < len(values):
        between = np.linspace(values[last], values[last + 1], _BETWEEN + 2)[:-1]
        values = list(dict.fromkeys(_as(own, value, unit) for value in between))
        last = _last_alike(values, alike)
    return values[last]


def _last_alike(values: Sequence[float], alike: Callable[[Sequence[Any]], list[bool]]) -> int:
    """Return the place of the last value up to which all train as the first one."""
    same = [True, *(alike(values[1:]) if len(values) > 1 else [])]
    return next((place for place, is_same in enumerate(same) if not is_same), len(same)) - 1


def _as(own: float, value: float, unit: float) -> float:
    """Return a value as the setting's own is written: whole steps from it, or a number of few digits."""
    return int(own + round((value - own) / unit) * unit) if isinstance(own, int) else round(float(value), _DIGITS)


# --- Outcomes that a study has trained or is training, read from its trials -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tried:
    """An outcome that was trained or is being trained."""

    trial: int
    """Number of its trial."""
    epochs: int
    """Epochs of the run."""
    stops: tuple[tuple[int, int], ...]
    """(iteration, position of the last parameter stopped) of each stop."""
    saved: float
    """Compute saved, a fraction of that of the full run."""
    loss: float | None
    """Of quality against the baseline; None while it is being trained."""
    identity: str = ""
    """`Outcome.identity`, predicted until it is trained; empty for a dense run."""
    config: Mapping[str, Any]
    """Fields of its configuration."""
    chosen: bool = False
    """True if it was chosen as an outcome."""

    @property
    def lost(self) -> float:
        """Return the loss of one that was trained."""
        assert self.loss is not None, f"trial {self.trial} is being trained"
        return self.loss


def tried_in(
    trials: Iterable[FrozenTrial],
    baseline: Mapping[str, Any],
    quality: Quality,
    epochs: int,
    predicted: Callable[[int, Sequence[Mapping[str, Any]]], list[dict[str, Any] | None]],
) -> list[Tried]:
    """Return what was trained or is being trained, by trial.

    Failed trials are as bad as a run can be.

    Args:
        trials: of the study.
        baseline: its result row.
        quality: its metric.
        epochs: of the full run.
        predicted: returns stops, savings and identity of settings of a length, None for what is not predicted.
    """
    found: list[Tried] = []
    without_row: dict[int, list[tuple[dict[str, Any], Mapping[str, Any]]]] = {}  # by epochs: facts and configuration
    for trial in trials:
        attrs = trial.user_attrs
        if attrs.get("role") in ("baseline", "control") or "continued_by" in attrs:
            continue
        row, config = attrs.get("row"), attrs.get("config", {})
        own_epochs = config.get(EPOCHS, epochs)
        known: dict[str, Any] = {
            "trial": trial.number, "epochs": own_epochs, "chosen": OUTCOME in attrs, "config": config,
        }  # fmt: skip
        if row is not None and not missing_objectives(row, quality):
            loss = quality.lost(row["quality"], baseline["quality"])
            stops, saved = stops_in(row), saved_of_baseline(row, baseline)
            found.append(Tried(**known, stops=stops, saved=saved, loss=loss, identity=identity_in(row, config)))
            continue
        known["loss"] = None if trial.state == TrialState.RUNNING else np.inf  # it runs, or failed
        if attrs.get("role") == CUT:
            found.append(Tried(**known, stops=(), saved=1 - own_epochs / epochs))
        elif config:
            without_row.setdefault(own_epochs, []).append((known, config))
    for own_epochs, several in without_row.items():
        facts = predicted(own_epochs, [config for _, config in several])
        found += [
            Tried(**known, stops=of["stops"], saved=of["saved"], identity=of["identity"])
            for (known, _), of in zip(several, facts, strict=True)
            if of is not None
        ]
    return sorted(found, key=lambda one: one.trial)


# --- Improvements that an outcome promises, of the answer and of the front, and the least that is worth a training

#: Expected improvement of the answer, or of the front, a fraction of the compute, below which no outcome is worth its
#: training; or this share of what they are, where that is less, but no less than the third.
WORTHWHILE, WORTHWHILE_AREA = 0.005, 0.01
#: Difference of the shares of a run that a layer trains below which the quality of two runs cannot be told apart: less
#: than an epoch of 30, whose effect the noise of a seed covers.
ALIKE = 0.02
_WORTHWHILE_SHARE, _LEAST_WORTHWHILE = 0.05, 0.001


def worthwhile(known: float, most: float) -> float:
    """Return the least expected improvement of what is known by now, ``most`` where there is much of it.

    >>> worthwhile(0.5, 0.01), worthwhile(0.06, 0.01), worthwhile(0.0, 0.01)
    (0.01, 0.003, 0.001)
    """
    return min(most, max(_WORTHWHILE_SHARE * known, _LEAST_WORTHWHILE))


def area_of(front: Sequence[tuple[float, float]], worst: float) -> float:
    """Return the mean saving of (loss, saving) points up to a loss ``worst``, gains counted as no loss.

    >>> area_of([(-0.1, 0.2), (0.5, 0.4), (2.0, 0.9), (float("inf"), 1.0)], 1.0)
    0.30000000000000004
    """
    points = np.array([(-max(loss, 0.0), saved) for loss, saved in front if loss < worst and saved > 0])
    return hypervolume(points[non_dominated(points)], (-worst, 0.0)) / worst if len(points) else 0.0


def answer_gained(
    saved: NDArray[np.float64], best: float, likely: NDArray[np.bool_], here: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (m,) expected improvements of the answer's saving; none by what is not likely enough to hold elsewhere.

    >>> answer_gained(np.array([0.5, 0.5, 0.2]), 0.25, np.array([True, False, True]), np.array([0.8, 1, 1])).tolist()
    [0.2, 0.0, 0.0]

    Args:
        saved: (m,) compute that candidates save.
        best: that of the answer so far.
        likely: (m,) whether they are sure enough to stay within the allowed loss on another seed.
        here: (m,) probabilities of staying within it on the study's own seed.
    """
    found: NDArray[np.float64] = np.where(likely, here, 0.0) * np.maximum(saved - best, 0.0)
    return found


def are_new(candidates: NDArray[np.float64], trained: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return (m,) whether candidates differ from every run by what can be told apart.

    Two runs of one length cannot if they save alike, to `WORTHWHILE`, and no layer trains longer by `ALIKE` in one.

    >>> trained = np.array([[0.502, 1.0, 0.4, 0.6]])
    >>> are_new(np.array([[0.501, 1.0, 0.41, 0.59], [0.501, 1.0, 0.3, 0.7], [0.501, 0.5, 0.4, 0.6]]), trained).tolist()
    [False, True, True]

    Args:
        candidates: (m, k + 2) features as in `quality_model`.
        trained: (n, k + 2).
    """
    least = np.array([WORTHWHILE, 1e-9, *[ALIKE] * (trained.shape[1] - 2)])
    found: NDArray[np.bool_] = np.array([(np.abs(trained - one) > least).any(axis=1).all() for one in candidates], bool)
    return found


# --- Order in which a search trains distinct outcomes -----------------------------------------------------------------

#: Settings that are drawn to find the outcomes of a space.
SETTINGS = 4000
#: Outcomes of them that are looked at, spread over what they save.
MOST_OUTCOMES = 500
#: Outcomes, the newest, of which the quality is modelled.
MOST_MODELLED = 200
#: Outcomes that are trained at least before the search may end by itself.
LEAST = 6
#: Least cost of a training in full trainings, for one whose steps are nearly all known still has to be begun.
_LEAST_COST = 0.05


class OutcomeQueue:
    """Choose the outcomes that a study trains.

    Args:
        trials: of the study.
        roots: returns what was learned from the recorded dense runs, by their epochs, the full one first.
        tree: the study's ``tree`` folder, or its URI.
        base: config of the baseline; its seed draws the settings.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
        sure: probability of staying within it on another seed that the answer has.
        sharing: whether trials share training.
        holds: what `holds` returned when the study was searched before, for where outcomes are known no longer.
    """

    def __init__(
        self,
        trials: StudyTrials,
        roots: Callable[[], Mapping[int, WarmStart]],
        tree: Path | str,
        base: TrialConfig,
        allowed_drop: float | str,
        *,
        sure: float,
        sharing: bool = True,
        holds: Mapping[int, float] | None = None,
    ) -> None:
        self._sure = sure
        self._sharing = sharing
        self._trials, self._roots, self._tree, self._allowed_drop = trials, roots, tree, allowed_drop
        self._quality, self._seed, self._epochs = base.quality, base.seed, base.epochs
        self._outcomes: dict[int, list[Outcome]] = {}  # by epochs
        self._unpredicted: list[Drawn] = []  # of the full length
        self._depths: Depths | None = None
        self._held_before = dict(holds or {})
        self._held: tuple[int, dict[int, float]] = 0, {}  # how many trials had ended, and probabilities of theirs
        self._promising = MOST_OUTCOMES  # outcomes that were worth their training when one was chosen last
        self._nothing_at: tuple[int, int] | None = None  # trials, and ended ones, when none was
        self.ended = False
        """True once no outcome is left that is worth its training."""

    @property
    def predicts(self) -> bool:
        """Return whether outcomes of the space are known before they are trained."""
        drawn = [self._drawn(epochs, known) for epochs, known in self._roots().items()]  # of all lengths, to know them
        return any(drawn)

    def _known_depths(self) -> Depths:
        """Return the depths of stops, on a run whose outcomes are known: their stops were counted on it."""
        if self._depths is None:
            run = next(known for epochs, known in self._roots().items() if self._drawn(epochs, known))
            self._depths = Depths(read_trace(StageStore(self._tree, run.trace.root)))
        return self._depths

    def _drawn(self, epochs: int, known: WarmStart) -> list[Outcome]:
        """Return the outcomes of a run's drawn settings, as the run without a method predicts them."""
        if epochs not in self._outcomes:
            self._outcomes[epochs] = self._distinct(known) if known.knows_what_acts else []
        return self._outcomes[epochs]

    def _distinct(self, known: WarmStart) -> list[Outcome]:
        drawn = known.drawn(self._seed, SETTINGS)
        base = known.base.to_dict()
        if known.base.epochs != self._epochs and known.choices(self._seed) != self._roots()[self._epochs].choices(
            self._seed
        ):
            warnings.warn("no stops on cut runs: choices of the space depend on the run's length", stacklevel=2)
            return []
        if known.space.options or not all(is_predicted(values, base) for _, values in drawn):
            return []
        try:  # what each draw's stops save, which the dense run may not have needed
            store = StageStore(self._tree, known.trace.root)
            known = replace(known, trace=completed(store, known.trace, [values for _, values in drawn]))
        except Exception as error:  # noqa: BLE001 - the user's model and loss may raise anything
            warnings.warn(f"not every outcome can be predicted: {error}", stacklevel=2)
        found, unpredicted = distinct_outcomes(known, drawn, share=known.trace.total_steps / self._total_steps)
        if known.base.epochs == self._epochs:
            self._unpredicted = unpredicted
        chosen = spread([(one.saved, place) for place, one in enumerate(found)], MOST_OUTCOMES)
        return [found[place] for place in sorted(chosen)]

    @property
    def _total_steps(self) -> int:
        return int(self._roots()[self._epochs].trace.total_steps)

    def why_ended(self) -> str:
        """Return in one line why the search ended before its trials were used up."""
        return (
            f"ended after {plural(self._trials.finished_count(), 'trial')}: of {SETTINGS:,} settings"
            f"{' for each length' if len(self._roots()) > 1 else ''} no outcome is left that is worth its training"
        )

    def about_left(self) -> int:
        """Return about how many outcomes are still begun, by how many were worth their training when one was last.

        Of n about log2(n) / 3 are trained, for each says much of the others (benchmarks/eta.py).
        """
        return 0 if self.ended else self._promising.bit_length() // 3

    def start_next(self, baseline: Mapping[str, Any]) -> optuna.Trial | None:
        """Begin the next outcome; None if none is worth training now. Then `ended` says whether that is final.

        Args:
            baseline: its result row.
        """
        trials = self._trials.all()
        now = len(trials), sum(trial.state.is_finished() or "row" in trial.user_attrs for trial in trials)
        if now == self._nothing_at:  # asked again while others run
            return None
        traces = self._traces()
        tried = self._tried(baseline, traces)
        left = self._left(tried, traces)
        chosen = self._chosen(left, tried, baseline)
        if (drawn := self._next_unpredicted(len(tried), ends=chosen is None)) is not None:
            self._trials.study.enqueue_trial(dict(drawn), user_attrs={"role": "search", UNPREDICTED: True})
            return self._trials.study.ask()
        if chosen is None:
            self._nothing_at = now
            running = [t for t in trials if t.state == TrialState.RUNNING and "row" not in t.user_attrs]
            self.ended = all(t.user_attrs.get("role") == "control" for t in running)
            return None
        attrs: dict[str, Any] = {"role": "search", OUTCOME: chosen.identity, PREDICTED: chosen.saved}
        chosen = at_middle(chosen, self._roots()[chosen.epochs], traces[chosen.epochs])
        cut = chosen.epochs < self._epochs
        if cut:
            attrs |= {EPOCHS: chosen.epochs, OF_EPOCHS: self._epochs}
        self._trials.study.enqueue_trial(
            {**chosen.parameters, **({EPOCHS: chosen.epochs} if cut else {})}, user_attrs=attrs
        )
        return self._trials.study.ask()

    def _next_unpredicted(self, tried: int, *, ends: bool) -> Mapping[str, Any] | None:
        """Return parameters of the next setting that cannot be predicted, if its turn has come; else None.

        Such settings get the share of the trials that they have of the draws, and at least `LEAST` before the end.

        Args:
            tried: trials so far.
            ends: whether no predicted outcome is worth its training.
        """
        begun = [trial.user_attrs for trial in self._trials.all() if UNPREDICTED in trial.user_attrs]
        done = sum("continued_by" not in attrs for attrs in begun)
        due = max(len(self._unpredicted) / SETTINGS * (tried + 1), LEAST if ends else 0)
        return self._unpredicted[done][0] if done + 0.5 < due and done < len(self._unpredicted) else None

    def _left(self, tried: Sequence[Tried], traces: Mapping[int, RunTrace]) -> list[Outcome]:
        """Return outcomes that no trial has or had, as all recorded runs predict them, by ascending savings.

        Args:
            tried: what was trained or is being trained.
            traces: the recorded runs, by the epochs of the lengths that have outcomes.
        """
        found = []
        for epochs, trace in traces.items():
            same = [one for one in tried if one.epochs == epochs]
            # Without a tree, what was trained is still predicted as before, whatever it was then.
            foreseen = self._predicted(trace, [one.config for one in same])
            taken = {one.identity for one in same} | {one["identity"] for one in foreseen if one is not None}
            again = predicted_again(self._outcomes[epochs], trace)
            found += [one for one in again if not one.known and one.identity not in taken]
        return sorted(found, key=lambda one: one.saved)

    def _traces(self) -> dict[int, RunTrace]:
        """Return what is recorded by now, by the epochs of the lengths that have outcomes."""
        return {
            epochs: read_trace(StageStore(self._tree, known.trace.root))
            for epochs, known in self._roots().items()
            if self._drawn(epochs, known)
        }

    def _tried(self, baseline: Mapping[str, Any], traces: Mapping[int, RunTrace] | None = None) -> list[Tried]:
        """Return what was trained or is being trained; without traces not what has no result."""

        def predicted(epochs: int, configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
            trace = (traces or {}).get(epochs)
            return [None] * len(configs) if trace is None else self._predicted(trace, configs)

        return tried_in(self._trials.all(), baseline, self._quality, self._epochs, predicted)

    def _predicted(self, trace: RunTrace, configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """Return stops, savings and identity of settings, as all recorded runs of their length predict them."""
        rows, share = predictions(trace, configs, branches=True), trace.total_steps / self._total_steps
        return [None if row is None else facts_of(row, one, share) for row, one in zip(rows, configs, strict=True)]

    def holds(self) -> dict[int, float]:
        """Return probabilities that trained outcomes stay within the allowed loss on another seed, by their trials."""
        baseline = self._trials.baseline_row()
        if baseline is None or not self.predicts:
            return self._held_before
        finished = sum(trial.state.is_finished() or "row" in trial.user_attrs for trial in self._trials.all())
        if self._held[0] != finished:  # asked for often, and each time a fit
            found: dict[int, float] = {}
            if ended := [one for one in self._tried(baseline, self._traces()) if one.loss is not None]:
                scale = self._scale(baseline)
                shares = self._expected(ended, ended, scale).other_share_within(scale.within)
                found = {one.trial: share for one, share in zip(ended, shares.tolist(), strict=True)}
            self._held = finished, found
        return self._held[1]

    def unsure(self) -> list[int]:
        """Return trials whose outcomes are less sure to hold on another seed than the answer is to be."""
        return [trial for trial, share in self.holds().items() if is_less(share, self._sure)]

    def _scale(self, baseline: Mapping[str, Any]) -> LossScale:
        rows = [trial.user_attrs.get("row", {}).get("quality") for trial in self._trials.all()]
        values = [float(value) for value in rows if value is not None]
        return loss_scale(baseline["quality"], values, self._quality, self._allowed_drop)

    def _chosen(self, left: Sequence[Outcome], tried: Sequence[Tried], baseline: Mapping[str, Any]) -> Outcome | None:
        new = are_new(self._features(left), self._features(tried))
        left = [one for one, is_new in zip(left, new, strict=True) if is_new]
        self._promising = 0
        if not left:
            return None
        scale = self._scale(baseline)
        tried, unsure = self._with_expected(tried, scale)
        answers = [one.saved for one in tried if one.lost <= scale.allowed + 1e-9 and one.trial not in unsure]
        found = self._expected(left, tried, scale)
        saved = np.array([one.saved for one in left])
        likely = ~is_less(found.other_share_within(scale.within), self._sure)
        best = max(answers, default=0.0)
        answer = answer_gained(saved, best, likely, found.own_share_within(scale.limit))
        front, worst = [(0.0, 0.0), *((one.lost, one.saved) for one in tried)], 2 * scale.unit
        area = found.area_gained(saved, front, worst) / worst
        least_answer, least_area = worthwhile(best, WORTHWHILE), worthwhile(area_of(front, worst), WORTHWHILE_AREA)
        worth = np.where((answer >= least_answer) | (area >= least_area), answer + area, 0.0)
        if sum(one.saved > 0 for one in tried) < LEAST:
            worth = answer + area
        self._promising = int(np.count_nonzero(worth))
        if not self._promising:
            return None
        self._promising >>= 3  # one of those that are still begun is this one
        return left[int(np.argmax(worth / self._costs(left, tried)))]

    def _with_expected(self, tried: Sequence[Tried], scale: LossScale) -> tuple[list[Tried], list[int]]:
        """Return what was tried, and trials that are no answer; what is being trained loses what the model expects."""
        running, unsure = [one for one in tried if one.loss is None], self.unsure()
        if not running:
            return list(tried), unsure
        ended = [one for one in tried if one.loss is not None]
        found = self._expected(running, ended, scale)
        less = is_less(found.other_share_within(scale.within), self._sure)
        unsure += [one.trial for one, yes in zip(running, less, strict=True) if yes]
        expected = [replace(one, loss=mean) for one, mean in zip(running, found.own_mean.tolist(), strict=True)]
        return [*ended, *expected], unsure

    def _expected(
        self, runs: Sequence[Outcome] | Sequence[Tried], ended: Sequence[Tried], scale: LossScale
    ) -> Posterior:
        """Return what the losses of ended runs say of runs."""
        newest = ended[-MOST_MODELLED:]
        return posterior(
            self._features(newest),
            np.array([one.lost for one in newest], float),
            self._features(runs),
            unit=scale.unit,
            luck=scale.luck_in_units,
        )

    def _features(self, runs: Sequence[Outcome] | Sequence[Tried]) -> NDArray[np.float64]:
        depths, total = self._known_depths(), self._total_steps
        rows = [
            features_of(
                depths.of_stops(one.stops, total), depths.levels, end=one.epochs / self._epochs, saved=one.saved
            )
            for one in runs
        ]
        return np.array(rows, float).reshape(len(rows), len(depths.levels) + 2)

    def _costs(self, left: Sequence[Outcome], tried: Sequence[Tried]) -> NDArray[np.float64]:
        """Return (m,) compute that trainings execute, in full trainings: that after the steps shared with others.

        After an outcome's first stop its steps save equal shares, which is exact for one stop.
        """
        if not self._sharing:
            return np.array([max(_LEAST_COST, 1 - one.saved) for one in left])
        found = []
        for one in left:
            total = round(one.share * self._total_steps)
            others = [(), *(other.stops for other in tried if other.epochs == one.epochs)]
            own_saved = 1 - (1 - one.saved) / one.share
            not_shared = 1 - shared_steps(one.stops, others, total) / total
            found.append(one.share * not_shared * (1 - own_saved * total / max(1, total - one.stops[0][0])))
        return np.maximum(_LEAST_COST, np.array(found))
