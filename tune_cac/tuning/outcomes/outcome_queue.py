"""Order in which a search trains distinct outcomes: those whose savings, known before, promise a better answer.

The first ones bisect the savings between the best setting within the allowed loss and the cheapest one beyond it. Then
a model of the quality chooses the outcome with the highest expected improvement of the answer for the compute that its
training executes. The search ends when no outcome left is expected to improve the answer by a worthwhile share.

Everything is a function of the study's trials and the recorded runs, so a resumed search goes on in the same way.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.trial import TrialState

from analysis.trace_replay.traces import RunTrace, read_trace
from trainables.config import TrialConfig
from trainables.quality import allowed_amount
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.optuna_objectives import missing_objectives, saved_of_baseline
from tune_cac.tuning.outcomes.distinct_outcomes import (
    Outcome,
    distinct_outcomes,
    predicted_again,
    shared_steps,
    trained_shares,
)
from tune_cac.tuning.outcomes.quality_model import posterior
from tune_cac.tuning.study_trials import StudyTrials
from tune_cac.tuning.warm_start.baseline import WarmStart, completed

#: Attributes of a trial: stops of its outcome as predicted, and the region of the settings that have it.
OUTCOME, REGION = "outcome", "region"
#: Settings that are drawn to find the outcomes of a space.
SETTINGS = 4000
#: Outcomes that bisect the savings before the quality is modelled.
BISECTED = 4
#: Outcomes that are trained at least before the search may end by itself.
LEAST = 6
#: Expected improvement of the answer, a fraction of the compute, below which no outcome is worth its training.
WORTHWHILE = 0.005
#: Least cost of a training in full trainings, for one whose steps are nearly all known still has to be begun.
_LEAST_COST = 0.05


class OutcomeQueue:
    """Choose the outcomes that a study trains.

    Args:
        trials: of the study.
        known: returns what was learned from the baseline's run.
        tree: the study's ``tree`` folder, or its URI.
        base: config of the baseline; its seed draws the settings.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
    """

    def __init__(
        self,
        trials: StudyTrials,
        known: Callable[[], WarmStart],
        tree: Path | str,
        base: TrialConfig,
        allowed_drop: float | str,
    ) -> None:
        self._trials, self._known, self._tree, self._allowed_drop = trials, known, tree, allowed_drop
        self._quality, self._seed = base.quality, base.seed
        self.ended = False
        """Whether no outcome is left that is worth its training."""

    @property
    def predicts(self) -> bool:
        """Return whether outcomes of the space are known before they are trained."""
        return len(self._outcomes) > 0

    @cached_property
    def _outcomes(self) -> list[Outcome]:
        known = self._known()
        if not known.knows_what_acts:
            return []
        drawn = known.drawn(self._seed, SETTINGS)
        try:  # what each draw's stops save, which the baseline's run may not have needed
            store = StageStore(self._tree, known.trace.root)
            known = replace(known, trace=completed(store, known.trace, [values for _, values in drawn]))
        except Exception as error:  # noqa: BLE001 - the user's model and loss may raise anything
            warnings.warn(f"not every outcome can be predicted: {error}", stacklevel=2)
        return distinct_outcomes(known, drawn)

    def why_ended(self) -> str:
        """Return in one line why the search ended before its trials were used up, and how exact its answer must be."""
        return (
            f"ended after {self._trials.finished_count()} trials: none of the other outcomes of {SETTINGS} drawn "
            f"settings is expected to save {WORTHWHILE:.1%} more"
        )

    def same_run(self, best: pd.Series | None) -> str:
        """Return in one line which settings train as a trial does, bit for bit; empty if that is unknown."""
        if best is None:
            return ""
        trial = int(best["trial"])
        attrs = self._trials.all()[trial].user_attrs
        if not region_text(attrs.get(REGION, {})):
            return ""
        return f"trial {trial} is the same run with {region_text(attrs[REGION])} (ranges of the settings drawn)"

    def start_next(self, baseline: Mapping[str, Any]) -> optuna.Trial | None:
        """Begin the next outcome; None if none is worth training now. Then `ended` says whether that is final.

        Args:
            baseline: its result row.
        """
        tried = self._tried(baseline)
        left = self._left([one for one in tried if one.loss is None or one.loss == np.inf])
        chosen = self._chosen(left, tried, baseline)
        if chosen is None:
            self.ended = all(one.loss is not None for one in tried)
            return None
        attrs = {"role": "search", OUTCOME: [list(stop) for stop in chosen.stops], REGION: _readable(chosen.region)}
        self._trials.study.enqueue_trial(dict(chosen.parameters), user_attrs=attrs)
        return self._trials.study.ask()

    def _left(self, begun: Sequence[Tried]) -> list[Outcome]:
        """Return outcomes that are not known, as all recorded runs predict them, without those of some begun trials."""
        trace: RunTrace = read_trace(StageStore(self._tree, self._known().trace.root))
        stops = {one.stops for one in begun}
        found = predicted_again(self._outcomes, trace)
        return [
            one
            for one, first in zip(found, self._outcomes, strict=True)
            if not one.known and one.stops not in stops and first.stops not in stops
        ]

    def _tried(self, baseline: Mapping[str, Any]) -> list[Tried]:
        """Return what was trained or is being trained; failed trials are as bad as a run can be."""
        found = []
        for trial in self._trials.all():
            attrs = trial.user_attrs
            if attrs.get("role") in ("baseline", "control") or "continued_by" in attrs:
                continue
            row = attrs.get("row")
            if row is not None and not missing_objectives(row, self._quality):
                loss = self._quality.lost(row[self._quality.key], baseline[self._quality.key])
                found.append(Tried(stops=_stops_of(row), saved=saved_of_baseline(row, baseline), loss=loss))
            elif OUTCOME in attrs:  # it runs, or failed
                stops = tuple((int(when), int(through)) for when, through in attrs[OUTCOME])
                saved = next((one.saved for one in self._outcomes if one.stops == stops), 0.0)
                runs = trial.state == TrialState.RUNNING
                found.append(Tried(stops=stops, saved=saved, loss=None if runs else np.inf))
        return found

    def _chosen(self, left: Sequence[Outcome], tried: Sequence[Tried], baseline: Mapping[str, Any]) -> Outcome | None:
        allowed = allowed_amount(self._allowed_drop, baseline[self._quality.key])
        best = max((one.saved for one in tried if one.loss is not None and one.loss <= allowed + 1e-9), default=0.0)
        better = [one for one in left if one.saved > best + WORTHWHILE]
        if not better:
            return None
        queued = sum(one.saved > 0 for one in tried)
        if queued < BISECTED:
            target = bisected(best, better[-1].saved, tried, allowed)
            return min(better, key=lambda one: (abs(one.saved - target), one.saved))
        worth = self._worth(better, tried, best, allowed)
        if queued >= LEAST and worth.max() < WORTHWHILE:
            return None
        return better[int(np.argmax(worth / self._costs(better, tried)))]

    def _worth(
        self, better: Sequence[Outcome], tried: Sequence[Tried], best: float, allowed: float
    ) -> NDArray[np.float64]:
        """Return (m,) expected improvements of the compute saved by the answer.

        What is being trained is taken to lose what the model expects.
        """
        total = self._known().trace.total_steps
        all_stops = [*(one.stops for one in better), *(one.stops for one in tried)]
        layers = sorted({through for stops in all_stops for _, through in stops})

        def features(runs: Sequence[Outcome] | Sequence[Tried]) -> NDArray[np.float64]:
            rows = [np.array([one.saved, *trained_shares(one.stops, layers, total)]) for one in runs]
            return np.array(rows).reshape(len(runs), len(layers) + 1)

        ended = [one for one in tried if one.loss is not None]
        dense = Tried(stops=(), saved=0.0, loss=0.0)
        seen, losses = features([dense, *ended]), np.array([0.0, *(one.loss for one in ended)], float)
        unit = max(allowed, 1e-6)
        if running := [one for one in tried if one.loss is None]:
            expected = posterior(seen, losses, features(running), unit=unit).mean
            seen, losses = np.vstack([seen, features(running)]), np.append(losses, expected)
        found = posterior(seen, losses, features(better), unit=unit)
        return found.share_within(allowed) * np.array([one.saved - best for one in better])

    def _costs(self, better: Sequence[Outcome], tried: Sequence[Tried]) -> NDArray[np.float64]:
        """Return (m,) compute that trainings execute, in full trainings: that after the steps shared with others.

        After an outcome's first stop its steps save equal shares, which is exact for one stop.
        """
        total, others = self._known().trace.total_steps, [(), *(one.stops for one in tried)]
        left = np.array([1 - shared_steps(one.stops, others, total) / total for one in better])
        stopped = np.array([max(1, total - one.stops[0][0]) / total for one in better])
        return np.maximum(_LEAST_COST, left * (1 - np.array([one.saved for one in better]) / stopped))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """An outcome that was trained or is being trained."""

    stops: tuple[tuple[int, int], ...]
    """(iteration, position of the last parameter stopped) of each stop."""
    saved: float
    """Compute saved, a fraction."""
    loss: float | None
    """Of quality against the baseline; None while it is being trained."""


def bisected(best: float, most: float, tried: Sequence[Tried], allowed: float) -> float:
    """Return the middle of the widest gap of savings above the best, below the cheapest outcome that lost too much.

    >>> bisected(0.2, 0.9, [Tried(stops=(), saved=0.6, loss=0.1)], allowed=0.005)
    0.4

    Args:
        best: savings of the best outcome within the allowed loss.
        most: highest savings of an outcome.
        tried: what was trained or is being trained.
        allowed: loss of quality.
    """
    beyond = [one.saved for one in tried if one.loss is not None and one.loss > allowed + 1e-9 and one.saved > best]
    end = min([most, *beyond])
    running = sorted(one.saved for one in tried if one.loss is None and best < one.saved < end)
    edges = [best, *running, end]
    _, low, high = max((high - low, low, high) for low, high in pairwise(edges))
    return (low + high) / 2


def _stops_of(row: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    events = row.get("stop_events") or "[]"
    return tuple((event["iteration"], event["layer"]) for event in json.loads(events))


def region_text(region: Mapping[str, Sequence[float]]) -> str:
    """Return the ranges of parameters in words; a single value is left out.

    >>> region_text({"CAC_VAR_START_THR": [0.93, 0.96], "CAC_VAR_SAMPLES": [3, 3]})
    'CAC_VAR_START_THR 0.93 to 0.96'
    """
    return ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in region.items() if low < high)


def _readable(region: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    return {name: [low, high] for name, (low, high) in region.items()}
