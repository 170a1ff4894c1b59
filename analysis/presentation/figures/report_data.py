"""The data shown in a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from analysis.io.study_files import StudyInfo
from analysis.metrics.ranking import allowed_limit
from analysis.metrics.saving import saving_of
from trainables.quality import Quality
from trainables.savings import saved_words


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All data of a report. Frames that are None were not requested or are unknown; their sections are left out.

    Accuracies, accuracy losses, savings and ratios are fractions; another metric of the study is in its own unit.
    """

    info: StudyInfo  # description of the study
    trials: pd.DataFrame  # one row per trial (`analysis.load`)
    ranking: pd.DataFrame  # the completed trials, best first (`analysis.rank`)
    best: pd.Series | None  # the chosen row of the ranking; None if no trial is within the allowed accuracy loss
    allowed_drop: float | str  # allowed drop of the metric (`trainables.quality.read_drop`)
    headline: str  # the result; the first sentence is the page's title, the others are caveats
    cost_line: str  # cost of the search, in one sentence
    best_env: str  # the chosen settings as lines that a POSIX shell can source
    status: str = "finished"  # ``finished`` or ``running``
    controls: pd.DataFrame | None = None
    """Trials that any setting has to beat: control (for example ``shorter``), compute_saved,
    accuracy or the study's metric."""
    confirmation: pd.DataFrame | None = None
    """One row per retrained candidate: candidate, seeds, compute_saved, saved (if the study does not rank by training
    compute), the drop of the metric, drop_low, drop_high, confidence, confirmed."""
    gradients: pd.DataFrame | None = None  # gradient statistics (`analysis.gradient_statistics`)
    clusters: pd.DataFrame | None = None  # clusters of similar gradients (`analysis.gradient_clusters`)
    stages: pd.DataFrame | None = None  # the stage tree (`analysis.stage_frame`)
    environment: dict[str, str] = field(default_factory=dict)
    """Versions, machine and other facts about the environment of the search, by name."""

    @property
    def quality(self) -> Quality:
        """Return the metric by which the study's trials are compared."""
        return self.info.quality

    @cached_property
    def allowed(self) -> float:
        """Return the allowed drop in the metric's unit; NaN for a relative one without a completed baseline."""
        return allowed_limit(self.ranking, self.allowed_drop)

    @cached_property
    def saving(self) -> str:
        """Return the compute that the study ranks by."""
        return saving_of(self.trials)

    @property
    def saved_words(self) -> str:
        """Return the name of the saving that the study ranks by, in words, for axes and headings."""
        return saved_words(self.saving)
