"""Every file name of a study folder, in one place. Also what `study.json` says."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainables.errors import UserError
from trainables.registry import SCRIPT

#: The name of the study inside the journal.
STUDY_NAME = "tune_cac"
#: Raised when the meaning of `study.json` changes.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StudyInfo:
    """What a study searches; equal for every search that adds to it, except `trials` and `allowed_drop`."""

    space: str
    """Search space."""
    workload: str
    """Workload."""
    epochs: int
    """Epochs a trial."""
    seed: int
    """Seed of the trials and of the sampler."""
    trials: int
    """Trials asked for so far, the baseline among them."""
    allowed_drop: float
    """Accuracy that may be lost, as a fraction."""
    versions: dict[str, str]
    """Versions of the packages that ran it."""
    hold: dict[str, Any] = field(default_factory=dict)
    """Fields of the config with one value in every trial but the baseline, in plain types."""
    sharing: bool = True
    """Whether its trials share training; a resumed search goes on as it was."""
    fresh_processes: bool = False
    """Whether every trial had a process of its own, because training there does not repeat."""
    controls: bool = False
    """Whether shorter trainings and random stops are trained beside its trials."""
    candidates: list[int] = field(default_factory=list)
    """Of a confirmation: numbers of the trials that were picked, over all its calls; empty for a search."""
    gpus_per_trial: float = 0.0
    """GPUs that a trial had."""
    workload_options: list[str] = field(default_factory=list)
    """The workload's options, texts NAME=VALUE."""
    workers_per_trial: int = 1
    """Processes that trained a trial data-parallel."""
    method: str = "gradskip"
    """The method of its space."""
    saving: str = "training"
    """Compute that its trials are ranked by: training, inference or both."""
    why_little: str = ""
    """Why settings of the space do nothing or little on its run; empty where that is not known."""
    script_epochs: int | None = None
    """Epochs that a script's baseline reported, where the command is not told how many; None until it has ended."""
    format: int = FORMAT
    """Version of this file."""

    @property
    def length_text(self) -> str:
        """Epochs a trial in words; a script's are its own."""
        if self.workload != SCRIPT:
            return f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"
        if self.script_epochs is None:
            return "the script's own epochs"
        return f"{self.script_epochs} epoch{'' if self.script_epochs == 1 else 's'} of the script"


@dataclass(frozen=True)
class Layout:
    """The files under one study folder."""

    root: Path
    """The folder."""

    @property
    def info(self) -> Path:
        """What the study searches."""
        return self.root / "study.json"

    @property
    def journal(self) -> Path:
        """The Optuna study."""
        return self.root / "optuna.journal"

    @property
    def lock(self) -> Path:
        """Held by the search that is running."""
        return self.root / "search.lock"

    @property
    def ray(self) -> Path:
        """Ray experiments, one a search command: ``run-000``, ``run-001``, ..."""
        return self.root / "ray"

    @property
    def tree(self) -> Path:
        """Shared training: a folder a root, and checkpoints."""
        return self.root / "tree"

    @property
    def tree_picture(self) -> Path:
        """The stage tree, to look at."""
        return self.root / "tree.svg"

    @property
    def confirmation(self) -> Layout:
        """The runs that confirm its best settings, a study of their own."""
        return Layout(self.root / "confirmation")

    @property
    def trials(self) -> Path:
        """One row a trial."""
        return self.root / "trials.parquet"

    @property
    def ranking(self) -> Path:
        """The ranked table."""
        return self.root / "ranking.csv"

    @property
    def best(self) -> Path:
        """The answer, to source."""
        return self.root / "best.env"

    @property
    def best_schedule(self) -> Path:
        """The answer's compression schedule, where it compresses."""
        return self.root / "best.yaml"

    @property
    def report(self) -> Path:
        """The answer, to read."""
        return self.root / "report.md"

    @property
    def page(self) -> Path:
        """The answer, to look at."""
        return self.root / "report.html"

    def read_info(self) -> StudyInfo:
        """What the study searches.

        Raises:
            UserError: no study there, or one that this version cannot read.
        """
        try:
            values: dict[str, Any] = json.loads(self.info.read_text())
        except FileNotFoundError:
            raise UserError(
                f"no study in {self.root}: give the folder that a search wrote (it holds {self.info.name})"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.info} cannot be read: {error}") from None
        if values.get("format") != FORMAT:
            raise UserError(f"{self.info} has format {values.get('format')}, this version reads {FORMAT}")
        return StudyInfo(**values)

    def write_info(self, info: StudyInfo) -> None:
        """Write `study.json` atomically."""
        part = self.info.with_suffix(".part")
        part.write_text(json.dumps(asdict(info), indent=2) + "\n")
        part.replace(self.info)
