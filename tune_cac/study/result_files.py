"""The files in a study's folder that hold its result: best.env, best.yaml, ranking.csv, report.md, tree.svg."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.formatting import plural
from analysis.io.layout import Layout
from analysis.metrics.accounting import SearchCost
from analysis.metrics.controls import beats_shorter
from analysis.presentation.cost_text import full_trainings
from analysis.presentation.export import hidden_columns
from analysis.presentation.markdown_report import report_markdown
from analysis.presentation.stage_frame import stage_frame
from analysis.presentation.summary_text import best_env, best_schedule
from analysis.presentation.tree_picture import tree_svg
from tune_cac.study.study_result import SearchResult


def write_answer(layout: Layout, result: SearchResult) -> None:
    """Write a study's `trials.parquet`, `ranking.csv`, `best.env`, `report.md`, and `tree.svg` if it has a tree.

    `best.yaml` exists only if the best trial compresses, and `best.env` only if a baseline has completed, without which
    nothing can be judged.
    """
    info, allowed_drop = layout.read_info(), result.allowed_drop
    trials, ranking, found = result.trials, result.ranking, result.best
    trials.to_parquet(layout.trials)
    # Settings must not be chosen by the test split, so it stays out of the ranked table.
    beats = beats_shorter(ranking, result.control_line)
    ranking.drop(columns=hidden_columns(ranking)).assign(beats_shorter=beats).to_csv(layout.ranking, index=False)
    about: dict[str, Any] = {
        "confirmation": result.confirmation, "line": result.control_line, "same_run": result.same_run
    }  # fmt: skip
    if (ranking["role"] == "baseline").any():
        layout.best.write_text(best_env(info, found, allowed_drop, **about))
    else:
        layout.best.unlink(missing_ok=True)
    schedule = best_schedule(info, found, allowed_drop, **about)
    if schedule is None:
        layout.best_schedule.unlink(missing_ok=True)
    else:
        layout.best_schedule.write_text(schedule, encoding="utf-8")
    picture = layout.tree_picture.name if draw_tree(layout, result.cost) else None
    layout.report.write_text(
        report_markdown(info, trials, ranking, found, allowed_drop, picture=picture, confirmation=result.confirmation)
    )


def draw_tree(layout: Layout, cost: SearchCost) -> bool:
    """Write `tree.svg`; return False and write nothing if no trial used a stage tree."""
    stages = stage_frame(layout.root)
    if not stages["trials"].map(len).any():
        return False
    layout.tree_picture.write_text(tree_picture(stages, cost), encoding="utf-8")
    return True


def tree_picture(stages: pd.DataFrame, cost: SearchCost) -> str:
    """Return the picture of a study's tree, titled with the cost of its trials."""
    title = f"{plural(cost.trials, 'trial')}, {full_trainings(cost.dense_equivalents)}"
    return tree_svg(stages, stages.attrs["total_steps"], title=title)
