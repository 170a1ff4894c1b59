"""Earlier studies read as a prior of a search, once: a search that goes on has their content in its own study.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.io.layout import Layout
from analysis.io.studies import read_journal
from analysis.trace_replay.traces import load_trace
from trainables.errors import UserError
from trainables.quality import Quality
from tune_cac.study.folder import find_study
from tune_cac.study.options import SearchOptions
from tune_cac.tuning.optuna_objectives import missing_objectives, saved_of_baseline
from tune_cac.tuning.outcomes.distinct_outcomes import is_predicted, stops_in
from tune_cac.tuning.outcomes.prior import Depths, PriorRun, PriorStudy
from tune_cac.tuning.warm_start.threshold_ranges import spread

#: Runs of all earlier studies together, each study's spread over what they save: a model of the quality is cubic in it.
MOST_RUNS = 300


def read_priors(options: SearchOptions) -> list[Mapping[str, Any]]:
    """Return the content of the studies that a new search starts from, in plain types.

    Args:
        options: of the search, its metric settled.

    Raises:
        UserError: no such study, the searched one itself, one of another metric, or one without what a prior needs.
    """
    if options.name:
        own = (options.folder / options.name).resolve()
        for name in options.prior:
            if own in ((options.folder / name).resolve(), Path(name).resolve()):
                raise UserError(
                    f"--prior must name other studies than the one that is searched, got {name}: leave it out"
                )
        there = Layout(own).read_info() if Layout(own).info.exists() else None
        if there is not None and (there.prior_runs or not there.prior):
            return []  # it has its prior, if that is the same, and those studies may be gone
    found = {layout.root.resolve(): layout for layout in (find_study(options.results, name) for name in options.prior)}
    priors = [study_as_prior(layout, options.quality, options.drop) for layout in found.values()]
    return [thinned(prior, len(priors)).to_dict() for prior in priors]


def thinned(prior: PriorStudy, studies: int) -> PriorStudy:
    """Return a study with its part of `MOST_RUNS`, spread over what the runs save.

    Args:
        prior: what it found.
        studies: number of all of them.
    """
    saved = sorted((run.saved, place) for place, run in enumerate(prior.runs))
    kept = spread(saved, max(1, MOST_RUNS // studies))
    return replace(prior, runs=tuple(prior.runs[place] for place in sorted(kept)))


def study_as_prior(layout: Layout, quality: Quality, allowed_drop: float | str) -> PriorStudy:
    """Return what a study found.

    Args:
        layout: of the study.
        quality: metric of the new run.
        allowed_drop: that the new run may lose of it (`trainables.quality`).

    Raises:
        UserError: another metric, no baseline, no other run, or no recorded training.
    """
    info, root = layout.read_info(), layout.root
    if (info.quality.name, info.quality.direction) != (quality.name, quality.direction):
        raise UserError(
            f"--prior must name studies of the same metric, {_words(quality)}, got {root} of {_words(info.quality)}: "
            "leave it out, or search by its --metric"
        )
    records = [one for one in read_journal(layout.journal) if one["status"] == "completed"]
    baseline = next((one for one in records if one["role"] == "baseline"), None)
    if baseline is None:
        raise UserError(
            f"--prior must name studies whose baseline has ended, got {root} without one: finish it by "
            f"python -m tune_cac search --resume {root}, or leave it out"
        )
    trace = load_trace(root, epochs=info.epochs)
    depths, row = Depths(trace), baseline["row"]
    runs = []
    for one in records:
        config = one["config"]
        told = one["role"] != "baseline" and not missing_objectives(one["row"], quality)
        if told and config["method"] in ("none", "gradskip") and is_predicted(config, baseline["config"]):
            ended = config["epochs"] / info.epochs
            stops = depths.of_stops(stops_in(one["row"]), trace.total_steps)
            loss, saved = quality.lost(one["row"][quality.key], row[quality.key]), saved_of_baseline(one["row"], row)
            runs.append(PriorRun(stops=stops, ended=ended, saved=saved, loss=loss))
    if not runs:
        raise UserError(
            f"--prior must name studies in which other runs than the baseline have ended, got {root} without one: "
            "leave it out"
        )
    return PriorStudy.of(root.name, runs, row[quality.key], quality, allowed_drop)


def priors_in(stored: list[Mapping[str, Any]], quality: Quality, allowed_drop: float | str) -> tuple[PriorStudy, ...]:
    """Return the studies that `read_priors` has read, from `StudyInfo.prior_runs`, for this metric and allowed drop."""
    # Before 2026-11-26 losses were stored in units of the allowed one, which nobody can convert now.
    return tuple(PriorStudy.from_dict(one, quality, allowed_drop) for one in stored if "baseline" in one)


def _words(quality: Quality) -> str:
    return f"{quality.name} ({quality.direction})"
