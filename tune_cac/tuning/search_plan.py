"""Everything that a search of a study is told once: what it searches, on which run, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces import Space, SpaceContext
from search_spaces.grid import GridPoints
from trainables.config import TrialConfig
from tune_cac.study.fixed_params import AUTO


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """A study's search, as `study_searcher.StudySearch` carries it out."""

    space: Space
    """What is searched."""
    context: SpaceContext
    """The run it is searched on."""
    base: TrialConfig
    """Config of the baseline; spaces override its fields."""
    journal: Path
    """The Optuna journal file."""
    allowed_drop: float | str
    """Drop of the metric that is allowed (`trainables.quality`)."""
    sure: float = 0.0
    """Probability of staying within it on another seed that the answer has; 0: its own seed is enough."""
    seed: int
    """Seed of the sampler."""
    run_folder: str
    """Folder of the Ray experiment, relative to the study, for the record."""
    checkpoint_every_s: float
    """Seconds between checkpoints of a trial."""
    trial_timeout_s: float | None = None
    """Seconds without a row after which a trial's process is ended; None for no limit."""
    hold: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that have this value in every trial but the baseline, whatever the space returns."""
    tree: Path | str
    """The study's ``tree`` folder, or its URI where the study is in object storage."""
    sharing: bool = True
    """Whether trials share training; signals of dense runs are recorded either way."""
    budget_bytes: int
    """Most bytes of checkpoints."""
    trials: int
    """Number of trials planned for the study."""
    worker_resources: Mapping[str, float] | None = None
    """Ray's resources of each worker of a trial; None for trials of one process."""
    retries: int = 1
    """Most restarts of a trial whose worker died, and of a failed baseline; >= 0."""
    repeats: bool = True
    """Whether training repeats bit for bit, so that the baseline's run predicts other trials exactly."""
    sampler: str = AUTO
    """Name of the sampler (`study_searcher.make_sampler`); with ``auto`` outcomes are chosen where they are known."""
    lengths: str = ""
    """Dense runs that are cut and searched, too: ``auto`` or shares (`RunLengths`); empty for none."""
    holds: Mapping[int, float] | None = None
    """Probabilities that a search before wrote (`StudyInfo.holds`)."""
    grid: GridPoints | None = None
    """Points to train instead of sampled settings."""

    @property
    def learns(self) -> bool:
        """Return whether the search uses what the baseline's run shows."""
        return self.sampler == AUTO
