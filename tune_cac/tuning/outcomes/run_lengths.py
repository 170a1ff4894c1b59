"""Lengths of the run: dense runs cut short, which settings of that length share their training with.

A cut dense run saves compute by itself and is what a setting of its compute has to beat. With its training recorded,
stops are searched on it as on the full run, so the length is a choice like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.metrics.controls import CUT, SHORTER
from trainables.config import TrialConfig
from trainables.quality import allowed_amount
from tune_cac.study.run_lengths import AUTO_LENGTHS, read_lengths
from tune_cac.tuning.optuna_objectives import missing_objectives
from tune_cac.tuning.outcomes.prior import PriorStudy, first_length
from tune_cac.tuning.outcomes.trial_attributes import OF_EPOCHS
from tune_cac.tuning.predefined_trial import PredefinedTrial
from tune_cac.tuning.study_trials import StudyTrials
from tune_cac.tuning.warm_start.baseline import WarmStart

#: Share of the full run that the first cut dense run trains, and below which lengths are not chosen.
FIRST, SHORTEST = 0.6, 0.5


class RunLengths:
    """Choose the cut dense runs of a study.

    Args:
        trials: of the study.
        base: config of the baseline.
        lengths: ``auto``, or shares of the full run such as ``1.0,0.6``.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
        learn: returns what a recorded dense run shows, by its epochs and its root in the stage tree.
        priors: what earlier studies found; the first length is theirs.
    """

    def __init__(
        self,
        trials: StudyTrials,
        base: TrialConfig,
        lengths: str,
        allowed_drop: float | str,
        learn: Callable[[int, str], WarmStart],
        priors: Sequence[PriorStudy] = (),
    ) -> None:
        first = first_length(priors, base.epochs)
        self._first = None if first is None else max(first, at_most(SHORTEST, base.epochs))
        self._trials, self._base, self._allowed_drop, self._learn = trials, base, allowed_drop, learn
        self._learned: dict[int, WarmStart] = {}
        self._wanted = None if lengths == AUTO_LENGTHS else lengths_in_epochs(read_lengths(lengths), base.epochs)

    def learned(self) -> dict[int, WarmStart]:
        """Return what the recorded cut dense runs show, by their epochs, longest first."""
        roots = {
            t.user_attrs["given"]["epochs"]: t.user_attrs["root"]
            for t in self._begun()
            if "root" in t.user_attrs and "row" in t.user_attrs
        }
        for epochs, root in roots.items():
            if epochs not in self._learned:
                self._learned[epochs] = self._learn(epochs, root)
        return {epochs: self._learned[epochs] for epochs in sorted(roots, reverse=True)}

    def next(self) -> PredefinedTrial | None:
        """Return the next cut dense run; None if there is none, or one that runs decides it."""
        begun = {t.user_attrs["given"]["epochs"]: t for t in self._begun()}
        if self._wanted is not None:
            return next((self.run_of(epochs) for epochs in self._wanted if epochs not in begun), None)
        losses: dict[int, float] = {}
        baseline = self._trials.baseline_row()
        quality = self._base.quality
        for epochs, trial in begun.items():
            row = trial.user_attrs.get("row")
            if (row is None and not trial.state.is_finished()) or baseline is None:
                return None
            told = row is not None and not missing_objectives(row, quality)
            losses[epochs] = quality.lost(row[quality.key], baseline[quality.key]) if told and row else math.inf
        allowed = 0.0 if baseline is None else allowed_amount(self._allowed_drop, baseline[quality.key])
        found = next_length(losses, self._base.epochs, allowed) if losses or not self._first else self._first
        return None if found is None else self.run_of(found)

    def beside(self, saved: float) -> PredefinedTrial | None:
        """Return a cut dense run that saves as much as a setting which saves more than all cut dense runs so far.

        Below the lengths that are tried it is a control alone, and no answer.

        Args:
            saved: by the setting, a fraction.
        """
        epochs = max(1, at_most(1 - saved, self._base.epochs))
        shortest = min((t.user_attrs["given"]["epochs"] for t in self._begun()), default=self._base.epochs)
        if epochs >= shortest:
            return None
        run = self.run_of(epochs)
        is_tried = self._wanted is not None or epochs >= at_most(SHORTEST, self._base.epochs)
        return run if is_tried else replace(run, attrs={**run.attrs, "role": "control"})

    def run_of(self, epochs: int) -> PredefinedTrial:
        """Return the dense run of that many epochs, its learning-rate schedule shortened accordingly."""
        return PredefinedTrial(
            attrs={"role": CUT, "control": SHORTER, OF_EPOCHS: self._base.epochs},
            values={"method": "none", "epochs": epochs},
        )

    def _begun(self) -> list[Any]:
        return [t for t in self._trials.all() if t.user_attrs.get("role") == CUT and "continued_by" not in t.user_attrs]


def at_most(share: float, epochs: int) -> int:
    """Return the most epochs that are no more than a share of a run; a rounding error takes none away."""
    return int(share * epochs + 1e-9)


def lengths_in_epochs(shares: Sequence[float], epochs: int) -> list[int]:
    """Return distinct numbers of epochs below the full run's, longest first, each at most its share.

    >>> lengths_in_epochs((1.0, 0.8, 0.6, 0.55), 10)
    [8, 6, 5]
    """
    found = {at_most(share, epochs) for share in shares}
    return sorted((number for number in found if 1 <= number < epochs), reverse=True)


def next_length(losses: Mapping[int, float], epochs: int, allowed: float) -> int | None:
    """Return the epochs of the next cut dense run: `FIRST` of the full run, then `SHORTEST` or a longer one.

    Shorter if the first is within the allowed loss; the middle between it and the full run if it loses more than twice
    that. In between stops on it may lose less by the luck of a seed, and a longer run costs more.

    >>> next_length({}, 30, 0.005), next_length({18: 0.005}, 30, 0.005), next_length({18: 0.02}, 30, 0.005)
    (18, 15, 24)
    >>> next_length({18: 0.01}, 30, 0.005) or next_length({18: 0.0, 15: 0.0}, 30, 0.005)

    Args:
        losses: of quality by the epochs of the cut dense runs.
        epochs: of the full run.
        allowed: loss that is allowed.
    """
    first = at_most(FIRST, epochs)
    if not losses:
        return first or None
    if losses.keys() != {first} or allowed + 1e-9 < losses[first] <= 2 * allowed + 1e-9:
        return None
    found = at_most(SHORTEST, epochs) if losses[first] <= allowed + 1e-9 else (first + epochs) // 2
    return found if 0 < found < epochs and found != first else None
