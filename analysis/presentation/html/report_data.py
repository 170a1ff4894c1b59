"""What a report is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from analysis.io.layout import StudyInfo
from analysis.metrics.saving import saved_words, saving_of


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that a report shows. Frames that are None were not asked for or are unknown; their sections are left out.

    Accuracies, drops, savings and ratios are fractions.
    """

    info: StudyInfo
    """What was searched."""
    trials: pd.DataFrame
    """One row a trial (`analysis.load`)."""
    ranking: pd.DataFrame
    """The completed trials, best first (`analysis.rank`)."""
    best: pd.Series | None
    """The chosen row of the ranking; None if nothing is within the allowed drop."""
    allowed_drop: float
    """Accuracy that may be lost, in [0, 1)."""
    headline: str
    """The answer in one sentence."""
    cost_line: str
    """What the search cost, in one sentence."""
    best_env: str
    """The chosen settings as lines that a POSIX shell can source."""
    status: str = "finished"
    """``finished`` or ``running``."""
    history: pd.DataFrame | None = None
    """One row an epoch and trial: trial, epoch, and the columns of `trainables.metrics.ROW`."""
    importance: pd.DataFrame | None = None
    """Columns objective, parameter, importance (sums to 1 an objective); a reason for none in ``attrs["reason"]``."""
    interactions: pd.DataFrame | None = None
    """Columns objective, first, second, strength in [0, 1]."""
    controls: pd.DataFrame | None = None
    """Trials that any setting has to beat: control (such as ``shorter 0.8``, ``random stops``), compute_saved,
    accuracy."""
    confirmation: pd.DataFrame | None = None
    """A row a confirmed candidate: candidate, seeds, compute_saved, saved (where the study ranks by other compute than
    the training's), accuracy_drop, drop_low, drop_high, confidence, confirmed."""
    variance: pd.DataFrame | None = None
    """Weight variance of the chosen trial: iteration, layer (name), ratio (variance over its running peak), and where
    known examined (whether the rule looked at the layer then)."""
    stops: pd.DataFrame | None = None
    """Where layers stopped in that picture: iteration, layer (name), ratio."""
    thresholds: pd.DataFrame | None = None
    """Its thresholds: name, value."""
    tree_svg: str | None = None
    """The stage tree's picture (`analysis.tree_svg`)."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions, machine and whatever else says where this was found, by name."""

    @property
    def saving(self) -> str:
        """Compute that the study ranks by: training, inference or both."""
        return saving_of(self.trials)

    @property
    def saved_words(self) -> str:
        """What is saved of it, in words: on axes and in headings."""
        return saved_words(self.saving)
