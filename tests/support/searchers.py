"""Searchers on real journals, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from runs import finish

import search_spaces
from analysis.io.study_files import STUDY_NAME, Layout, StudyInfo
from search_spaces import Space, SpaceContext
from trainables.config import TrialConfig
from trainables.metrics import ROW
from trainables.stage_tree.shared_run import SharedRun, Sharing
from tune_cac.tuning.plan import SearchPlan
from tune_cac.tuning.run_context import run_context
from tune_cac.tuning.searcher import StudySearch

CONTEXT = SpaceContext(total_steps=300)


def searcher(
    folder: Path,
    seed: int = 0,
    begin: bool = True,
    space: str = "auto_thresholds",
    hold: dict[str, Any] | None = None,
    context: SpaceContext = CONTEXT,
    baseline: bool = True,
    own: Space | None = None,
    kind: type[StudySearch] = StudySearch,
    **more: Any,
) -> StudySearch:
    """A searcher; its baseline has completed, as trial 0, unless told otherwise. ``more``: further arguments."""
    plan = SearchPlan(
        context=context,
        journal=folder / "optuna.journal",
        allowed_drop=0.01,
        seed=seed,
        run_folder="ray/run-000",
        checkpoint_every_s=60,
        hold=hold or {},
        tree=folder / "tree",
        budget_bytes=0,
        trials=1,
        **{"space": own or search_spaces.load(space), "base": TrialConfig(method="none"), **more},
    )
    made = kind(plan)
    if begin:
        made.begin()
        if baseline:
            made.suggest("baseline")
            made.on_trial_complete("baseline", row(0.9, 0.0))
    return made


def row(accuracy: float, saved: float) -> dict[str, Any]:
    return {m.name: 0 for m in ROW} | {"quality": accuracy, "compute_saved": saved, "other": 1}


def told(folder: Path) -> list[optuna.trial.FrozenTrial]:
    """The study as any Optuna program reads it."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "optuna.journal")))
    return optuna.load_study(study_name=STUDY_NAME, storage=storage).get_trials()


def learning(
    folder: Path,
    seed: int = 0,
    begin: bool = True,
    hold: dict[str, Any] | None = None,
    space: str = "auto_thresholds",
    own: Space | None = None,
    **more: Any,
) -> StudySearch:
    """A searcher of 30 trials over the tiny workload, whose baseline has been trained over its tree."""
    base = TrialConfig(workload="tiny", epochs=4, method="none")
    context = run_context(base)
    Layout(folder).write_info(
        StudyInfo(space="auto_thresholds", workload="tiny", epochs=4, seed=0, trials=30, allowed_drop=0.01, versions={})
    )
    plan = SearchPlan(
        space=own or search_spaces.load(space), context=context, base=base, journal=folder / "optuna.journal",
        seed=seed, run_folder="ray/run-000", checkpoint_every_s=60, hold=hold or {}, tree=folder / "tree",
        budget_bytes=0, trials=30, **{"allowed_drop": 0.01, **more},
    )  # fmt: skip
    made = StudySearch(plan)
    if begin:
        made.begin()
        made.suggest("baseline")
        with SharedRun(base, Sharing(tree=folder / "tree", budget_bytes=0)) as run:
            made.on_trial_complete("baseline", finish(run)[-1])
    return made
