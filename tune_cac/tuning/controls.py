"""Controls of a search, to which its settings are compared: cut dense runs and random stops.

Controls are trials whose values are given in full. They are not suggested, do not count among the requested trials, and
are trained last, once the savings of the best setting are known; only cut dense runs are trained earlier, while other
trials wait for the baseline. Where stops are searched on cut dense runs, too, their lengths are chosen by
`outcomes.run_lengths`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.metrics.ranking import RANDOM_STOPS, SHORTER
from analysis.trace_replay.replay_frame import replay
from analysis.trace_replay.traces import RunTrace
from trainables.config import TrialConfig
from trainables.savings import INFERENCE, TIME
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.outcomes.run_lengths import EPOCHS, OF_EPOCHS, RunLengths
from tune_cac.tuning.study_trials import BestSetting, PredefinedTrial
from tune_cac.tuning.warm_start.baseline import WarmStart, completed

#: Lengths of the cut dense runs, as shares of the full one.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
#: Number of runs with random stops.
RANDOM_RUNS = 3
#: Most controls of both kinds in one search.
MOST_CONTROLS = len(SHARES) + RANDOM_RUNS
#: Largest difference between the savings of a random run and of the best setting, a fraction.
EQUAL_COMPUTE = 0.01
#: Most draws to find random stops that save as much.
_DRAWS = 200
#: Number of positions tried for the stops of a draw, and the largest power that moves them.
_TRIED, _POWER = 64, 64.0


class StudyControls:
    """The random stops of one study.

    Args:
        base: config of the baseline.
        tree: the study's ``tree`` folder.
    """

    def __init__(self, base: TrialConfig, tree: Path | str) -> None:
        self._base = base
        self._tree = tree
        self._random: dict[tuple[float, int], list[PredefinedTrial]] = {}

    def shorter(self, lengths: RunLengths | None) -> list[PredefinedTrial]:
        """Return cut dense runs: those that the lengths still lack, or without them those of `shorter_trainings`."""
        if lengths is None:
            return shorter_trainings(self._base)
        return [] if (run := lengths.next()) is None else [run]

    def planned_epochs(self, lengths: RunLengths | None) -> list[int]:
        """Return the epochs of cut dense runs that are known before the baseline is trained."""
        return [run.values["epochs"] for run in shorter_trainings(self._base)] if lengths is None else lengths.planned()

    def of_equal_compute(
        self,
        best: BestSetting | None,
        roots: Callable[[], Mapping[int, WarmStart]],
        ends: Sequence[int],
        lengths: RunLengths | None,
    ) -> list[PredefinedTrial]:
        """Return random stops that save what the best setting saves, and a cut dense run if all so far save less.

        Args:
            best: the setting.
            roots: returns what was learned from the recorded dense runs, by their epochs.
            ends: last parameter of each unit.
            lengths: chooses cut dense runs; None where those of `shorter_trainings` are trained.
        """
        if best is None or not shorter_trainings(self._base):
            return []
        known = roots().get(best.config["epochs"])
        found = self.random_stops(None if known is None else known.trace, ends, best)
        beside = None if lengths is None else lengths.beside(best.saved)
        return found if beside is None else [beside, *found]  # the cut run may be the best then

    def random_stops(
        self, trace: RunTrace | None, ends: Sequence[int], best: BestSetting | None
    ) -> list[PredefinedTrial]:
        """Return runs with random stops, as long as a setting, that save as much; none for one that stops nothing.

        Args:
            trace: of the dense run of the setting's length; None if that was not recorded.
            ends: last parameter of each unit.
            best: the setting; its savings are rounded, so that a new best one with nearly equal savings needs no new
                runs.
        """
        if best is None or best.own_saved <= EQUAL_COMPUTE or trace is None:
            return []
        near = round(best.own_saved / EQUAL_COMPUTE) * EQUAL_COMPUTE
        base = replace(self._base, epochs=best.config["epochs"])
        key = (near, base.epochs)
        if key not in self._random:
            store = StageStore(self._tree, trace.root)
            try:
                found = random_stops(trace, store, base, ends, saved=near, seed=self._base.seed)
            except Exception as error:  # noqa: BLE001 - the user's model and loss may raise anything
                warnings.warn(f"no controls with random stops: {error}", stacklevel=2)
                found = []
            if base.epochs < self._base.epochs:
                found = [
                    PredefinedTrial(
                        attrs={**run.attrs, OF_EPOCHS: self._base.epochs}, values={**run.values, EPOCHS: base.epochs}
                    )
                    for run in found
                ]
            self._random[key] = found
        return self._random[key]


def control(kind: str, values: Mapping[str, Any]) -> PredefinedTrial:
    """Return a control of one kind, the value of the column ``control``."""
    return PredefinedTrial(attrs={"role": "control", "control": kind}, values=values)


def shorter_trainings(base: TrialConfig) -> list[PredefinedTrial]:
    """Return cut dense runs, of 90 to 50 % of the epochs, each with a learning-rate schedule of its own length.

    >>> [run.values["epochs"] for run in shorter_trainings(TrialConfig(method="none", epochs=4))]
    [3, 2]
    """
    lengths = dict.fromkeys(int(share * base.epochs + 1e-9) for share in SHARES)  # at most the share
    if base.saving in (INFERENCE, TIME):  # a control saves training compute
        return []
    return [control(SHORTER, {"method": "none", "epochs": epochs}) for epochs in lengths if 1 <= epochs < base.epochs]


def random_stops(
    trace: RunTrace, store: StageStore, base: TrialConfig, ends: Sequence[int], *, saved: float, seed: int
) -> list[PredefinedTrial]:
    """Return runs with manual stops at random layers and times that save as much as a setting, found by replay.

    A draw picks layers and random times in ascending order; the times are then moved together towards the run's start
    or end until the savings match.

    Args:
        trace: the recorded baseline.
        store: its root, where missing costs of steps are written.
        base: config of the baseline.
        ends: numbers of the parameters through which a stop may reach (`SpaceContext.unit_ends`).
        saved: fraction of the compute to save.
        seed: of the draws.

    Returns:
        At most `RANDOM_RUNS` runs; fewer if stops cannot save that much.

    Raises:
        OSError: costs cannot be written.
    """
    draw = random.Random(seed)
    if not ends:
        return []
    trace = completed(store, trace, [_manual(base, ends, range(len(ends)))])
    found: list[PredefinedTrial] = []
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
            names = ("method", "CAC_STOP_LAYER_NUM", "CAC_STOP_LAYER_ITR")
            found.append(control(RANDOM_STOPS, {name: config[name] for name in names}))
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
