"""Distinct outcomes of a space's settings, and the order in which a search trains them.

Settings with one outcome, which layers stop when, train alike, bit for bit, so only one of them is trained. What they
stop and save is predicted by replay on recorded runs; their quality is not, so a model of it chooses the outcome with
the highest expected improvement of answer and front for the compute that its training executes. The answer should stay
within the allowed loss on average over seeds, too: outcomes that are expected to lose clearly more
(`LossScale.mean_limit`) are trained only to extend the front. The search ends when no outcome left is expected to
improve them by a worthwhile share.

Everything is a function of the study's trials and the recorded runs, so a resumed search goes on in the same way.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import isnan
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from analysis.metrics.over_seeds import OTHER_SEED
from analysis.metrics.ranking import CUT
from analysis.trace_replay.traces import RunTrace, read_trace
from trainables.config import TrialConfig
from trainables.gradskip.variables import BY_NAME, MEASURED_RULES
from trainables.stage_tree.store import StageStore
from tune_cac.tuning.baseline import WarmStart, completed, outcome_identity, predictions
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.quality_model import (
    WORTHWHILE,
    WORTHWHILE_AREA,
    LossScale,
    Posterior,
    are_new,
    area_of,
    loss_scale,
    posterior,
    worthwhile,
)
from tune_cac.tuning.race import is_close_below
from tune_cac.tuning.trials import (
    EPOCHS,
    OF_EPOCHS,
    OUTCOME,
    PREDICTED,
    UNPREDICTED,
    StudyTrials,
    missing_objectives,
    saved_of_baseline,
)

# --- Distinct outcomes of a space's settings --------------------------------------------------------------------------

#: Parameters of a setting, and the fields of its configuration.
DrawnSetting = tuple[Mapping[str, Any], Mapping[str, Any]]
#: With its row of a replay.
PredictedSetting = tuple[DrawnSetting, Mapping[str, Any]]
#: (iteration, number of the parameter) of each stop.
Stops = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Effect of a group of settings on training."""

    parameters: Mapping[str, Any]  # Optuna parameters of the setting nearest to the middle of the group
    config: Mapping[str, Any]  # fields of that setting's configuration
    epochs: int  # epochs of the run
    share: float  # its steps over those of the full run
    saved: float  # compute saved, a fraction of that of the full run
    frozen: float  # backward FLOPs saved, a fraction of those of its own run
    stops: Stops
    identity: str  # equal for settings that train alike in a run of this length: `baseline.outcome_identity`
    known: bool  # True if the whole run was trained before
    group: Sequence[DrawnSetting]  # settings that train alike by the dense run; once others are recorded they may not


def distinct_outcomes(
    known: WarmStart, drawn: Sequence[DrawnSetting], *, share: float = 1.0
) -> tuple[list[Outcome], list[DrawnSetting]]:
    """Group settings that train alike by a dense run; those that do nothing are left out.

    ``share`` is that of the run's steps in those of the full one.

    Returns:
        The outcomes, by ascending savings, and the settings whose rules measure what was not recorded.
    """
    rows = predictions(known.trace, [values for _, values in drawn])
    predicted = [(setting, row) for setting, row in zip(drawn, rows, strict=True) if row is not None]
    acting = [one for one in predicted if one[1]["stops"] > 0 and one[1]["compute_saved"] > 0]  # a stop may brake
    made = [
        _outcome_of(part, epochs=known.base.epochs, share=share, group=[setting for setting, _ in part])
        for part in _by_identity(acting).values()
    ]
    unpredicted = [setting for setting, row in zip(drawn, rows, strict=True) if row is None]
    return sorted(made, key=lambda one: one.saved), unpredicted


def _by_identity(settings: Iterable[PredictedSetting]) -> dict[str, list[PredictedSetting]]:
    parts: dict[str, list[PredictedSetting]] = {}
    for setting, row in settings:
        parts.setdefault(outcome_identity(row, setting[1]), []).append((setting, row))
    return parts


def _outcome_of(part: Sequence[PredictedSetting], *, share: float, **more: Any) -> Outcome:
    (parameters, config), row = part[middle_of([parameters for (parameters, _), _ in part])]
    return Outcome(parameters=parameters, config=config, share=share, **facts_of(row, config, share), **more)


def predicted_again(outcomes: Sequence[Outcome], trace: RunTrace) -> list[Outcome]:
    """Return the outcomes as all recorded runs predict them: groups that do not train alike parted, equal ones once."""
    found: list[Outcome] = []
    for one, row in zip(outcomes, predictions(trace, [one.config for one in outcomes], branches=True), strict=True):
        if row is None:
            found.append(one)
            continue
        found.append(again := replace(one, **facts_of(row, one.config, one.share)))
        if row["stage"] != trace.root and len(one.group) > 1:  # more than the dense run was read
            rows = predictions(trace, [config for _, config in one.group], branches=True)
            there = [(setting, other) for setting, other in zip(one.group, rows, strict=True) if other is not None]
            found += [
                _outcome_of(part, share=one.share, epochs=one.epochs, group=one.group)
                for identity, part in _by_identity(there).items()
                if identity != again.identity
            ]
    return list({one.identity: one for one in reversed(found)}.values())[::-1]


def is_predicted(values: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Return whether a setting differs from the baseline by what replay follows alone, and saves as it predicts."""
    others = {name: value for name, value in values.items() if name not in BY_NAME and name not in ("method", EPOCHS)}
    same = all(base.get(name) == value for name, value in others.items() if value)  # a forward cache saves more
    if values.get("CAC_NORM_STATISTICS") == "hold_all" or values.get("CAC_LR_FACTOR") not in (None, 1):
        # Its weights are other ones than the baseline's from the start.
        mode = TrialConfig.from_mapping(values).gradskip_settings().mode
        same = same and mode not in ("auto", *MEASURED_RULES)
    return same and bool(values.get("CAC_PREFIX_AUTOGRAD", True))


def facts_of(row: Mapping[str, Any], config: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return the fields of an outcome that are predicted."""
    return {
        "identity": outcome_identity(row, config),
        "saved": 1 - share * (1 - float(row["compute_saved"])),
        "frozen": float(row["backward_saved"]),
        "stops": stops_in(row),
        "known": bool(row["exact"]),
    }


def stops_in(row: Mapping[str, Any]) -> Stops:
    """Return the stops of a trial's or a predicted row."""
    return tuple((event["iteration"], event["layer"]) for event in json.loads(row.get("stop_events") or "[]"))


def middle_of(group: Sequence[Mapping[str, Any]]) -> int:
    """Return the place of the setting whose numeric parameters are nearest to the middle of the group's region.

    >>> middle_of([{"thr": 0.90, "rule": "a"}, {"thr": 0.94, "rule": "a"}, {"thr": 1.0, "rule": "a"}])
    1
    """

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    names = [name for name in group[0] if all(is_number(setting.get(name)) for setting in group)]
    values = np.array([[setting[name] for name in names] for setting in group], float)
    low, high = values.min(axis=0), values.max(axis=0)
    differs = high > low
    from_middle = (values - (low + high) / 2)[:, differs] / (high - low)[differs]
    return int(np.argmin((from_middle**2).sum(axis=1)))


def shared_steps(stops: Stops, others: Iterable[Stops], total_steps: int) -> int:
    """Return the steps, from the start, that an outcome trains as another one did: until the first different stop.

    >>> shared_steps(((10, 2), (50, 5)), [(), ((10, 2), (40, 5))], 100)
    40
    """
    most = 0
    for other in others:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stops, other, strict=False)))
        most = max(most, min((when for when, _ in (*stops[same:], *other[same:])), default=total_steps))
    return most


def evenly_spaced(values: Sequence[float], count: int) -> list[int]:
    """Return the places of ``count`` of ascending values that are nearest to evenly spaced ones.

    >>> evenly_spaced([0.1, 0.11, 0.12, 0.5, 0.9], 3)
    [0, 3, 4]
    """
    left = list(range(len(values)))
    if len(values) <= count:
        return left
    chosen = []
    for place in range(count):
        target = values[0] + (values[-1] - values[0]) * place / max(1, count - 1)
        nearest = min(left, key=lambda one: (abs(values[one] - target), one))
        left.remove(nearest)
        chosen.append(nearest)
    return sorted(chosen)


# --- Order in which a search trains distinct outcomes -----------------------------------------------------------------

#: Settings that are drawn to find the outcomes of a space.
SETTINGS = 4000
#: Outcomes of them that are looked at, spread over what they save.
MOST_OUTCOMES = 500
#: Outcomes, the newest, of which the quality is modelled.
MOST_MODELLED = 200
#: Outcomes that are trained at least before the search may end by itself.
LEAST = 6
#: Lower bound on the cost of a training, in full trainings: to begin one takes time even if nearly all steps are known.
_LEAST_COST = 0.05


@dataclass(frozen=True, kw_only=True)
class BegunOutcome:
    """An outcome that was trained, is being trained, or failed; fields as in `Outcome`, predicted until it ended."""

    trial: int  # number of its trial
    epochs: int
    stops: Stops
    saved: float
    frozen: float
    loss: float  # of quality against the baseline, infinite if it failed; NaN while it is being trained
    identity: str  # empty for a dense run
    config: Mapping[str, Any]


class OutcomeQueue:
    """Choose the outcomes that a study trains.

    ``roots`` returns what was learned from the recorded dense runs, by their epochs, the full one first, and
    ``refused`` the trials that lost too much over further seeds.
    """

    def __init__(
        self, trials: StudyTrials, plan: SearchPlan, roots: Callable[[], Mapping[int, WarmStart]],
        refused: Callable[[], Collection[int]],
    ) -> None:  # fmt: skip
        self._trials, self._plan, self._roots, self._refused = trials, plan, roots, refused
        self._quality, self._seed, self._epochs = plan.base.quality, plan.base.seed, plan.base.epochs
        self._outcomes: dict[int, list[Outcome]] = {}  # by epochs
        self._unpredicted: list[DrawnSetting] = []  # of the full length
        self._beyond: tuple[int, list[int]] = 0, []  # how many trials had ended, and what `beyond` was
        self.ended = False  # True once no outcome is left that is worth its training

    @property
    def predicts(self) -> bool:
        """Return whether outcomes of the space are known before they are trained."""
        drawn = [self._drawn(epochs, known) for epochs, known in self._roots().items()]  # of all lengths, to know them
        return any(drawn)

    def _drawn(self, epochs: int, known: WarmStart) -> list[Outcome]:
        """Return the outcomes of a run's drawn settings, as the dense run predicts them."""
        if epochs not in self._outcomes:
            self._outcomes[epochs] = self._distinct(known) if known.knows_what_acts else []
        return self._outcomes[epochs]

    def _distinct(self, known: WarmStart) -> list[Outcome]:
        drawn, base = known.drawn(self._seed, SETTINGS), known.base.to_dict()
        is_full = known.base.epochs == self._epochs
        if not is_full and known.choices() != self._roots()[self._epochs].choices():
            warnings.warn("no stops on cut runs: choices of the space depend on the run's length", stacklevel=2)
            return []
        if known.space.options or not all(is_predicted(values, base) for _, values in drawn):
            return []
        try:  # what each draw's stops save, which the dense run may not have needed
            store = StageStore(self._plan.tree, known.trace.root)
            known = replace(known, trace=completed(store, known.trace, [values for _, values in drawn]))
        except Exception as error:  # noqa: BLE001 - the user's model and loss may raise anything
            warnings.warn(f"not every outcome can be predicted: {error}", stacklevel=2)
        found, unpredicted = distinct_outcomes(known, drawn, share=known.trace.total_steps / self._total_steps)
        if is_full:
            self._unpredicted = unpredicted
        return [found[place] for place in evenly_spaced([one.saved for one in found], MOST_OUTCOMES)]

    @property
    def _total_steps(self) -> int:
        return int(self._roots()[self._epochs].trace.total_steps)

    @property
    def why_ended(self) -> str:
        """Return why the search ended before its trials were used up."""
        lengths = " for each length" if len(self._roots()) > 1 else ""
        return f"of {SETTINGS:,} settings{lengths} no outcome is left that is worth its training"

    def start_next(self, baseline: Mapping[str, Any]) -> optuna.Trial | None:
        """Begin the next outcome; None if none is worth training now. Then `ended` says whether that is final."""
        traces = self._traces()
        tried = self._begun_outcomes(baseline, traces)
        chosen = self._chosen(self._left(tried, traces), tried, baseline)
        if (drawn := self._next_unpredicted(len(tried), ends=chosen is None)) is not None:
            return self._begin(drawn, {UNPREDICTED: True})
        if chosen is None:
            running = [t.user_attrs for t in self._trials.all() if t.state == TrialState.RUNNING]
            self.ended = all(attrs.get("role") == "control" for attrs in running if "row" not in attrs)
            return None
        attrs: dict[str, Any] = {OUTCOME: chosen.identity, PREDICTED: chosen.saved}
        length = {} if chosen.epochs == self._epochs else {EPOCHS: chosen.epochs}
        if length:
            attrs |= {**length, OF_EPOCHS: self._epochs}
        return self._begin({**chosen.parameters, **length}, attrs)

    def _begin(self, parameters: Mapping[str, Any], attrs: Mapping[str, Any]) -> optuna.Trial:
        self._trials.study.enqueue_trial(dict(parameters), user_attrs={"role": "search", **attrs})
        return self._trials.study.ask()

    def _next_unpredicted(self, tried: int, *, ends: bool) -> Mapping[str, Any] | None:
        """Return parameters of the next setting that cannot be predicted, if its turn has come; else None.

        Their share of the trials is that of the drawn settings; at least `LEAST` are trained before the search ends.
        """
        begun = [trial.user_attrs for trial in self._trials.all() if UNPREDICTED in trial.user_attrs]
        done = sum("continued_by" not in attrs for attrs in begun)
        due = max(len(self._unpredicted) / SETTINGS * (tried + 1), LEAST if ends else 0)
        return self._unpredicted[done][0] if done + 0.5 < due and done < len(self._unpredicted) else None

    def _traces(self) -> dict[int, RunTrace]:
        """Return what is recorded by now, by the epochs of the runs that have outcomes."""
        return {
            epochs: read_trace(StageStore(self._plan.tree, known.trace.root))
            for epochs, known in self._roots().items()
            if self._drawn(epochs, known)
        }

    def _left(self, tried: Sequence[BegunOutcome], traces: Mapping[int, RunTrace]) -> list[Outcome]:
        """Return outcomes that no trial has or had, as all recorded runs predict them, by ascending savings."""
        found = []
        for epochs, trace in traces.items():
            same = [one for one in tried if one.epochs == epochs]
            # Without a tree, what was trained is still predicted as it was before.
            foreseen = self._predicted(trace, [one.config for one in same])
            taken = {one.identity for one in same} | {one["identity"] for one in foreseen if one is not None}
            again = predicted_again(self._outcomes[epochs], trace)
            found += [one for one in again if not one.known and one.identity not in taken]
        return sorted(found, key=lambda one: one.saved)

    def _predicted(self, trace: RunTrace, configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """Return stops, savings and identity of settings, as all recorded runs of their length predict them."""
        rows, share = predictions(trace, configs, branches=True), trace.total_steps / self._total_steps
        return [None if row is None else facts_of(row, one, share) for row, one in zip(rows, configs, strict=True)]

    def _begun_outcomes(self, baseline: Mapping[str, Any], traces: Mapping[int, RunTrace]) -> list[BegunOutcome]:
        """Return the outcomes of begun trials; of those without a result only what can be predicted."""
        found: list[BegunOutcome] = []
        for trial in self._trials.all():
            attrs = trial.user_attrs
            if attrs.get("role") in ("baseline", "control") or "continued_by" in attrs:
                continue
            row, config = attrs.get("row"), attrs.get("config", {})
            epochs = config.get(EPOCHS, self._epochs)
            if row is not None and not missing_objectives(row, self._quality):
                found.append(self._ended(trial, baseline))
                continue
            facts: Mapping[str, Any] | None = None
            loss = np.nan if trial.state == TrialState.RUNNING else np.inf
            if attrs.get("role") == CUT:
                facts = {"stops": (), "saved": 1 - epochs / self._epochs, "frozen": 0.0, "identity": ""}
            elif config and epochs in traces:
                facts = self._predicted(traces[epochs], [config])[0]
            if facts is not None:
                own = {name: facts[name] for name in ("stops", "saved", "frozen", "identity")}
                found.append(BegunOutcome(trial=trial.number, epochs=epochs, config=config, loss=loss, **own))
        return found

    def _ended(self, trial: FrozenTrial, baseline: Mapping[str, Any]) -> BegunOutcome:
        """Return the outcome of a run with a result, against a row of the baseline."""
        row, config = trial.user_attrs["row"], trial.user_attrs.get("config", {})
        frozen = row.get("backward_saved")  # a script may know what it saves in all alone
        return BegunOutcome(
            trial=trial.number,
            epochs=config.get(EPOCHS, self._epochs),
            stops=stops_in(row),
            saved=saved_of_baseline(row, baseline),
            frozen=row["compute_saved"] if frozen is None else frozen,
            loss=self._quality.lost(row["quality"], baseline["quality"]),
            identity=outcome_identity(row, config),
            config=config,
        )

    def beyond(self) -> list[int]:
        """Return trials whose outcomes are expected to lose too much on average over seeds to be tried there."""
        baseline = self._trials.baseline_row()
        if baseline is None or self._plan.seeds == 1 or not self.predicts:
            return []
        _, finished = self._trials.counts()
        if self._beyond[0] != finished:  # asked for often, and each time a fit
            ended = [one for one in self._begun_outcomes(baseline, self._traces()) if not isnan(one.loss)]
            self._beyond = finished, self._expected_beyond(ended, ended, self._scale(baseline)) if ended else []
        return self._beyond[1]

    def _expected_beyond(
        self, runs: Sequence[BegunOutcome], ended: Sequence[BegunOutcome], scale: LossScale
    ) -> list[int]:
        means, limit = self._expected(runs, ended, scale).mean_over_seeds, self._limit(ended, scale)
        return [one.trial for one, mean in zip(runs, means, strict=True) if mean > limit]

    def _limit(self, ended: Sequence[BegunOutcome], scale: LossScale) -> float:
        """Return the expected mean over seeds up to which an outcome is tried there (`LossScale.limit_behind`)."""
        refused = self._refused_among(ended)
        means = self._expected(refused, ended, scale).mean_over_seeds if refused else np.array([])
        return scale.limit_behind(means)

    def _refused_among(self, runs: Sequence[BegunOutcome]) -> list[BegunOutcome]:
        refused = set(self._refused())
        return [one for one in runs if one.trial in refused]

    def _further_runs(self) -> list[tuple[int, BegunOutcome]]:
        """Return seed and outcome of the runs on further seeds, against the baseline of that seed.

        What a seed changes of all runs alike, such as the split of the data, is no loss.
        """
        numbers, runs = [one.number for one in self._trials.baselines()], []
        for trial in self._trials.all():
            attrs = trial.user_attrs
            if attrs.get("control") == OTHER_SEED and "row" in attrs:
                runs.append((attrs["given"]["seed"], attrs["candidate"] in numbers, trial))
        baselines = {seed: trial.user_attrs["row"] for seed, is_baseline, trial in runs if is_baseline}
        return [(seed, self._ended(trial, baselines[seed])) for seed, _, trial in runs if seed in baselines]

    def _scale(self, baseline: Mapping[str, Any]) -> LossScale:
        rows = [trial.user_attrs.get("row", {}).get("quality") for trial in self._trials.all()]
        values = [float(value) for value in rows if value is not None]
        return loss_scale(baseline["quality"], values, self._quality, self._plan.allowed_drop)

    def _chosen(
        self, left: Sequence[Outcome], tried: Sequence[BegunOutcome], baseline: Mapping[str, Any]
    ) -> Outcome | None:
        """Return the outcome that promises most for its cost; None if none is worth its training."""
        new = are_new(self._features(left), self._features(tried))
        left = [one for one, is_new in zip(left, new, strict=True) if is_new]
        if not left:
            return None
        scale = self._scale(baseline)
        tried, beyond = self._with_expected(tried, scale)
        points = [(one.loss, one.saved) for one in tried]
        refused = [one.saved for one in self._refused_among(tried)]
        answers = [
            one.saved
            for one in tried
            if one.loss <= scale.allowed + 1e-9 and one.trial not in beyond and not is_close_below(one.saved, refused)
        ]
        found = self._expected(left, tried, scale)
        saved, best = np.array([one.saved for one in left]), max(answers, default=0.0)
        likely = found.mean_over_seeds <= self._limit(tried, scale)
        likely &= np.array([not is_close_below(share, refused) for share in saved])
        answer = np.where(likely, found.share_within(scale.limit), 0.0) * np.maximum(saved - best, 0.0)
        front, worst = [(0.0, 0.0), *points], 2 * scale.unit
        area = found.area_gained(saved, front, worst) / worst
        worth = answer + area
        if sum(one.saved > 0 for one in tried) >= LEAST:
            enough = answer >= worthwhile(best, WORTHWHILE)
            enough |= area >= worthwhile(area_of(front, worst), WORTHWHILE_AREA)
            worth = np.where(enough, worth, 0.0)
        if not np.count_nonzero(worth):
            return None
        return left[int(np.argmax(worth / self._costs(left, tried)))]

    def _with_expected(self, tried: Sequence[BegunOutcome], scale: LossScale) -> tuple[list[BegunOutcome], list[int]]:
        """Return the begun outcomes, running ones with the expected loss, and the trials that are no answer."""
        ended, running = [[one for one in tried if isnan(one.loss) == runs] for runs in (False, True)]
        beyond = [*self.beyond(), *self._refused()]
        if running:
            means = self._expected(running, ended, scale).mean.tolist()
            beyond = [*beyond, *self._expected_beyond(running, ended, scale)]
            ended += [replace(one, loss=mean) for one, mean in zip(running, means, strict=True)]
        return ended, beyond

    def _expected(
        self, runs: Sequence[Outcome] | Sequence[BegunOutcome], ended: Sequence[BegunOutcome], scale: LossScale
    ) -> Posterior:
        """Return the posterior of the runs' losses, given the losses of ended runs."""
        further = self._further_runs()
        known = [*ended[-MOST_MODELLED:], *(one for _, one in further)]
        seeds = [0] * (len(known) - len(further)) + [seed for seed, _ in further]
        return posterior(
            self._features(known),
            np.array([one.loss for one in known], float),
            self._features(runs),
            unit=scale.unit,
            noise=scale.seed_noise,
            seeds=np.array(seeds, float),
        )

    def _features(self, runs: Sequence[Outcome] | Sequence[BegunOutcome]) -> NDArray[np.float64]:
        total, rows = self._total_steps, []
        for one in runs:
            end = one.epochs / self._epochs
            rows.append((one.frozen, end, one.stops[0][0] / (end * total) if one.stops else 1.0))
        return np.array(rows, float).reshape(-1, 3)

    def _costs(self, left: Sequence[Outcome], tried: Sequence[BegunOutcome]) -> NDArray[np.float64]:
        """Return (m,) full trainings that are executed after the steps shared with others.

        After an outcome's first stop its steps save equal shares, which is exact for one stop.
        """
        if not self._plan.sharing:
            return np.array([max(_LEAST_COST, 1 - one.saved) for one in left])
        found = []
        for one in left:
            total = round(one.share * self._total_steps)
            others = [(), *(other.stops for other in tried if other.epochs == one.epochs)]
            own_saved = 1 - (1 - one.saved) / one.share
            not_shared = 1 - shared_steps(one.stops, others, total) / total
            found.append(one.share * not_shared * (1 - own_saved * total / max(1, total - one.stops[0][0])))
        return np.maximum(_LEAST_COST, np.array(found))
