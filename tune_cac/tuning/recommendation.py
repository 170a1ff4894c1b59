"""A setting for a run that was not searched: from earlier studies and the first part of the run's dense training.

Settings of a space are replayed on the recorded part, extended to the whole run (`outcomes.trace_extension`). The
model of the quality, which has seen the earlier studies alone, says what their outcomes lose. Recommended is the one
that saves most of those that stay within the allowed loss with a probability of `SURE`: the more seeds the studies have
tried, the more that is. The same outcomes on the shorter runs that earlier studies trained are compared with it, as
explicit stops, for how variances go with another learning-rate schedule is not known. Leaving each study out in turn
and recommending from its own first part gives the error.

Losses are in units of the studies' scales (`outcomes.seed_luck`): the allowed one, unless that is too small for a unit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from analysis.io.layout import Layout
from analysis.trace_replay.traces import OF_SCRIPT, RunTrace, load_trace, read_trace
from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.quality import Quality
from trainables.stage_tree.shared_run import SharedRun, Sharing
from tune_cac.study.fixed_params import with_watch
from tune_cac.study.options import SearchOptions
from tune_cac.tuning.outcomes.distinct_outcomes import Outcome, distinct_outcomes, stops_in
from tune_cac.tuning.outcomes.outcome_queue import SETTINGS
from tune_cac.tuning.outcomes.prior import Depths, PriorRun, PriorStudy, features_of, prior_rows
from tune_cac.tuning.outcomes.prior_reading import study_as_prior
from tune_cac.tuning.outcomes.quality_model import Posterior, posterior
from tune_cac.tuning.outcomes.region_middle import at_middle
from tune_cac.tuning.outcomes.run_lengths import SHORTEST, at_most
from tune_cac.tuning.outcomes.trace_extension import extended
from tune_cac.tuning.run_context import baseline_config, context_of
from tune_cac.tuning.warm_start.baseline import WarmStart, completed, typical_configs, write_facts
from tune_cac.tuning.warm_start.threshold_ranges import predictions, with_learned_ranges

#: Probability of staying within the allowed loss, without the noise of a seed, from which more is not asked for.
SURE = 0.8
#: Variables that say how layers stop, under every rule.
_HOW = ("CAC_WATCH", "CAC_BRAKING_DISTANCE", "CAC_WHOLE_UNITS", "CAC_NORM_STATISTICS", "CAC_PREFIX_AUTOGRAD")


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A study that a recommendation is made from."""

    prior: PriorStudy
    known: WarmStart
    """The space on its run, with all of its recorded training."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A setting, and what it is expected to lose."""

    outcome: Outcome
    """Its stops and saving as predicted, and its configuration."""
    loss: float
    """Expected loss."""
    spread: float
    """Its standard deviation, without the noise of a seed."""
    within: float
    """Probability that it stays within the allowed loss, without the noise of a seed."""

    @property
    def rank(self) -> tuple[float, float]:
        """Return what recommendations are compared by: the higher, the better."""
        return min(self.within, SURE), self.outcome.saved


@dataclass(frozen=True, kw_only=True)
class Recommendations:
    """Settings recommended for a run."""

    thresholds: Recommendation
    """A setting of the space, on the full run."""
    stops: Recommendation | None
    """The same as explicit stops, whose saving is exact; None if no list of stops says it."""
    shorter: Recommendation | None
    """Explicit stops on a shorter run; None if the full one is better, or no list says them."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Mean absolute errors over studies that were left out in turn."""

    studies: int
    """Studies for which a setting was recommended and could be followed."""
    saved: float
    """Of the saving that thresholds were predicted to have, a fraction of the compute; explicit stops have none."""
    loss: float
    """Of the loss, of what the thresholds stop in truth."""
    loss_of_stops: float
    """Of the loss, of the stops as they were predicted, on the run of the length that was recommended."""


def read_earlier(layout: Layout, space: Space, quality: Quality, allowed_drop: float | str) -> Earlier:
    """Return a study as `recommended` needs it.

    Args:
        layout: of the study.
        space: whose settings are recommended.
        quality: metric of the new run.
        allowed_drop: that it may lose of it.

    Raises:
        UserError: it is no prior (`study_as_prior`), is of a script, or its model cannot be built here.
    """
    info = layout.read_info()
    prior = study_as_prior(layout, quality, allowed_drop)
    base = baseline_config(SearchOptions.of_study(info), device="cpu")
    trace = load_trace(layout.root, epochs=info.epochs)
    if trace.run.get(OF_SCRIPT):
        raise UserError(f"{layout.root} is of a script, whose run cannot be built here: leave it out")
    return Earlier(prior=prior, known=on_run(space, base, context_of(base), trace))


def on_run(space: Space, base: TrialConfig, context: SpaceContext, trace: RunTrace | None) -> WarmStart:
    """Return a space on a run of which something is recorded."""
    return WarmStart(space=space, context=context, base=base, hold=with_watch({}, context), trace=trace)


def foreseen(
    known: WarmStart,
    until: int,
    earlier: Sequence[Earlier],
    complete: Callable[[list[dict[str, Any]]], RunTrace] | None = None,
) -> tuple[WarmStart, list[Outcome]]:
    """Return the space on the run with its extended trace, and the distinct outcomes of its settings there.

    Args:
        known: the space on the run.
        until: steps of it that count as recorded.
        earlier: the studies.
        complete: returns the run's trace with what replay of settings needs; None where nothing can be counted.
    """
    traces = [one.known.trace for one in earlier]
    trace = extended(known.trace, until, traces)
    ranges = replace(known, context=with_learned_ranges(known.context, trace, _skipping(known)), trace=trace)
    drawn = ranges.drawn(known.base.seed, SETTINGS)
    if complete is not None:
        trace = extended(complete([values for _, values in drawn]), until, traces)
    ranges = replace(ranges, trace=trace)
    return ranges, distinct_outcomes(ranges, drawn)[0]


def recommended(
    known: WarmStart, outcomes: Sequence[Outcome], earlier: Sequence[Earlier]
) -> tuple[Recommendation, Recommendation | None] | None:
    """Return the outcome that saves most of those that surely stay within the allowed loss, or the surest one.

    Thresholds are in the middle of the values that train alike: the rest of the run is foreseen, not known.

    Args:
        known: the space on the full run (`foreseen`).
        outcomes: on it; their stops are considered at the same shares of shorter runs, too.
        earlier: the studies.

    Returns:
        That on the full run, and that on a shorter one if it is better; None if there is no outcome.
    """
    trace = known.trace
    full = trace.run["epochs"]
    choices = [at_length(one, trace, epochs) for epochs in (full, *shorter_lengths(earlier, full)) for one in outcomes]
    if not choices:
        return None
    depths = Depths(trace)
    found = expected(earlier, trace, [_run(trace, depths, one.stops, one.saved, one.share) for one in choices])
    scales = [one.prior.scale for one in earlier]
    shares = found.share_within(float(np.mean([scale.within / scale.unit for scale in scales])))
    figures = zip(choices, found.mean.tolist(), found.spread.tolist(), shares.tolist(), strict=True)
    made = [Recommendation(outcome=one, loss=loss, spread=spread, within=p) for one, loss, spread, p in figures]
    whole = max(made[: len(outcomes)], key=lambda one: one.rank)
    best = max(made, key=lambda one: one.rank)
    middle = replace(whole, outcome=at_middle(whole.outcome, known, trace))
    return middle, best if best.rank > whole.rank else None


def at_length(one: Outcome, trace: RunTrace, epochs: int) -> Outcome:
    """Return a full run's outcome on a run of fewer epochs, its stops at the same shares of that.

    Args:
        one: the outcome.
        trace: of the full run.
        epochs: of the shorter one.
    """
    share = epochs / trace.run["epochs"]
    stops = tuple((round(when * share), through) for when, through in one.stops)
    return replace(one, epochs=epochs, share=share, saved=1 - share * (1 - one.saved), stops=stops)


def shorter_lengths(earlier: Sequence[Earlier], epochs: int) -> list[int]:
    """Return the epochs of shorter runs that earlier studies trained, as shares of this run, `SHORTEST` at least.

    Both are rounded down to whole epochs, as a search does.

    Args:
        earlier: the studies.
        epochs: of the full run.
    """
    found = set()
    for one in earlier:
        full = one.known.base.epochs
        trained = {round(run.ended * full) for run in one.prior.runs}
        shares = [of_full / full for of_full in trained if at_most(SHORTEST, full) <= of_full < full]
        found |= {max(at_most(share, epochs), at_most(SHORTEST, epochs)) for share in shares}
    return sorted(of_this for of_this in found if 1 <= of_this < epochs)


def expected(earlier: Sequence[Earlier], trace: RunTrace, runs: Sequence[PriorRun], *, own: bool = False) -> Posterior:
    """Return what studies say of runs.

    Args:
        earlier: the studies.
        trace: of the runs.
        runs: on that trace.
        own: whether the one study is that of the runs itself.
    """
    levels = Depths(trace).levels
    seen, losses, studies = prior_rows([one.prior for one in earlier], levels)
    return posterior(
        seen, losses, features_of(runs, levels), unit=1.0, studies=np.zeros_like(studies) if own else studies,
        luck=float(np.mean([one.prior.scale.luck_in_units for one in earlier])),
    )  # fmt: skip


def _run(
    trace: RunTrace, depths: Depths, stops: Sequence[tuple[int, int]], saved: float, ended: float = 1.0
) -> PriorRun:
    return PriorRun(stops=depths.of_stops(stops, trace.total_steps), ended=ended, saved=saved, loss=0.0)


def left_out(earlier: Sequence[Earlier], share: float) -> Errors | None:
    """Return the errors of recommending for each study from the others and its own first part; None if none can be.

    What a study says itself of the loss is the model of its own runs.

    Args:
        earlier: the studies, >= 2.
        share: of the run, that counts as recorded.
    """
    found = []
    for place, one in enumerate(earlier):
        trace = one.known.trace
        others = [*earlier[:place], *earlier[place + 1 :]]
        chosen = recommended(*foreseen(one.known, max(1, round(share * trace.total_steps)), others), others)
        if chosen is None:
            continue
        choice, shorter = chosen
        true = predictions(trace, [choice.outcome.config], branches=True)[0]
        if true is None:
            continue
        as_stops, depths = shorter or choice, Depths(trace)
        runs = [
            _run(trace, depths, stops_in(true), float(true["compute_saved"])),
            _run(trace, depths, as_stops.outcome.stops, as_stops.outcome.saved, as_stops.outcome.share),
        ]
        in_truth, of_stops = expected([one], trace, runs, own=True).mean
        saved = abs(choice.outcome.saved - float(true["compute_saved"]))
        found.append((saved, abs(choice.loss - in_truth), abs(as_stops.loss - of_stops)))
    if not found:
        return None
    means = np.mean(found, axis=0)
    return Errors(studies=len(found), saved=float(means[0]), loss=float(means[1]), loss_of_stops=float(means[2]))


def unit_of(earlier: Sequence[Earlier], drop: float | str) -> float:
    """Return the unit of losses, on average over the studies: in the metric's unit, or in percent of the baseline's.

    Args:
        earlier: the studies.
        drop: that may be lost: in percent if it is such as ``2%`` of the baseline's.
    """
    priors = [one.prior for one in earlier]
    relative = isinstance(drop, str)
    units = [one.scale.unit * (100 / abs(one.baseline) if relative and one.baseline else 1) for one in priors]
    return float(np.mean(units))


def explicit(known: WarmStart, outcome: Outcome) -> TrialConfig | None:
    """Return the configuration that stops at the outcome's iterations, whatever the variances do.

    None if no list of stops says it: the numbers in a list ascend, and whole units stop in the order in which they
    execute, which may be another one than that in which they are registered.

    Args:
        known: the run, with the plan of layers of the outcome's configuration.
        outcome: whose stops are given.
    """
    config = TrialConfig.from_mapping(outcome.config)
    last_of = {}  # the last parameter of a unit by its number, which events of auto mode name
    if config.gradskip_settings().mode == "auto":
        plan = known.trace.blueprint(config).plan
        last_of = {unit.number: plan.order[unit.end] for unit in plan.units}
    # Of stops at one iteration the last is the deepest.
    deepest = {when: last_of.get(number, number) for when, number in outcome.stops}
    if any(later <= number for number, later in pairwise(deepest.values())):
        return None
    same = {name: outcome.config[name] for name in _HOW if name in outcome.config}
    stops = {"CAC_STOP_LAYER_NUM": tuple(deepest.values()), "CAC_STOP_LAYER_ITR": tuple(deepest)}
    how = {"method": "gradskip", "epochs": outcome.epochs}
    return TrialConfig.from_mapping({**known.base.to_dict(), **same, **stops, **how})


def recommend(
    config: TrialConfig,
    space: Space,
    earlier: Sequence[Earlier],
    epochs: int,
    on_row: Callable[[Mapping[str, Any]], None],
) -> Recommendations | None:
    """Train the first epochs of a dense run and recommend a setting for all of it; None if none stops anything.

    Args:
        config: of the dense run.
        space: whose settings are recommended.
        earlier: the studies.
        epochs: to train, with the learning-rate schedule of the full run.
        on_row: called with the row of each.
    """
    context = context_of(config)
    with tempfile.TemporaryDirectory() as tree:
        with SharedRun(config, Sharing(tree=Path(tree), budget_bytes=0)) as dense:
            for _ in range(epochs):
                on_row(dense.train_epoch())
            store = dense.store
        known = on_run(space, config, context, None)
        write_facts(store, _skipping(known))
        known = replace(known, trace=read_trace(store))

        def complete(settings: list[dict[str, Any]]) -> RunTrace:
            return completed(store, read_trace(store), settings)

        until = epochs * known.trace.steps_per_epoch
        chosen = recommended(*foreseen(known, until, earlier, complete), earlier)
        if chosen is None:
            return None
        full, shorter = chosen

        def as_stops(found: Recommendation | None) -> Recommendation | None:
            config = None if found is None else explicit(known, found.outcome)
            if found is None or config is None:
                return None
            stops, epochs = config.to_dict(), found.outcome.epochs
            whole = complete([stops])
            own = replace(whole, run={**whole.run, "epochs": epochs}, total_steps=epochs * whole.steps_per_epoch)
            (row,) = predictions(extended(own, until, []), [stops])
            assert row is not None  # its costs were counted
            saved = 1 - found.outcome.share * (1 - float(row["compute_saved"]))
            return replace(found, outcome=replace(found.outcome, config=stops, saved=saved))

        return Recommendations(thresholds=full, stops=as_stops(full), shorter=as_stops(shorter))


def _skipping(known: WarmStart) -> list[TrialConfig]:
    configs = typical_configs(known.space, known.context, known.base, known.hold)
    return [replace(config, method="gradskip") for config in configs]


def check_space(space: Space) -> None:
    """Raise UserError for a space whose settings cannot be recommended."""
    if space.method != "gradskip" or space.options:
        raise UserError(
            f"--space must be one of Gradient-Skip alone, such as auto_thresholds or manual_layers, got {space.name}"
        )
