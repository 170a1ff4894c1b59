"""Confirmation: the best settings of a study and its baseline, trained again on seeds that the search did not use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.trial import TrialState

from analysis.formatting import drop_text, drop_words, plural, whole_percent
from analysis.io.studies import load
from analysis.io.study_files import Layout, StudyInfo
from analysis.metrics.confirmation import FEWEST_PAIRS, expected_half_width, looks_at, shares_of_error
from analysis.metrics.duplicates import outcomes
from analysis.metrics.noise import resolution_of, seed_noise
from analysis.metrics.over_seeds import compared_column
from analysis.metrics.ranking import is_cut, rank
from analysis.metrics.saving import quality_of
from analysis.presentation.summary_text import config_of
from trainables.config import TrialConfig, check_integer, wrapped_seed
from trainables.errors import TrainingDiverged, UserError
from trainables.storage import joined
from tune_cac.messages import say
from tune_cac.study.decoded_images import keeps_decoded_images
from tune_cac.study.folder import check_writable, find_study, locked, mend_journal, package_versions, written
from tune_cac.study.object_storage import copied_to_storage
from tune_cac.study.script_files import check_unchanged
from tune_cac.study.search_options import SearchOptions
from tune_cac.study.study_result import SearchResult, answer, write_answer
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.progress import SearchProgress
from tune_cac.tuning.run import plan_of, thin_checkpoints, train
from tune_cac.tuning.run_context import check_gpus, run_context
from tune_cac.tuning.searcher import FINISHED, StudySearch
from tune_cac.tuning.trials import OF_EPOCHS, PredefinedTrial, as_key


class FixedListSearch(StudySearch):
    """Train a list of runs in order, without those that the study already has."""

    judges = False  # there are several baselines, and no sampler uses the constraint

    def __init__(self, plan: SearchPlan, wanted: Sequence[PredefinedTrial]) -> None:
        super().__init__(plan)
        self.outcomes = self.walk = None  # none is chosen
        self._wanted = list(wanted)
        self._again = self._failed_before()

    def _failed_before(self) -> set[str]:
        """Return the keys of runs that failed in an earlier call, as when memory ran out, unless they diverged."""
        keys: dict[str, bool] = {}
        for trial in self.trials.all():
            attrs = trial.user_attrs
            if "given" in attrs and "continued_by" not in attrs:
                diverged = str(attrs.get("error", "")).startswith(TrainingDiverged.__name__)
                keys[as_key(attrs["given"])] = trial.state == TrialState.FAIL and not diverged
        return {key for key, failed in keys.items() if failed}

    def missing(self) -> list[PredefinedTrial]:
        """Return the runs that were not begun, were interrupted, or failed in an earlier call."""
        begun = self.trials.begun() - self._again
        return [run for run in self._wanted if run.key not in begun]

    def _next(self) -> optuna.Trial | str | None:
        missing = self.missing()
        if not missing:
            return None if self._running else FINISHED  # a worker may die, and its run begins again
        self._again.discard(missing[0].key)
        return self.restarts.start_predefined(missing[0])


@keeps_decoded_images
def confirm(
    study: str | Path,
    *,
    results: str | Path = "results",
    top: int = 5,
    seeds: int = 5,
    until_decided: bool = False,
    concurrency: int | None = None,
    checkpoint_budget: int | str = SearchOptions.checkpoint_budget,
    address: str | None = None,
) -> SearchResult:
    """Retrain the best settings of a study and its baseline on fresh seeds, and report which are confirmed.

    The runs form a study of their own in the study's folder and train as in a search. A repeated call does not train
    finished runs again: it continues an interrupted confirmation, retries runs that failed without diverging, and adds
    more seeds or candidates. ``best.env`` and ``report.md`` are rewritten and prefer confirmed settings.

    Args:
        study: name under ``results``, or path of the study's folder.
        results: folder that holds the studies.
        top: number of candidates, >= 1: the settings within the allowed drop that save most.
        seeds: number of fresh seeds, >= 3; they follow the study's own seed.
        until_decided: True to look at the results in between (`confirmation.looks_at`), which widens the intervals, and
            to train what is neither confirmed nor refuted on more of the seeds alone.
        concurrency: runs at a time; None for as many as the processors allow.
        checkpoint_budget: as in `search`.
        address: as in `search`.

    Returns:
        The study's answer with its table ``confirmation``; True in ``interrupted`` if runs are missing.

    Raises:
        UserError: no such study, none of its settings saves anything within the allowed drop, its baseline did
            not complete, or a number is out of range.
    """
    check_integer("--top", top, 1)
    check_integer("--seeds", seeds, FEWEST_PAIRS)
    layout = find_study(results, str(study))
    info = layout.read_info()
    trials = load(layout.root)
    baseline = trials[(trials["role"] == "baseline") & (trials["status"] == "completed")]
    if baseline.empty:
        raise UserError(
            f"nothing to confirm in {layout.root}: its baseline did not complete; finish the search, or search anew "
            "where it failed"
        )
    base = config_of(baseline.iloc[0])
    candidates = candidates_of(trials, info.allowed_drop, top)
    if candidates.empty:
        raise UserError(
            f"nothing to confirm in {layout.root}: no setting saves compute within the allowed "
            f"{drop_words(info.quality)} of {info.allowed_drop}: search more trials, or anew with a larger "
            "--allowed-drop"
        )
    fresh = [wrapped_seed(info.seed + 1 + n) for n in range(seeds)]
    wanted, looks = runs(candidates, base, fresh), looks_at(seeds) if until_decided else [seeds]
    child = layout.confirmation
    check_writable(layout.root)
    if base.device == "cuda" and not (address or os.environ.get("RAY_ADDRESS")):
        import torch

        if torch.cuda.device_count() == 0:
            raise UserError(
                f"{layout.root} was trained on a GPU and torch sees none here: confirm it where it was searched, or "
                "give --address"
            )
    go_on = f"confirm {layout.root} --top {top} --seeds {seeds}{' --until-decided' * until_decided}"
    with locked(layout), copied_to_storage(layout), written(layout, go_on):
        child.root.mkdir(exist_ok=True)
        picked, taken = candidates["trial"].tolist(), []
        if child.info.is_file():
            before = child.read_info()
            picked, taken = sorted({*picked, *before.candidates}), before.looks
        if further := [look for look in looks if look not in chain(*taken)]:
            taken = [*taken, further]
        place = str(joined(info.storage, child.root.name)) if info.storage else ""
        own: dict[str, Any] = {"controls": False, "candidates": picked, "storage": place, "looks": taken}
        child.write_info(replace(info, trials=len(wanted), versions=package_versions(), **own))
        how: dict[str, Any] = {
            "concurrency": concurrency, "checkpoint_budget": checkpoint_budget, "address": address,
        }  # fmt: skip
        options = options_of(info, child, base, trials=len(wanted), **how)
        say(
            f"{child.root}: {plural(len(candidates), 'candidate')} and the baseline on seeds {fresh[0]} to "
            f"{fresh[-1]}, {len(wanted)} runs of {info.length_text}, "
            f"{what_to_expect(trials, candidates, wanted, taken)}"
        )
        mend_journal(child.journal)
        for look in looks:
            interrupted = _train(child, options, base, runs(candidates, base, fresh[:look]))
            found = answer(layout, allowed_drop=info.allowed_drop, interrupted=info.interrupted)
            table = found.confirmation
            if interrupted or table is None:
                break
            decided = table.loc[table["confirmed"] | table["refuted"], "candidate"]
            candidates = candidates[~candidates["trial"].isin(decided)]
            if candidates.empty:
                break
        write_answer(layout, found)
        if not interrupted:
            thin_checkpoints(child, options)
    return replace(found, interrupted=interrupted)


def what_to_expect(
    trials: pd.DataFrame, candidates: pd.DataFrame, wanted: Sequence[PredefinedTrial], looks: Sequence[Sequence[int]]
) -> str:
    """Return what a confirmation costs at most, and how closely it will know losses of accuracy, before it begins."""
    baselines = sum(run.attrs["role"] == "baseline" for run in wanted)
    seeds = (len(wanted) - baselines) // len(candidates)
    cost = baselines + seeds * float((1 - candidates["compute_saved"]).sum())
    said = f"at most {cost:.1f} full trainings"
    quality, values = quality_of(trials), trials[compared_column(trials)]
    if quality.is_accuracy and (deviation := float(seed_noise(values.dropna().iloc[0], resolution_of(values)))) > 0:
        share, spent = shares_of_error(seeds, looks)
        width = expected_half_width(deviation, seeds, confidence=1 - 0.05 * share, comparisons=len(candidates))
        said += f"; mean losses will be known to about +-{drop_text(width, quality)}"
        said += f" ({whole_percent(1 - 0.05 * spent)} confidence, all together)"
    return said


def options_of(info: StudyInfo, child: Layout, base: TrialConfig, **how: Any) -> SearchOptions:
    """Return the study's own options for its runs on fresh seeds."""
    return SearchOptions.of_study(
        info,
        cpus_per_trial=base.threads,
        gpus_per_trial=(info.gpus_per_trial or 1.0) if base.device == "cuda" else 0.0,
        controls=False,
        results=child.root.parent,
        **how,
    )


def candidates_of(trials: pd.DataFrame, allowed_drop: float | str, top: int) -> pd.DataFrame:
    """Return at most ``top`` settings to confirm: within the allowed drop, saving compute, outcomes once."""
    ranking = rank(trials, allowed_drop=allowed_drop)
    acts = (ranking["method"] != "none") | is_cut(ranking)
    worth = ranking["within_drop"] & (ranking["saved"] > 0) & acts
    return ranking[worth & (outcomes(ranking) == ranking["trial"])].head(top)


def runs(candidates: pd.DataFrame, base: TrialConfig, seeds: list[int]) -> list[PredefinedTrial]:
    """Return the runs of a confirmation, baselines first so that candidates can share their training."""
    common, found = base.to_dict(), []
    for options in dict.fromkeys(config_of(row).options for _, row in candidates.iterrows()):
        own = {} if options == base.options else {"workload_options": list(options)}
        for seed in seeds:
            values = {"method": "none", **own, "seed": seed}
            found.append(PredefinedTrial(attrs={"role": "baseline"}, values=values))
    for _, row in candidates.iterrows():
        own = config_of(row).to_dict()
        values = {name: value for name, value in own.items() if common.get(name) != value and name != "seed"}
        if "workload_options" in common:
            values |= {} if "workload_options" in own else {"workload_options": []}
        attrs: dict[str, Any] = {"role": "candidate", "candidate": int(row["trial"])}
        if "epochs" in values:
            attrs[OF_EPOCHS] = base.epochs
        found += [PredefinedTrial(attrs=attrs, values={**values, "seed": seed}) for seed in seeds]
    return found


def _train(child: Layout, options: SearchOptions, base: TrialConfig, wanted: list[PredefinedTrial]) -> bool:
    """Train the missing runs; return whether they were interrupted before all of them ended."""
    check_gpus(options)
    if options.is_script:
        check_unchanged(options.workload_options)
    searcher = FixedListSearch(plan_of(child, options, run_context(base), base, trials=len(wanted)), wanted)
    searcher.adopt_unfinished()
    missing = len(searcher.missing())
    if missing:
        train(child, options, searcher, SearchProgress(searcher, to_run=missing))
    return bool(searcher.missing()) or searcher.trials.has_unfinished()
