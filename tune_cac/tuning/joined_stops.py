"""Other stops for what is already trained, in spaces that join Gradient-Skip with another method.

What the other method's setting costs in quality is known once it was trained; what stops save beside it is known
before, from the recorded run. So every second suggestion takes that setting from a trial and bisects on the compute
that its stops save, between the most that was within the allowed loss and the least that was not. The other suggestions
are the sampler's, which learns from both.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from analysis.trace_replay.traces import read_trace
from trainables.gradskip.variables import BY_NAME
from trainables.quality import Quality, allowed_amount
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.optuna_objectives import saved_of_baseline
from tune_cac.tuning.outcomes.distinct_outcomes import Drawn, Outcome, distinct_outcomes
from tune_cac.tuning.outcomes.path_trace import along
from tune_cac.tuning.outcomes.region_middle import at_middle
from tune_cac.tuning.outcomes.trial_attributes import OUTCOME, STOPS_FOR
from tune_cac.tuning.study_trials import StudyTrials
from tune_cac.tuning.warm_start.baseline import WarmStart
from tune_cac.tuning.warm_start.threshold_ranges import outcome

#: Settings of the stops that are drawn for one setting of the other method.
DRAWS = 1000
#: Least distance of a suggestion's predicted saving from what is known, a fraction of the compute.
APART = 0.01


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One setting of the other method, with what was trained of it."""

    trial: FrozenTrial
    """The trial whose stops came latest, of which most is recorded."""
    ranked: float
    """What its best trial within the allowed loss saves of the compute that the study ranks by; below 0 without one."""
    least_lost: float
    """Of its trials' losses."""
    most_within: float
    """Training compute saved by its trials within the allowed loss, the most; 0 without one."""
    least_beyond: float
    """The least saved by one that was not and saved more; 1 without one."""
    known: frozenset[str]
    """Stops that were trained, and those that were expected of them."""


class JoinedStops:
    """Choose stops for settings of the other method that were trained.

    Args:
        trials: of the study.
        learn: returns what was learned from the baseline.
        tree: the study's ``tree`` folder, or its URI.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
        quality: the study's metric.
        seed: of the draws.
    """

    def __init__(
        self, trials: StudyTrials, learn: Callable[[], WarmStart], tree: Path | str, allowed_drop: float | str,
        quality: Quality, seed: int,
    ) -> None:  # fmt: skip
        self._trials, self._learn, self._tree, self._seed = trials, learn, tree, seed
        self._allowed_drop, self._quality = allowed_drop, quality

    def start_next(self, baseline: Mapping[str, Any]) -> optuna.Trial | None:
        """Begin a trained setting with other stops; None if it is the sampler's turn, or nothing is left to bisect.

        Args:
            baseline: its result row.
        """
        begun = [t for t in self._trials.all() if t.params and "continued_by" not in t.user_attrs]
        own = sum(STOPS_FOR in trial.user_attrs for trial in begun)
        if 2 * own >= len(begun) or self._learn().trace is None:
            return None
        for setting in self._settings(begun, baseline):
            found = self._next_stops(setting)
            if found is not None:
                return self._start(found, setting)
        return None

    def _settings(self, begun: Sequence[FrozenTrial], baseline: Mapping[str, Any]) -> list[_Setting]:
        """Return the settings of the other method, the most promising first, without those that are being trained."""
        groups: dict[str, list[FrozenTrial]] = {}
        for trial in begun:
            groups.setdefault(_without_stops(trial.user_attrs.get("config", {})), []).append(trial)
        allowed = allowed_amount(self._allowed_drop, baseline[self._quality.key]) + 1e-9
        found = []
        for group in groups.values():
            if any(t.state == TrialState.RUNNING for t in group) or not any("row" in t.user_attrs for t in group):
                continue
            rows = [(t, t.user_attrs["row"]) for t in group if "row" in t.user_attrs and t.values is not None]
            lost = {
                t.number: self._quality.lost(row[self._quality.key], baseline[self._quality.key]) for t, row in rows
            }
            saved = {t.number: saved_of_baseline(row, baseline) for t, row in rows}
            within = [t for t, _ in rows if lost[t.number] <= allowed]
            most = max((saved[t.number] for t in within), default=0.0)
            beyond = [saved[t.number] for t, _ in rows if lost[t.number] > allowed and saved[t.number] > most]
            found.append(
                _Setting(
                    trial=min(rows, key=lambda one: saved[one[0].number])[0],
                    ranked=max((t.values[1] for t in within), default=-1.0),
                    least_lost=min(lost.values()), most_within=most, least_beyond=min(beyond, default=1.0),
                    known=frozenset(
                        text
                        for t, row in rows
                        for text in (_identity(row, t.user_attrs["config"]), t.user_attrs.get(OUTCOME, ""))
                    ),
                )
            )  # fmt: skip
        return sorted(found, key=lambda one: (-one.ranked, one.least_lost))

    def _next_stops(self, setting: _Setting) -> Outcome | None:
        """Return the stops whose predicted saving is nearest to the middle of what is not known; None if none is."""
        known = self._learn()
        trace = along(read_trace(StageStore(self._tree, known.trace.root)), setting.trial.user_attrs["row"]["stage"])
        if trace is None:
            return None
        own = {**known.base.to_dict(), **setting.trial.user_attrs["config"], "method": "gradskip"}
        drawn: list[Drawn] = [
            (_joined(parameters, setting.trial.params), {**own, **_stops_of(values)})
            for parameters, values in known.drawn(self._seed, DRAWS)
        ]
        try:
            outcomes, _ = distinct_outcomes(replace(known, trace=trace), drawn)
        except Exception as error:  # noqa: BLE001 - costs of the user's model that were never counted
            warnings.warn(f"no other stops for trial {setting.trial.number}: {error}", stacklevel=2)
            return None
        low, high = setting.most_within, setting.least_beyond
        left = [one for one in outcomes if low + APART < one.saved < high - APART and one.identity not in setting.known]
        most = max((one.saved for one in left), default=0.0)
        middle = (low + min(high, most)) / 2
        chosen = min(left, key=lambda one: abs(one.saved - middle), default=None)
        return None if chosen is None else at_middle(chosen, known, trace)

    def _start(self, chosen: Outcome, setting: _Setting) -> optuna.Trial:
        attrs = {"role": "search", STOPS_FOR: setting.trial.number, OUTCOME: chosen.identity}
        self._trials.study.enqueue_trial(dict(chosen.parameters), user_attrs=attrs)
        return self._trials.study.ask()


def _without_stops(config: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in config.items() if name not in BY_NAME}, sort_keys=True)


def _stops_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in BY_NAME}


def _joined(drawn: Mapping[str, Any], of_trial: Mapping[str, Any]) -> dict[str, Any]:
    """Return a draw's parameters of stops, those of a trial otherwise."""
    return {name: value if name.rpartition(".")[2] in BY_NAME else of_trial[name] for name, value in drawn.items()}


def _identity(row: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    return outcome({"stop_events": row.get("stop_events") or "[]"}, config)
