"""Baselines of a study whose space varies options of the workload: one for each combination of their values.

A trial is judged against the training without the method under the same options, and against no other. The study's
first baseline has the options of the space's starting point; the others are trained beside the first trial of their
combination, once, and do not count among the trials that were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from search_spaces import Space
from trainables.config import TrialConfig
from tune_cac.tuning.optuna_objectives import tell_complete
from tune_cac.tuning.predefined_trial import PredefinedTrial
from tune_cac.tuning.study_trials import StudyTrials

_OPTIONS = "workload_options"


class OptionBaselines:
    """Queries on the baselines of a study; with a space that varies no options there is one.

    Args:
        trials: of the study.
        space: what is searched.
        base: config of the first baseline.
    """

    def __init__(self, trials: StudyTrials, space: Space, base: TrialConfig) -> None:
        self._trials, self._quality = trials, base.quality
        self._names = frozenset(space.options)
        self._first = list(base.options)

    def combination(self, config: Mapping[str, Any]) -> str:
        """Return the searched options of a trial as NAME=VALUE texts; empty if the space varies none."""
        return " ".join(text for text in config.get(_OPTIONS, ()) if text.partition("=")[0] in self._names)

    def _all_of(self, config: Mapping[str, Any]) -> list[FrozenTrial]:
        """Return the baselines of a trial's combination: several if one failed and was trained again."""
        wanted = self.combination(config)
        return [t for t in self._trials.baselines() if self._combination_of(t) == wanted]

    def _combination_of(self, baseline: FrozenTrial) -> str:
        return self.combination({_OPTIONS: baseline.user_attrs.get("given", {}).get(_OPTIONS, self._first)})

    def row_of(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result row of the baseline of a trial's combination; None before it ended."""
        if not self._names:
            return self._trials.baseline_row()
        return next((t.user_attrs["row"] for t in self._all_of(config) if "row" in t.user_attrs), None)

    def failed(self, config: Mapping[str, Any]) -> bool:
        """Return whether the baseline of a trial's combination failed and is not trained again."""
        if self.combination(config) == self.combination({_OPTIONS: self._first}):
            return self._trials.baseline_failed()
        there = self._all_of(config)
        return bool(there) and all(
            t.state == TrialState.FAIL and "continued_by" not in t.user_attrs for t in there[-1:]
        )

    def tell_judged(
        self, waiting: Iterable[tuple[optuna.Trial, dict[str, Any]]], allowed_drop: float | str
    ) -> list[tuple[optuna.Trial, dict[str, Any]]]:
        """Report to Optuna, in order, the ended trials whose baseline ended, too; return the others.

        A trial whose baseline failed is reported without the constraint on its drop.

        Args:
            waiting: trials with their result rows.
            allowed_drop: that may be lost of the metric (`trainables.quality`).
        """
        left = []
        for trial, row in waiting:
            config = trial.user_attrs.get("config", {})
            baseline = self.row_of(config)
            if baseline is None and not self.failed(config):
                left.append((trial, row))
                continue
            if baseline is None and self._names:
                trial.set_constraint("no_baseline", 1.0)  # it cannot be judged, so it is no good one either
            tell_complete(self._trials.study, trial, row, baseline, allowed_drop, self._quality)
        return left

    def why_useless(self, config: Mapping[str, Any]) -> str:
        """Return why a trial could not be judged, because the baseline of its combination failed; else empty."""
        if not self._names or not self.failed(config):
            return ""
        error = self._all_of(config)[-1].user_attrs.get("error", "no message")
        return f"the baseline of {self.combination(config)} failed ({error})"

    def missing(self) -> list[PredefinedTrial]:
        """Return the baselines that begun trials need and that were not begun, or were interrupted."""
        if not self._names:
            return []
        found: dict[str, PredefinedTrial] = {}
        begun = {self._combination_of(t) for t in self._trials.baselines() if "continued_by" not in t.user_attrs}
        for trial in self._trials.all():
            config = trial.user_attrs.get("config")
            if config is None or trial.state in (TrialState.FAIL, TrialState.PRUNED):
                continue
            if self.combination(config) not in begun:
                values = {"method": "none", _OPTIONS: list(config.get(_OPTIONS, ()))}
                run = PredefinedTrial(attrs={"role": "baseline"}, values=values)
                found.setdefault(run.key, run)
        return list(found.values())
