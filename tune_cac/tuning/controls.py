"""Controls of a search: dense runs cut short, which a setting of their compute has to beat.

They are trials whose values are given in full and which do not count among the requested ones. Where stops are searched
on one, too, it is an answer like any other (role ``cut``), and its length is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial

from analysis.metrics.ranking import CUT, SHORTER
from trainables.config import TrialConfig
from trainables.gradskip.settings import OFF_FIELD
from trainables.quality import allowed_amount
from trainables.savings import INFERENCE, SPARSE, TIME
from tune_cac.study.search_options import AUTO_LENGTHS, read_lengths
from tune_cac.tuning.baseline import WarmStart
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.trials import EPOCHS, OF_EPOCHS, BestSetting, PredefinedTrial, StudyTrials, missing_objectives

#: Lengths of the cut dense runs that are controls, as shares of the full one.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
#: Shares of the full run that cut dense runs train where none are given, each after the first if the one before it
#: loses more than the allowed loss; below the first, lengths are not chosen (docs/findings.md "Seeds").
TRIED = (0.5, 0.6, 0.8)


def at_most(share: float, epochs: int) -> int:
    """Return the most epochs that are no more than a share of a run; a rounding error takes none away."""
    return int(share * epochs + 1e-9)


def in_epochs(shares: Sequence[float], epochs: int) -> list[int]:
    """Return distinct numbers of epochs below the full run's, longest first, each at most its share.

    >>> in_epochs((1.0, 0.8, 0.6, 0.55), 10)
    [8, 6, 5]
    """
    found = {at_most(share, epochs) for share in shares}
    return sorted((number for number in found if 1 <= number < epochs), reverse=True)


def shorter_trainings(base: TrialConfig) -> list[PredefinedTrial]:
    """Return the cut dense runs that are controls, each with a learning-rate schedule of its own length."""
    if base.saving in (INFERENCE, SPARSE, TIME):  # a control saves training compute
        return []
    return [_control(SHORTER, {"method": "none", EPOCHS: epochs}) for epochs in in_epochs(SHARES, base.epochs)]


def cut_with_norms_of(base: TrialConfig, best: BestSetting) -> list[PredefinedTrial]:
    """Return the dense run with a setting's norms and learning rates, cut to its compute; none if that is all."""
    epochs = max(1, at_most(1 - best.saved, base.epochs))
    if epochs == base.epochs:
        return []
    started = {name: best.config[name] for name in ("CAC_NORM_STATISTICS", "CAC_LR_FACTOR") if name in best.config}
    recipe = {name: value for name, value in started.items() if value not in ("go_on", "hold", 1, None)}
    dense = {"method": "gradskip", **OFF_FIELD, **recipe} if recipe else {"method": "none"}
    return [_control(SHORTER, {**dense, EPOCHS: epochs})]


def _control(kind: str, values: Mapping[str, Any], **attrs: Any) -> PredefinedTrial:
    return PredefinedTrial(attrs={"role": "control", "control": kind, **attrs}, values=values)


class RunLengths:
    """Choose the cut dense runs on which stops are searched; further ones where ``searched``.

    ``learn`` returns what a recorded dense run shows, by its epochs and its root in the stage tree, and ``beyond`` the
    trials that lose too much on average over seeds, once any were refused for that.
    """

    def __init__(
        self, trials: StudyTrials, plan: SearchPlan, learn: Callable[[int, str], WarmStart],
        beyond: Callable[[], Collection[int]], *, searched: bool,
    ) -> None:  # fmt: skip
        self._trials, self._base, self._learn, self._allowed_drop = trials, plan.base, learn, plan.allowed_drop
        self._beyond = beyond
        self.searched = searched
        self._learned: dict[int, WarmStart] = {}
        self._chooses = plan.lengths == AUTO_LENGTHS
        shares = TRIED if self._chooses else read_lengths(plan.lengths or "1.0")
        self._wanted = sorted(in_epochs(shares, plan.base.epochs), reverse=not self._chooses)

    def learned(self) -> dict[int, WarmStart]:
        """Return what the recorded cut dense runs show, by their epochs, longest first."""
        ended = {epochs: t.user_attrs for epochs, t in self._begun().items()}
        roots = {epochs: attrs["root"] for epochs, attrs in ended.items() if "root" in attrs and "row" in attrs}
        for epochs, root in roots.items():
            if epochs not in self._learned:
                self._learned[epochs] = self._learn(epochs, root)
        return {epochs: self._learned[epochs] for epochs in sorted(roots, reverse=True)}

    def next(self) -> PredefinedTrial | None:
        """Return the next cut dense run; None if there is none, or one that runs decides it."""
        if not self.searched:
            return None
        begun = self._begun()
        for place, epochs in enumerate(self._wanted):
            if epochs not in begun:
                longer = [begun[other] for other in self._wanted[place:] if other in begun]  # of an earlier version
                return None if self._chooses and any(map(self._loses_too_much, longer)) else self._run_of(epochs)
            if self._chooses and not self._loses_too_much(begun[epochs]):
                return None
        return None

    def _loses_too_much(self, trial: FrozenTrial) -> bool:
        """Return whether a cut dense run has failed or lost more than is allowed, on its seed or over several."""
        baseline = self._trials.baseline_row()
        if baseline is None:
            return False
        quality, row = self._base.quality, trial.user_attrs.get("row")
        if row is None or missing_objectives(row, quality):
            return bool(trial.state.is_finished())
        allowed = allowed_amount(self._allowed_drop, baseline["quality"])
        lost = quality.lost(row["quality"], baseline["quality"])
        return bool(lost > allowed + 1e-9) or trial.number in self._beyond()

    def beside(self, best: BestSetting) -> PredefinedTrial | None:
        """Return a cut dense run that saves as much as a setting which saves more than all cut dense runs so far.

        Below the lengths that are tried it is a control alone, and no answer.
        """
        if not self.searched:
            return None
        epochs = max(1, at_most(1 - best.saved, self._base.epochs))
        good = [n for n, t in self._begun().items() if "row" in t.user_attrs or not t.state.is_finished()]
        if epochs >= min(good, default=self._base.epochs):
            return None
        is_tried = not self._chooses or epochs >= at_most(TRIED[0], self._base.epochs)
        return self._run_of(epochs, CUT if is_tried else "control")

    def _run_of(self, epochs: int, role: str = CUT) -> PredefinedTrial:
        values = {"method": "none", EPOCHS: epochs}
        return _control(SHORTER, values, **{"role": role, OF_EPOCHS: self._base.epochs})

    def _begun(self) -> dict[int, FrozenTrial]:
        """Return the cut dense runs that were begun and not interrupted, by their epochs."""
        return {
            t.user_attrs["given"][EPOCHS]: t
            for t in self._trials.all()
            if t.user_attrs.get("role") == CUT and "continued_by" not in t.user_attrs
        }
