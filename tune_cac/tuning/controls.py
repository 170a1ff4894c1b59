"""Controls of a search, trained beside its settings: dense runs cut short, and runs with stops at random.

Both are trials whose values are given in full and which do not count among the requested ones. A cut dense run is what
a setting of its compute has to beat. Where stops are searched on it, too, it is an answer like any other (role
``cut``), and its length is chosen. Random stops are trained last, once the savings of the best setting are known.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from analysis.metrics.ranking import CUT, RANDOM_STOPS, SHORTER
from analysis.trace_replay.replay_frame import replay
from analysis.trace_replay.traces import RunTrace
from trainables.config import TrialConfig
from trainables.gradskip.settings import OFF_FIELD
from trainables.quality import allowed_amount
from trainables.savings import INFERENCE, TIME
from trainables.stage_tree.store import StageStore
from tune_cac.study.search_options import AUTO_LENGTHS, read_lengths
from tune_cac.tuning.baseline import WarmStart, completed
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.trials import EPOCHS, OF_EPOCHS, BestSetting, PredefinedTrial, StudyTrials, missing_objectives

# --- Cut dense runs ---------------------------------------------------------------------------------------------------

#: Lengths of the cut dense runs that are controls, as shares of the full one.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
#: Share of the full run that a cut dense run trains where none is given, below which lengths are not chosen, and of
#: another one if that loses more than the allowed loss (docs/findings.md has others that were tried).
SHORTEST, LONGER = 0.5, 0.8


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
    if base.saving in (INFERENCE, TIME):  # a control saves training compute
        return []
    return [_control(SHORTER, {"method": "none", EPOCHS: epochs}) for epochs in in_epochs(SHARES, base.epochs)]


def cut_with_norms_of(base: TrialConfig, best: BestSetting) -> list[PredefinedTrial]:
    """Return the dense run that holds its norms as a setting does and is cut to its compute; none if that is all."""
    epochs = max(1, at_most(1 - best.saved, base.epochs))
    if epochs == base.epochs:
        return []
    holds = best.config.get("CAC_NORM_STATISTICS") == "hold_all"
    dense = {"method": "gradskip", **OFF_FIELD, "CAC_NORM_STATISTICS": "hold_all"} if holds else {"method": "none"}
    return [_control(SHORTER, {**dense, EPOCHS: epochs})]


def _control(kind: str, values: Mapping[str, Any], **attrs: Any) -> PredefinedTrial:
    return PredefinedTrial(attrs={"role": "control", "control": kind, **attrs}, values=values)


class RunLengths:
    """Choose the cut dense runs on which stops are searched; further ones where ``searched``.

    ``learn`` returns what a recorded dense run shows, by its epochs and its root in the stage tree.
    """

    def __init__(
        self, trials: StudyTrials, plan: SearchPlan, learn: Callable[[int, str], WarmStart], *, searched: bool
    ) -> None:
        self._trials, self._base, self._learn, self._allowed_drop = trials, plan.base, learn, plan.allowed_drop
        self.searched = searched
        self._learned: dict[int, WarmStart] = {}
        self._chooses = plan.lengths == AUTO_LENGTHS
        shares = (SHORTEST,) if self._chooses else read_lengths(plan.lengths or "1.0")
        self._wanted = in_epochs(shares, plan.base.epochs)

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
        longer = in_epochs((LONGER,), self._base.epochs) if self._chooses and self._loses_too_much(begun) else []
        return next((self._run_of(epochs) for epochs in (*self._wanted, *longer) if epochs not in begun), None)

    def _loses_too_much(self, begun: Mapping[int, FrozenTrial]) -> bool:
        """Return whether the shortest run has ended with a loss of more than the allowed one, or failed."""
        baseline, trial = self._trials.baseline_row(), begun.get(at_most(SHORTEST, self._base.epochs))
        if trial is None or baseline is None:
            return False
        quality, row = self._base.quality, trial.user_attrs.get("row")
        if row is None or missing_objectives(row, quality):
            return bool(trial.state.is_finished())
        allowed = allowed_amount(self._allowed_drop, baseline["quality"])
        return bool(quality.lost(row["quality"], baseline["quality"]) > allowed + 1e-9)

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
        is_tried = not self._chooses or epochs >= at_most(SHORTEST, self._base.epochs)
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


# --- Random stops -----------------------------------------------------------------------------------------------------

#: Number of runs with random stops.
RANDOM_RUNS = 3
#: Largest difference between the savings of a random run and of the best setting, a fraction.
EQUAL_COMPUTE = 0.01
#: Most draws to find random stops that save as much.
_DRAWS = 200
#: Number of positions tried for the stops of a draw, and the largest power that moves them.
_TRIED, _POWER = 64, 64.0


class RandomStops:
    """Find random stops that save what a setting saves; they are kept, as the best setting is asked for often."""

    def __init__(self, plan: SearchPlan) -> None:
        self._base, self._tree = plan.base, plan.tree
        self._found: dict[tuple[float, int], list[PredefinedTrial]] = {}

    def of(self, best: BestSetting, trace: RunTrace | None, ends: Sequence[int]) -> list[PredefinedTrial]:
        """Return runs with random stops, as long as a setting, that save as much; none for one that stops nothing.

        Args:
            best: the setting.
            trace: of the dense run of its length; None if that was not recorded.
            ends: numbers of the parameters through which a stop may reach (`SpaceContext.unit_ends`).
        """
        if best.own_saved <= EQUAL_COMPUTE or trace is None:
            return []
        # Rounded, so that a new best setting with nearly equal savings needs no new runs.
        near = round(best.own_saved / EQUAL_COMPUTE) * EQUAL_COMPUTE
        base = replace(self._base, epochs=best.config[EPOCHS])
        if (near, base.epochs) not in self._found:
            drawn: list[dict[str, Any]] = []
            try:
                drawn = self._drawn(trace, base, ends, near) if ends else []
            except Exception as error:  # noqa: BLE001 - the user's model and loss may raise anything
                warnings.warn(f"no controls with random stops: {error}", stacklevel=2)
            cut = base.epochs < self._base.epochs
            attrs, length = ({OF_EPOCHS: self._base.epochs}, {EPOCHS: base.epochs}) if cut else ({}, {})
            self._found[near, base.epochs] = [_control(RANDOM_STOPS, {**values, **length}, **attrs) for values in drawn]
        return self._found[near, base.epochs]

    def _drawn(self, trace: RunTrace, base: TrialConfig, ends: Sequence[int], saved: float) -> list[dict[str, Any]]:
        """Return values of runs with stops that save so much, by replay; fewer if stops cannot.

        A draw picks layers and random times in ascending order; the times are then moved together towards the run's
        start or end until the savings match.
        """
        draw = random.Random(base.seed)
        trace = completed(StageStore(self._tree, trace.root), trace, [_manual(base, ends, range(len(ends)))])
        found: list[dict[str, Any]] = []
        for _ in range(_DRAWS):
            if len(found) == RANDOM_RUNS:
                break
            layers = sorted(draw.sample(list(ends), draw.randint(1, len(ends))))
            late = sorted(draw.random() for _ in layers)
            tried = [_manual(base, layers, times) for times in _moved(late, trace.total_steps)]
            if not tried:
                continue
            distance = np.abs(replay(trace, tried)["compute_saved"].to_numpy(float) - saved)
            nearest = int(np.argmin(distance))
            if distance[nearest] <= EQUAL_COMPUTE:
                config = tried[nearest].to_dict()
                found.append({name: config[name] for name in ("method", "CAC_STOP_LAYER_NUM", "CAC_STOP_LAYER_ITR")})
        return found


def _moved(late: Sequence[float], total_steps: int) -> list[list[int]]:
    """Return iterations of stops at fractions of the run raised to powers, from all at its end to all at its start."""
    found = []
    for power in np.geomspace(1 / _POWER, _POWER, _TRIED):
        times = [round(fraction**power * (total_steps - 1)) for fraction in late]
        for place in range(1, len(times)):
            times[place] = max(times[place], times[place - 1] + 1)
        if times[-1] < total_steps:
            found.append(times)
    return found


def _manual(base: TrialConfig, layers: Sequence[int], times: Sequence[int]) -> TrialConfig:
    stops = {"CAC_STOP_LAYER_NUM": tuple(layers), "CAC_STOP_LAYER_ITR": tuple(times)}
    return replace(base, method="gradskip", **stops)  # type: ignore[arg-type]  # the fields come from the variables
