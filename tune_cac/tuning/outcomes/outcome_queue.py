"""Order in which a search trains distinct outcomes: those whose savings, known before, promise a better answer.

A model of the quality chooses the outcome with the highest expected improvement of answer and front for the compute
that its training executes. The answer is to hold on another seed, too, so what the model does not take to do that with
the wanted probability is trained for the front alone. The search ends when no outcome left is expected to improve them
by a worthwhile share.

Everything is a function of the study's trials and the recorded runs, so a resumed search goes on in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import TrialState

from analysis.formatting import plural
from analysis.metrics.other_seeds import is_less
from analysis.trace_replay.traces import RunTrace, read_trace
from trainables.config import TrialConfig
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.outcomes.distinct_outcomes import (
    Drawn,
    Outcome,
    distinct_outcomes,
    facts_of,
    is_predicted,
    predicted_again,
    shared_steps,
)
from tune_cac.tuning.outcomes.features import Depths, features_of
from tune_cac.tuning.outcomes.improvement import (
    WORTHWHILE,
    WORTHWHILE_AREA,
    answer_gained,
    are_new,
    area_of,
    worthwhile,
)
from tune_cac.tuning.outcomes.quality_model import Posterior, posterior
from tune_cac.tuning.outcomes.region_middle import at_middle
from tune_cac.tuning.outcomes.seed_luck import LossScale, loss_scale
from tune_cac.tuning.outcomes.trial_attributes import EPOCHS, OF_EPOCHS, OUTCOME, PREDICTED, UNPREDICTED
from tune_cac.tuning.outcomes.tried import Tried, tried_in
from tune_cac.tuning.study_trials import StudyTrials
from tune_cac.tuning.warm_start.baseline import WarmStart, completed
from tune_cac.tuning.warm_start.threshold_ranges import predictions, spread

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
        """Whether no outcome is left that is worth its training."""

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
        rows = [trial.user_attrs.get("row", {}).get(self._quality.key) for trial in self._trials.all()]
        values = [float(value) for value in rows if value is not None]
        return loss_scale(baseline[self._quality.key], values, self._quality, self._allowed_drop)

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
