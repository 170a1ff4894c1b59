"""Seeds for the answer: what would be it is trained beside the baseline on further seeds until that is decided.

A search chooses on one seed. The setting that saves most there is trained on further ones, each time beside the
baseline, whose runs it shares. Where its mean loss is not within the allowed one (`analysis.metrics.over_seeds`), the
setting that saves most of the others follows. Settings are taken one after the other, since each has to beat the
allowed loss and not the others: what saves less is not trained as long as what saves more may be the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.formatting import percent, plural
from analysis.io.checked import is_value, numbers_of
from analysis.io.journal import JournalTrial
from analysis.io.studies import records_of, to_frame
from analysis.metrics.accounting import search_cost
from analysis.metrics.over_seeds import (
    BEYOND,
    LESS,
    OPEN,
    OTHER_SEED,
    SHORTER_ON_SEED,
    WITHIN,
    ignores_seed,
    losses_of,
    mean_over_seeds,
    over_seeds,
)
from analysis.metrics.ranking import relative_to_baseline
from analysis.presentation.markdown_report import full_trainings
from trainables.config import wrapped_seed
from trainables.quality import allowed_amount
from trainables.savings import SAVED
from tune_cac.messages import say
from tune_cac.tuning.controls import cut_with_norms_of, shorter_trainings
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.trials import EPOCHS, OF_EPOCHS, BestSetting, PredefinedTrial, StudyTrials

#: Distance of the further seeds from the study's, behind which those of a confirmation follow.
FURTHER_SEEDS = 1000
#: Settings that are trained on further seeds at most.
MOST_SETTINGS = 12


def is_close_below(share: float, refused: Iterable[float]) -> bool:
    """Return whether a setting that saves this share is left out, for one that saves hardly more was refused.

    >>> [is_close_below(share, [0.3]) for share in (0.31, 0.295, 0.29)]
    [False, True, False]
    """
    return any(share <= other and share > other - LESS + 1e-12 for other in refused)


def leading(
    saved: Mapping[int, float], verdicts: Mapping[int, str], begun: Collection[int], may_answer: Callable[[int], bool]
) -> int | None:
    """Return the setting that saves most of those that are not beyond the allowed loss; None if no more are tried.

    Args:
        saved: by setting, what saves most first.
        verdicts: what is decided, of settings with runs on further seeds.
        begun: settings with such runs, whose turn has come.
        may_answer: whether it is worth to begin with a setting.
    """
    refused: list[float] = []  # what the refused ones save
    for number, share in saved.items():
        if verdicts.get(number) == BEYOND:
            refused.append(share)
        elif number in begun or (
            not is_close_below(share, refused) and len(refused) < MOST_SETTINGS and may_answer(number)
        ):
            return number
    return None


@dataclass(frozen=True, kw_only=True)
class _Known:
    """Facts of a running study on further seeds."""

    losses: dict[int, dict[int, float]] = field(default_factory=dict)  # `losses_of`
    expected: float = 0.0  # their expected deviation
    saved: Mapping[Any, float] = field(default_factory=dict)  # mean share saved, by setting
    failed: Collection[int] = ()  # seeds on which the baseline failed, so that no setting can be judged
    trainings: float = 0.0  # executed in all


class Race:
    """Choose the runs on further seeds.

    ``settings`` returns those that save something, what saves most first, and ``may_answer`` whether it is worth to
    begin with one.
    """

    def __init__(
        self, trials: StudyTrials, plan: SearchPlan, settings: Callable[[], Sequence[BestSetting]],
        may_answer: Callable[[BestSetting], bool],
    ) -> None:  # fmt: skip
        self._trials, self._plan, self._settings, self._may_answer = trials, plan, settings, may_answer
        seeds = 1 if plan.space.options else plan.seeds  # combinations have baselines of their own
        self.seeds = [wrapped_seed(plan.base.seed + FURTHER_SEEDS + n) for n in range(1, seeds)]
        self.controls = False  # whether dense runs of a setting's compute follow on its seeds
        self._found: tuple[tuple[int, int], _Known] = (0, 0), _Known()  # at `StudyTrials.counts`

    def next(self) -> PredefinedTrial | None:
        """Return the next run; None if none is left, or if one that is being trained decides it."""
        one, decided = self.leader()
        if one is None or decided != OPEN:
            return None
        begun, baseline = self._trials.begun(), self._baseline()
        runs = [(number, self._again(number, seed)) for seed in self._usable() for number in (baseline, one.trial)]
        missing = [(number, run) for number, run in runs if run.key not in begun]
        if not missing:
            return None
        baselines = sum(number == baseline for number, _ in missing)
        self._say_cost(one, baselines, len(missing) - baselines)
        return missing[0][1]

    def next_baseline(self) -> PredefinedTrial | None:
        """Return the next run of the baseline, which every setting is compared with: work for idle processors."""
        if self._trials.baseline_row() is None:
            return None
        runs = (self._again(self._baseline(), seed) for seed in self.seeds)
        return next((run for run in runs if run.key not in self._trials.begun()), None)

    def leader(self) -> tuple[BestSetting | None, str]:
        """Return the setting that saves most of those that are not beyond the allowed loss, and what is decided of it.

        None where all are beyond that, or as many as are tried.
        """
        verdicts = self._verdicts()
        begun = self._begun()
        settings = {one.trial: one for one in self._settings()} if self.seeds else {}
        saved = {trial: one.saved for trial, one in settings.items()}
        may_begin = not self.is_spent
        found = leading(saved, verdicts, begun, lambda trial: may_begin and self._may_answer(settings[trial]))
        return (None, BEYOND) if found is None else (settings[found], verdicts.get(found, OPEN))

    def beyond(self) -> list[int]:
        """Return the trials whose settings lose more than is allowed over the seeds."""
        return [trial for trial, verdict in self._verdicts().items() if verdict == BEYOND]

    @property
    def is_spent(self) -> bool:
        """Return whether settings were refused, none is the answer, and so much is executed that no other is begun."""
        if not self.seeds or not self._begun() or self._known().trainings < self._plan.most_trainings:
            return False
        verdicts = set(self._verdicts().values())
        return BEYOND in verdicts and WITHIN not in verdicts

    @property
    def why_spent(self) -> str:
        """Return, of a race that `is_spent`, what it has refused and executed, and how to go on."""
        refused = plural(len(self.beyond()), "setting")
        return (
            f"{full_trainings(self._known().trainings)} are executed and {refused} refused over further seeds, so no "
            f"other is tried (from {self._plan.most_trainings:g} on, without a --cost-budget)"
        )

    def beside(self, best: BestSetting) -> list[PredefinedTrial]:
        """Return the dense run cut to the compute of a setting, on the setting's further seeds; none for such a run."""
        known = self._known()
        seeds = known.losses.get(best.trial) if self.seeds and best.config["method"] != "none" else None
        if not seeds:
            return []
        attrs = {"role": "control", "control": SHORTER_ON_SEED, "candidate": best.trial}
        if earlier := self._of(attrs):  # as long as these
            runs = [PredefinedTrial(attrs=attrs, values=earlier[0]["given"])]
        else:
            runs = cut_with_norms_of(self._plan.base, replace(best, saved=known.saved[best.trial]))
        return [replace(run, attrs=attrs, values={**run.values, "seed": seed}) for run in runs for seed in seeds]

    def _of(self, attrs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what is noted of the trials with these attributes."""
        return [t.user_attrs for t in self._trials.all() if attrs.items() <= t.user_attrs.items()]

    def _begun(self) -> set[Any]:
        """Return the trials whose settings were begun on further seeds, with what other controls stand beside."""
        return {t.user_attrs.get("candidate") for t in self._trials.all() if t.user_attrs.get("role") == "control"}

    def _again(self, trial: int, seed: int) -> PredefinedTrial:
        """Return a trial's setting on another seed."""
        base, config = self._plan.base.to_dict(), self._trials.all()[trial].user_attrs["config"]
        values = {name: value for name, value in config.items() if base.get(name) != value} | {"seed": seed}
        attrs = {"role": "control", "control": OTHER_SEED, "candidate": trial}
        return PredefinedTrial(attrs=attrs | ({OF_EPOCHS: base["epochs"]} if EPOCHS in values else {}), values=values)

    def _baseline(self) -> int:
        return next(t.number for t in self._trials.baselines() if "row" in t.user_attrs)

    def _verdicts(self) -> dict[int, str]:
        """Return what is decided of the settings, by their trials; without those of which nothing is known yet."""
        known = self._known()
        if not known.losses:
            return {}
        baseline = self._trials.baseline_row() or {}
        allowed = float(allowed_amount(self._plan.allowed_drop, baseline["quality"]))
        losses = {trial: list(one.values()) for trial, one in known.losses.items()}
        found, seeds = over_seeds(losses, known.expected).items(), len(self._usable())
        # Of cut dense runs, too, which are no settings (`shorter_of`).
        verdicts = {trial: one.decides(allowed, seeds) for trial, one in found if trial >= 0}
        # A rule may stop on the study's own seed alone.
        nothing = [trial for trial, one in verdicts.items() if one == WITHIN and known.saved[trial] <= 0]
        return verdicts | dict.fromkeys(nothing, BEYOND)

    def _usable(self) -> list[int]:
        """Return the further seeds on which the baseline has not failed."""
        return [seed for seed in self.seeds if seed not in self._known().failed]

    def _known(self) -> _Known:
        """Return the facts at the trials that have ended so far, and find out whether the seed is ignored."""
        if self._trials.counts() != self._found[0] and self._trials.baseline_row() is not None:  # asked for often
            trials = [
                JournalTrial(number=t.number, state=t.state.name, user_attrs=dict(t.user_attrs))
                for t in self._trials.all()
            ]
            frame = to_frame(records_of(trials))
            losses, expected = losses_of(frame)
            baselines = is_value(frame, "control", OTHER_SEED) & (numbers_of(frame, "candidate") == self._baseline())
            self._found = self._trials.counts(), _Known(
                losses=losses, expected=expected, trainings=search_cost(frame).dense_equivalents,
                saved=dict(mean_over_seeds(relative_to_baseline(frame), SAVED).items()),
                failed={*frame.loc[baselines & is_value(frame, "status", "failed"), "seed"].astype(int)}
                - {*frame.loc[baselines & is_value(frame, "status", "completed"), "seed"].astype(int)},
            )  # fmt: skip
            if self.seeds and ignores_seed(frame):
                self._say_once("ignores its seed", "the same result on every seed: the answer is of one run (a script "
                               "gets the seed as {seed} and TUNE_CAC_SEED)")  # fmt: skip
                self.seeds = []
        return self._found[1]

    def _say_cost(self, one: BestSetting, baselines: int, runs: int) -> None:
        """Say once, for so many seeds, what the missing runs on them may cost."""
        refused, base, beside = len(self.beyond()), self._plan.base, 0
        has_control = self.controls and one.config["method"] != "none" and shorter_trainings(base)
        if has_control and cut_with_norms_of(base, one):
            beside = len(self._usable()) - len(self._of({"control": SHORTER_ON_SEED, "candidate": one.trial}))
        counts = {"it": runs, "the baseline": baselines, "a dense run of its compute": beside}
        *first, last = [name for name, count in counts.items() if count]
        what = f"{', '.join(first)} and {last}" if first else last
        cost = (runs + beside) * (1 - one.saved) + baselines
        self._say_once(
            f"{plural(len(self.seeds), 'seed')} of {one.trial}",
            f"trial {one.trial} saves {percent(one.saved)}: {what} on up to "
            f"{plural(max(runs, baselines), 'further seed')}, at most {cost:.1f} full trainings"
            f"{f' ({refused} of at most {MOST_SETTINGS} settings were refused so far)' if refused else ''}",
        )

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._trials.study.user_attrs:
            self._trials.study.set_user_attr(key, True)
            say(text)
