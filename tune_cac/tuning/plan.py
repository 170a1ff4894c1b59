"""The plan of a study's search: what is searched, on which run, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from search_spaces import Space, SpaceContext
from search_spaces.grid import GridPoints
from trainables.config import TrialConfig
from tune_cac.study.fixed_params import AUTO


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Everything that a search of a study is given once; the searcher and its parts read it."""

    space: Space
    context: SpaceContext  # facts on the run that the space is searched on
    base: TrialConfig  # config of the baseline; spaces override its fields
    journal: Path  # the Optuna journal file
    allowed_drop: float | str  # drop of the metric that is allowed (`trainables.quality`)
    seeds: int = 1  # seeds on which what would be the answer is trained at most, the study's own among them
    seed: int  # seed of the sampler
    run_folder: str  # folder of the Ray experiment, relative to the study, for the record
    checkpoint_every_s: float  # seconds between checkpoints of a trial
    trial_timeout_s: float | None = None  # seconds without a row after which a trial's process is ended
    hold: Mapping[str, Any] = field(default_factory=dict)  # fields fixed in every trial but the baseline
    tree: Path | str  # the study's ``tree`` folder, or its URI where the study is in object storage
    sharing: bool = True  # True if trials share training; signals of dense runs are recorded either way
    budget_bytes: int  # most bytes of checkpoints
    trials: int  # number of trials planned for the study
    worker_resources: Mapping[str, float] | None = None  # Ray's, of each worker of a trial; None for one process
    retries: int = 1  # most restarts of a trial whose worker died; >= 0
    repeats: bool = True  # True if training repeats bit for bit, so that the baseline's run predicts others exactly
    sampler: str = AUTO  # of `candidates.make_sampler`; with ``auto`` outcomes are chosen where they are known
    lengths: str = ""  # dense runs that are cut and searched, too: ``auto`` or shares (`RunLengths`); empty for none
    most_trainings: float = inf  # executed, from which on no setting follows one that was refused over further seeds
    grid: GridPoints | None = None  # points to train instead of sampled settings

    @property
    def learns(self) -> bool:
        """Return whether the search uses what the baseline's run shows."""
        return self.sampler == AUTO
