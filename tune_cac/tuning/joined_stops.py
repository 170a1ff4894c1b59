"""Other stops for what is already trained, in spaces that join Gradient-Skip with another method.

What the other method's setting costs in quality is known once it was trained; what stops save beside it is known
before, from the recorded run. So every second suggestion takes that setting from a trial and bisects on the compute
that its stops save, between the most that was within the allowed loss and the least that was not. The other suggestions
are the sampler's, which learns from both.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from analysis.trace_replay.traces import RunTrace
from search_spaces import Space
from trainables.quality import Quality, allowed_amount
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.optuna_objectives import saved_of_baseline
from tune_cac.tuning.outcomes.distinct_outcomes import Outcome, distinct_outcomes, identity_in
from tune_cac.tuning.outcomes.path_trace import along
from tune_cac.tuning.outcomes.region_middle import at_middle
from tune_cac.tuning.outcomes.trial_attributes import OUTCOME, PREDICTED, STOPS_FOR
from tune_cac.tuning.predefined_trial import plain
from tune_cac.tuning.study_trials import StudyTrials
from tune_cac.tuning.trial_config import asked_of
from tune_cac.tuning.warm_start.baseline import WarmStart, completed
from tune_cac.tuning.warm_start.threshold_ranges import DrawnTrial, predictions

#: Settings of the stops that are drawn for one setting of the other method.
DRAWS = 1000
#: Least distance of a suggestion's predicted saving from what is known, a fraction of the compute.
APART = 0.01


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One setting of the other method, with what was trained of it."""

    key: str
    """Its parameters as text."""
    trial: FrozenTrial
    """The trial whose stops saved least, of which most is recorded."""
    trained: int
    """Its trials that have ended."""
    ranked: float
    """Saving of its best trial within the allowed loss, of the compute that the study ranks by; -inf without one."""
    least_lost: float
    """Of its trials' losses."""
    most_within: float
    """Compute saved by the stops of its trials within the allowed loss, the most; 0 without one."""
    least_beyond: float
    """The least saved by the stops of one that was not, or failed, and saved more; 1 without one."""
    known: frozenset[str]
    """Stops that were trained, and those that were expected of them."""


class JoinedStops:
    """Choose stops for settings of the other method that were trained.

    Args:
        trials: of the study.
        space: that joins a space of Gradient-Skip with another one.
        learn: returns what was learned from the baseline.
        tree: the study's ``tree`` folder, or its URI.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
        quality: the study's metric.
        seed: of the draws.
    """

    def __init__(
        self, trials: StudyTrials, space: Space, learn: Callable[[], WarmStart], tree: Path | str,
        allowed_drop: float | str, quality: Quality, seed: int,
    ) -> None:  # fmt: skip
        (self._stops,) = (part for part in space.parts if part.method == "gradskip")
        self._trials, self._learn, self._tree, self._seed = trials, learn, tree, seed
        self._allowed_drop, self._quality = allowed_drop, quality
        self._store: StageStore | None = None  # keeps how stages are linked
        self._dense: RunTrace | None = None  # with the costs of what was asked for so far
        self._saved: dict[int, float] = {}  # by the stops of a trial
        self._exhausted: set[tuple[str, int]] = set()  # settings, with how many trials they had then

    @staticmethod
    def fits(space: Space) -> bool:
        """Return whether a space joins one of Gradient-Skip with another method's."""
        return space.method.startswith("gradskip+") and [part.method for part in space.parts].count("gradskip") == 1

    def start_next(self, baseline: Mapping[str, Any], *, out_of_turn: bool = False) -> optuna.Trial | None:
        """Begin a trained setting with other stops; None if it is the sampler's turn, or nothing is left to bisect.

        Args:
            baseline: its result row.
            out_of_turn: whether it is not the sampler's turn, whatever the newest trial is.
        """
        begun = [
            t
            for t in self._trials.all()
            if t.params and "continued_by" not in t.user_attrs and t.state != TrialState.PRUNED
        ]
        if not begun or (STOPS_FOR in begun[-1].user_attrs and not out_of_turn) or self._learn().trace is None:
            return None
        try:
            found = self._chosen(begun, baseline)
        except Exception as error:  # noqa: BLE001 - the user's space or model may raise anything, a file be damaged
            warnings.warn(f"no other stops for what is trained: {type(error).__name__}: {error}", stacklevel=2)
            return None
        if found is None:
            return None
        stops, setting = found
        attrs = {"role": "search", STOPS_FOR: setting.trial.number, OUTCOME: stops.identity, PREDICTED: stops.saved}
        self._trials.study.enqueue_trial(dict(stops.parameters), user_attrs=attrs)
        return self._trials.study.ask()

    def _chosen(self, begun: Sequence[FrozenTrial], baseline: Mapping[str, Any]) -> tuple[Outcome, _Setting] | None:
        """Return the next stops, and the setting that they are for; None if nothing is left to bisect."""
        for setting in self._settings(begun, baseline):
            if (setting.key, setting.trained) in self._exhausted:
                continue
            if (found := self._next_stops(setting)) is not None:
                return found, setting
            self._exhausted.add((setting.key, setting.trained))
        return None

    def _settings(self, begun: Sequence[FrozenTrial], baseline: Mapping[str, Any]) -> list[_Setting]:
        """Return the settings of the other method, the most promising first, without those that are being trained."""
        groups: dict[str, list[FrozenTrial]] = {}
        for trial in begun:
            groups.setdefault(json.dumps(self._others(trial.params), sort_keys=True), []).append(trial)
        allowed = allowed_amount(self._allowed_drop, baseline[self._quality.key]) + 1e-9
        found = []
        for key, group in groups.items():
            ended = [t for t in group if "row" in t.user_attrs and t.values is not None]
            if any(t.state == TrialState.RUNNING for t in group) or not ended:
                continue
            lost = {t.number: self._lost(t, baseline) for t in ended}
            saved = {t.number: self._saved_by_stops(t, baseline) for t in ended}
            within = [t for t in ended if lost[t.number] <= allowed]
            most = max((saved[t.number] for t in within), default=0.0)
            failed = [t.user_attrs[PREDICTED] for t in group if t.number not in lost and PREDICTED in t.user_attrs]
            beyond = [*failed, *(saved[t.number] for t in ended if lost[t.number] > allowed)]
            known = {t.user_attrs[OUTCOME] for t in group if OUTCOME in t.user_attrs}
            found.append(
                _Setting(
                    key=key, trial=min(ended, key=lambda t: saved[t.number]), trained=len(group),
                    ranked=max((t.values[1] for t in within), default=-math.inf), least_lost=min(lost.values()),
                    most_within=most, least_beyond=min((one for one in beyond if one > most), default=1.0),
                    known=frozenset(known | {identity_in(t.user_attrs["row"], t.user_attrs["config"]) for t in ended}),
                )
            )  # fmt: skip
        return sorted(found, key=lambda one: (-one.ranked, one.least_lost))

    def _others(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return a trial's parameters of the other method."""
        asked, _ = asked_of(self._stops, parameters, self._learn().context)
        return {name: value for name, value in parameters.items() if name not in asked.params}

    def _lost(self, trial: FrozenTrial, baseline: Mapping[str, Any]) -> float:
        return self._quality.lost(trial.user_attrs["row"][self._quality.key], baseline[self._quality.key])

    def _saved_by_stops(self, trial: FrozenTrial, baseline: Mapping[str, Any]) -> float:
        """Return what a trial's stops save, as replayed on its own run; the other method may cost or save, too."""
        if trial.number not in self._saved:
            row = trial.user_attrs["row"]
            config = {**trial.user_attrs["config"], "method": "gradskip"}
            path = self._path(row["stage"], [config])
            (found,) = [None] if path is None else predictions(path, [config])
            self._saved[trial.number] = (
                saved_of_baseline(row, baseline) if found is None else float(found["compute_saved"])
            )
        return self._saved[trial.number]

    def _path(self, stage: str, configs: Sequence[Mapping[str, Any]]) -> RunTrace | None:
        """Return the path to a stage as a run, with the costs of what these configurations stop."""
        known = self._learn().trace
        if self._dense is None or self._store is None:
            self._dense, self._store = known.dense_only(), StageStore(self._tree, known.root)
        # A store of its own, for that keeps all that it reads.
        self._dense = completed(StageStore(self._tree, known.root), self._dense, configs).dense_only()
        return along(self._dense, self._store, stage)

    def _next_stops(self, setting: _Setting) -> Outcome | None:
        """Return the stops whose predicted saving is nearest to the middle of what is not known; None if none is."""
        known = self._learn()
        own, others = setting.trial.user_attrs["config"], self._others(setting.trial.params)
        _, fields = asked_of(self._stops, setting.trial.params, known.context)
        rest = {**known.base.to_dict(), **{name: value for name, value in own.items() if name not in fields}}
        rng, drawn = random.Random(self._seed), []
        for _ in range(DRAWS):
            asked = DrawnTrial(rng)
            values = plain(self._stops.suggest(asked, known.context))
            config = {**rest, **values, **plain(known.hold), "method": "gradskip"}
            drawn.append(({**others, **asked.params}, config))
        path = self._path(setting.trial.user_attrs["row"]["stage"], [config for _, config in drawn])
        if path is None:
            return None
        outcomes, _ = distinct_outcomes(replace(known, trace=path), drawn)
        low, high = setting.most_within, setting.least_beyond
        left = [one for one in outcomes if low + APART < one.saved < high - APART and one.identity not in setting.known]
        most = max((one.saved for one in left), default=0.0)
        middle = (low + min(high, most)) / 2
        chosen = min(left, key=lambda one: abs(one.saved - middle), default=None)
        return None if chosen is None else at_middle(chosen, known, path)
