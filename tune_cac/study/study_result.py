"""A study's result: data frames, and the files written from them. Loads neither torch nor ray."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.io.studies import load
from analysis.io.study_files import Layout
from analysis.metrics.accounting import SearchCost, search_cost
from analysis.metrics.confirmation import read_confirmation, without_refuted
from analysis.metrics.duplicates import outcomes
from analysis.metrics.ranking import beats_shorter, best, control_line, rank
from analysis.presentation.best_env import best_env, best_schedule
from analysis.presentation.markdown_report import report_markdown, search_cost_line
from analysis.presentation.summary_text import (
    Answer,
    DropWords,
    answer_of,
    headline,
    is_answer,
    nearest_sentence,
    recipe_alone,
)
from analysis.presentation.terminal import ROWS, terminal_table


def write_answer(layout: Layout, result: SearchResult) -> None:
    """Write a study's `trials.parquet`, `ranking.csv`, `best.env` and `report.md`, and its answer into `study.json`.

    `best.yaml` exists only if the best trial compresses, and `best.env` only if a baseline has completed, without which
    nothing can be judged.
    """
    info, allowed_drop = layout.read_info(), result.allowed_drop
    trials, ranking, found = result.trials, result.ranking, result.best
    trials.to_parquet(layout.trials)
    # Settings must not be chosen by the test split, so it stays out of the ranked table.
    beats = beats_shorter(ranking, result.control_line)
    hidden = [name for name in ranking.columns if name.startswith("test_")]
    ranking.drop(columns=hidden).assign(beats_shorter=beats).to_csv(layout.ranking, index=False)
    judged = (ranking["role"] == "baseline").any()
    for file, text in (
        (layout.best, best_env(info, found, allowed_drop, **result.about, beside=result.beside) if judged else None),
        (layout.best_schedule, best_schedule(info, found, allowed_drop, **result.about)),
        (layout.report, report_markdown(
            info, trials, ranking, found, allowed_drop, confirmation=result.confirmation
        )),
    ):  # fmt: skip
        if text is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(text, encoding="utf-8")
    numbers = None if result.answer is None else asdict(result.answer)
    layout.write_info(replace(info, answer=numbers, interrupted=result.interrupted))


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search, as pandas objects."""

    folder: Path  # the study's folder
    trials: pd.DataFrame  # one row per trial (`analysis.load`)
    ranking: pd.DataFrame  # the completed trials, best first (`analysis.rank`)
    best: pd.Series | None  # the best setting (`best_or_confirmed`); None if nothing is within the allowed drop
    allowed_drop: float | str  # drop of the metric that is allowed (`trainables.quality`)
    confirmation: pd.DataFrame | None
    """Result of retraining on fresh seeds (`analysis.confirm_table`); None if none was begun."""
    interrupted: bool  # true if the search was interrupted before all trials ended
    used_up: str = ""
    """The budget that ended the search, what is trained and how to go on, in one line; empty if none did."""
    why_little: str = ""
    """The reason why settings of the space do nothing or little on this run; empty if that is unknown."""

    @property
    def failures(self) -> pd.DataFrame:
        """Return the trials that raised or reported no finite numbers: trial and error."""
        return self.trials.loc[self.trials["status"] == "failed", ["trial", "error"]]

    @property
    def answer(self) -> Answer | None:
        """Return the numbers of the answer: what it saves and loses, with the interval over seeds; None for none."""
        return answer_of(self.best, self.confirmation) if self.best is not None and is_answer(self.best) else None

    @property
    def headline(self) -> str:
        """Return the answer in one sentence."""
        return headline(
            self.ranking, self.best, self.allowed_drop, confirmation=self.confirmation, line=self.control_line,
            why_little=self.why_little,
        )  # fmt: skip

    @property
    def control_line(self) -> pd.DataFrame:
        """Return what cut dense runs reach (`analysis.control_line`)."""
        return control_line(self.trials)

    @property
    def beside(self) -> str:
        """Return what has to be known beside the settings: of an answer, what its norms and learning rates do alone.

        Else what loses least of what saves something; empty if fresh seeds refuted what lost little.
        """
        if self.answer is not None and self.best is not None:
            return recipe_alone(self.ranking, self.best, DropWords(self.best, self.allowed_drop))
        refuted = self.confirmation is not None and self.confirmation["refuted"].any()
        return "" if refuted else nearest_sentence(self.ranking, self.allowed_drop)

    @property
    def cost(self) -> SearchCost:
        """Return what the search executed, and what its trials would cost alone (`analysis.search_cost`)."""
        return search_cost(self.trials)

    @property
    def cost_line(self) -> str:
        """Return the cost in one sentence."""
        return search_cost_line(self.cost)

    @property
    def about(self) -> dict[str, Any]:
        """Return what the comments of ``best.env`` and ``best.yaml`` tell beside the setting."""
        return {"confirmation": self.confirmation, "line": self.control_line}

    def table(self, width: int, rows: int = ROWS) -> str:
        """Return the best rows of the ranked table in lines of at most so many characters."""
        beats = beats_shorter(self.ranking, self.control_line)
        number = int(self.best["trial"]) if self.best is not None and is_answer(self.best) else None
        return terminal_table(
            self.ranking, width=width, allowed_drop=self.allowed_drop, answer=number, beats=beats, most=rows
        )


def answer(layout: Layout, *, allowed_drop: float | str, interrupted: bool = False) -> SearchResult:
    """Load and rank a study (`analysis.rank`); write nothing."""
    trials, info = load(layout.root), layout.read_info() if layout.info.exists() else None
    ranking = rank(trials, allowed_drop=allowed_drop)
    confirmation = read_confirmation(layout, ranking, allowed_drop=allowed_drop)
    return SearchResult(
        folder=layout.root,
        trials=trials,
        ranking=ranking,
        best=best_or_confirmed(ranking, confirmation),
        allowed_drop=allowed_drop,
        confirmation=confirmation,
        interrupted=interrupted,
        why_little="" if info is None else info.why_little,
    )


def best_or_confirmed(ranking: pd.DataFrame, confirmation: pd.DataFrame | None) -> pd.Series | None:
    """Return the confirmed setting that saves most; else the best not refuted."""
    confirmed = [] if confirmation is None else confirmation.loc[confirmation["confirmed"], "candidate"].tolist()
    found = ranking[ranking["within_drop"] & outcomes(ranking).isin(confirmed)]
    if found.empty:
        return best(without_refuted(ranking, confirmation))
    return found.iloc[outcomes(found).map(confirmed.index).argmin()]
