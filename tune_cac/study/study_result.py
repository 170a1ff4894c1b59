"""A study's result: data frames, and the files written from them. Loads neither torch nor ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.formatting import plural
from analysis.io.layout import Layout
from analysis.io.studies import load
from analysis.metrics.accounting import SearchCost, search_cost
from analysis.metrics.confirmation import held, read_confirmation
from analysis.metrics.controls import beats_shorter, control_line
from analysis.metrics.duplicates import outcomes
from analysis.metrics.ranking import best, rank
from analysis.presentation.markdown_report import report_markdown
from analysis.presentation.ranked_table import ranked_table
from analysis.presentation.stage_frame import stage_frame
from analysis.presentation.summary_text import (
    best_env,
    best_schedule,
    full_trainings,
    headline,
    search_cost_line,
)
from analysis.presentation.tree_picture import tree_svg

#: Columns left out of ``ranking.csv``, because settings must not be chosen by the test split.
_HIDDEN = ("test_accuracy", "test_accuracy_drop")


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search, as pandas objects."""

    folder: Path
    """The study's folder."""
    trials: pd.DataFrame
    """One row per trial (`analysis.load`)."""
    ranking: pd.DataFrame
    """The completed trials, best first (`analysis.rank`)."""
    best: pd.Series | None
    """The best setting (`best_or_confirmed`); None if nothing is within the allowed accuracy loss."""
    allowed_drop: float
    """Accuracy that may be lost, a fraction."""
    confirmation: pd.DataFrame | None
    """Result of retraining on fresh seeds (`analysis.confirm_table`); None if none was begun."""
    interrupted: bool
    """Whether the search was interrupted before all trials ended."""
    why_little: str = ""
    """Why settings of the space do nothing or little on this run; empty if that is unknown."""

    @property
    def failures(self) -> pd.DataFrame:
        """Return the trials that raised or reported no finite numbers: trial and error."""
        return self.trials.loc[self.trials["status"] == "failed", ["trial", "error"]]

    @property
    def headline(self) -> str:
        """Return the answer in one sentence."""
        return headline(
            self.ranking, self.best, self.allowed_drop, confirmation=self.confirmation, line=self.control_line,
            why_little=self.why_little,
        )  # fmt: skip

    @property
    def control_line(self) -> pd.DataFrame:
        """Return what shorter training reaches (`analysis.control_line`)."""
        return control_line(self.trials)

    @property
    def cost(self) -> SearchCost:
        """Return what the search executed, and what its trials would cost alone (`analysis.search_cost`)."""
        return search_cost(self.trials)

    @property
    def cost_line(self) -> str:
        """Return the cost in one sentence."""
        return search_cost_line(self.cost)

    def table(self, top: int | None = None) -> list[list[str]]:
        """Return the ranked table as text cells, header first."""
        return ranked_table(
            self.ranking, top=top, beats=beats_shorter(self.ranking, self.control_line), allowed_drop=self.allowed_drop
        )


def answer(
    layout: Layout, *, allowed_drop: float, price: float | None = None, interrupted: bool = False
) -> SearchResult:
    """Load and rank a study, by worth if a price is given (`analysis.rank`); write nothing."""
    trials = load(layout.root)
    ranking = rank(trials, allowed_drop=allowed_drop, price=price)
    confirmation = read_confirmation(layout, ranking, allowed_drop=allowed_drop)
    return SearchResult(
        folder=layout.root,
        trials=trials,
        ranking=ranking,
        best=best_or_confirmed(ranking, confirmation),
        allowed_drop=allowed_drop,
        confirmation=confirmation,
        interrupted=interrupted,
        why_little=layout.read_info().why_little if layout.info.exists() else "",
    )


def best_or_confirmed(ranking: pd.DataFrame, confirmation: pd.DataFrame | None) -> pd.Series | None:
    """Return the confirmed setting that saves most, or with a price has most worth; else the best not refuted."""
    confirmed = [] if confirmation is None else confirmation.loc[confirmation["confirmed"], "candidate"].tolist()
    found = ranking[ranking["within_drop"] & outcomes(ranking).isin(confirmed)]
    if found.empty:
        return best(held(ranking, confirmation))
    if "worth" not in found.columns:  # else in the order of worth
        order = {number: place for place, number in enumerate(confirmed)}
        found = found.iloc[outcomes(found).map(order).argsort(kind="stable")]
    return found.iloc[0]


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
    ranking.drop(columns=list(_HIDDEN)).assign(beats_shorter=beats).to_csv(layout.ranking, index=False)
    about: dict[str, Any] = {"confirmation": result.confirmation, "line": result.control_line}
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
