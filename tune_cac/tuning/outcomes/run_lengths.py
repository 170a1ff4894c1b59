"""Lengths of the run: dense runs cut short, which settings of that length share their training with.

A cut dense run saves compute by itself and is what a setting of its compute has to beat. With its training recorded,
stops are searched on it as on the full run, so the length is a choice like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.metrics.ranking import CUT, SHORTER
from trainables.config import TrialConfig
from trainables.quality import allowed_amount
from tune_cac.study.options import AUTO_LENGTHS, read_lengths
from tune_cac.tuning.study_trials import PredefinedTrial, StudyTrials, missing_objectives
from tune_cac.tuning.warm_start.baseline import WarmStart

# --- Names of the attributes by which an Optuna trial tells which outcome it trains -----------------------------------

#: Identity of the outcome as it was predicted when it was chosen (`Outcome.identity`); or that none was predicted.
OUTCOME, UNPREDICTED = "outcome", "unpredicted"
#: Epochs of the run, a parameter, too, and those of the full run; only of a trial that is shorter than the full run.
EPOCHS, OF_EPOCHS = "epochs", "of_epochs"
#: Compute that the outcome is predicted to save, a fraction of that of the full run (`Outcome.saved`).
PREDICTED = "predicted_saved"
#: All of them: a trial that is begun again has them, too.
CHOSEN = (OUTCOME, UNPREDICTED, EPOCHS, OF_EPOCHS, PREDICTED)


# --- Lengths of the run -----------------------------------------------------------------------------------------------

#: Share of the full run that a cut dense run trains where none is given, below which lengths are not chosen, and of
#: another one if that loses more than the allowed loss (docs/findings.md has others that were tried).
SHORTEST, LONGER = 0.5, 0.8


class RunLengths:
    """Choose the cut dense runs of a study.

    Args:
        trials: of the study.
        base: config of the baseline.
        lengths: ``auto``, or shares of the full run such as ``1.0,0.6``.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
        learn: returns what a recorded dense run shows, by its epochs and its root in the stage tree.
    """

    def __init__(
        self,
        trials: StudyTrials,
        base: TrialConfig,
        lengths: str,
        allowed_drop: float | str,
        learn: Callable[[int, str], WarmStart],
    ) -> None:
        self._trials, self._base, self._learn, self._allowed_drop = trials, base, learn, allowed_drop
        self._learned: dict[int, WarmStart] = {}
        self._given = lengths != AUTO_LENGTHS
        self._may_lengthen = not self._given
        self._wanted = lengths_in_epochs(read_lengths(lengths) if self._given else (SHORTEST,), base.epochs)

    def planned(self) -> list[int]:
        """Return the epochs of the cut dense runs that are trained first, or may be."""
        return [*self._wanted, *([at_most(LONGER, self._base.epochs)] if self._may_lengthen else [])]

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
        longer = at_most(LONGER, self._base.epochs)
        wanted = [*self._wanted, *([longer] if self._may_lengthen and self._loses_too_much(begun) else [])]
        return next((self.run_of(epochs) for epochs in wanted if epochs not in begun), None)

    def _loses_too_much(self, begun: Mapping[int, Any]) -> bool:
        """Return whether the shortest run has ended with a loss of more than the allowed one, or failed."""
        baseline = self._trials.baseline_row()
        trial = begun.get(at_most(SHORTEST, self._base.epochs))
        if trial is None or baseline is None:
            return False
        quality, row = self._base.quality, trial.user_attrs.get("row")
        if row is None or missing_objectives(row, quality):
            return bool(trial.state.is_finished())
        allowed = allowed_amount(self._allowed_drop, baseline["quality"])
        return bool(quality.lost(row["quality"], baseline["quality"]) > allowed + 1e-9)

    def beside(self, saved: float) -> PredefinedTrial | None:
        """Return a cut dense run that saves as much as a setting which saves more than all cut dense runs so far.

        Below the lengths that are tried it is a control alone, and no answer.

        Args:
            saved: by the setting, a fraction.
        """
        epochs = max(1, at_most(1 - saved, self._base.epochs))
        good = [t for t in self._begun() if "row" in t.user_attrs or not t.state.is_finished()]
        shortest = min((t.user_attrs["given"]["epochs"] for t in good), default=self._base.epochs)
        if epochs >= shortest:
            return None
        run = self.run_of(epochs)
        is_tried = self._given or epochs >= at_most(SHORTEST, self._base.epochs)
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
