"""A study's answer: its frames, and the files that hold it. Loads neither torch nor ray."""

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

#: Columns of ``ranking.csv`` that are not hyperparameters.
_HIDDEN = ("test_accuracy", "test_accuracy_drop")


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found, as pandas."""

    folder: Path
    """The study's folder."""
    trials: pd.DataFrame
    """One row a trial (`analysis.load`)."""
    ranking: pd.DataFrame
    """The completed trials, best first (`analysis.rank`)."""
    best: pd.Series | None
    """First of the ranking, None if nothing is within the allowed drop."""
    allowed_drop: float
    """Accuracy that may be lost, a fraction."""
    confirmation: pd.DataFrame | None
    """What retraining on fresh seeds found (`analysis.confirm_table`); None where none was begun."""
    interrupted: bool
    """Whether the search ended before all its trials."""
    why_little: str = ""
    """Why settings of the space do nothing or little on this run; empty where that is not known."""

    @property
    def failures(self) -> pd.DataFrame:
        """Trials that raised or reported no finite numbers: trial and error."""
        return self.trials.loc[self.trials["status"] == "failed", ["trial", "error"]]

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        return headline(
            self.ranking, self.best, self.allowed_drop, confirmation=self.confirmation, line=self.control_line,
            why_little=self.why_little,
        )  # fmt: skip

    @property
    def control_line(self) -> pd.DataFrame:
        """What training shorter reaches (`analysis.control_line`)."""
        return control_line(self.trials)

    @property
    def cost(self) -> SearchCost:
        """What the search executed, beside what its trials count for alone (`analysis.search_cost`)."""
        return search_cost(self.trials)

    @property
    def cost_line(self) -> str:
        """The same in one sentence."""
        return search_cost_line(self.cost)

    def table(self, top: int | None = None) -> list[list[str]]:
        """The ranked table as text cells, header first."""
        return ranked_table(
            self.ranking, top=top, beats=beats_shorter(self.ranking, self.control_line), allowed_drop=self.allowed_drop
        )


def answer(
    layout: Layout, *, allowed_drop: float, price: float | None = None, interrupted: bool = False
) -> SearchResult:
    """Load and rank a study, with a price by what each trial is worth (`analysis.rank`); writes nothing."""
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
    """The confirmed setting that saves most, or with a price is worth most; where none is, the best not refuted."""
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

    `best.yaml` is there where the best trial compresses, and only then; `best.env` unless nothing could be judged,
    because no baseline has completed.
    """
    info, allowed_drop = layout.read_info(), result.allowed_drop
    trials, ranking, found = result.trials, result.ranking, result.best
    trials.to_parquet(layout.trials)
    # What a choice may be made by: the test split stays out of the ranked table.
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
    """Write `tree.svg`; False, and nothing written, if no trial went through a stage tree."""
    stages = stage_frame(layout.root)
    if not stages["trials"].map(len).any():
        return False
    layout.tree_picture.write_text(tree_picture(stages, cost), encoding="utf-8")
    return True


def tree_picture(stages: pd.DataFrame, cost: SearchCost) -> str:
    """The picture of a study's tree, under the sentence that says what its trials cost."""
    title = f"{plural(cost.trials, 'trial')}, {full_trainings(cost.dense_equivalents)}"
    return tree_svg(stages, stages.attrs["total_steps"], title=title)
