"""All file names of a study folder, and the contents of `study.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from analysis.io.study_options import StudyOptions
from trainables.errors import UserError
from trainables.quality import DEFAULT_DROP
from trainables.registry import SCRIPT
from trainables.savings import TRAINING
from trainables.storage import atomic_write, joined

#: Name of the study inside the journal.
STUDY_NAME = "tune_cac"
#: Version number, increased when the meaning of `study.json` changes.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StudyInfo(StudyOptions):
    """Settings of a study: its options, where `trials` counts all that were asked for so far, and what it found."""

    epochs: int
    """Epochs of each trial."""
    trials: int = 0
    """Trials that were asked for so far."""
    grid: Mapping[str, Any] | None = None
    """Points of its grid file: ``settings``, one map a point, and ``unnamed``; None for a space."""
    controls: bool = False  # of a study that has not recorded it
    """True if controls (cut dense runs) are trained in addition to its trials."""
    seeds: int | None = 1  # of a study that has not recorded it
    """Seeds on which its answer is trained at most."""
    lengths: str = "1.0"  # of a study that has not recorded it
    """Shares of the run that dense runs are cut to and searched, too; auto where the search chooses them."""
    sharing: bool = True
    """True if its trials share training; a resumed search keeps this."""
    hold: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that are fixed in every trial but the baseline, in plain types."""
    allowed_drop: float | str = DEFAULT_DROP
    """Drop of the metric that its search allowed (`trainables.quality`)."""
    saving: str = TRAINING
    """Compute by which its trials are ranked: training, inference or both."""
    versions: dict[str, str]
    """Versions of the packages that ran it."""
    candidates: list[int] = field(default_factory=list)
    """For a confirmation, the numbers of the selected trials over all its calls; empty for a search."""
    looks: list[list[int]] = field(default_factory=list)
    """For a confirmation, the numbers of seeds at which each of its calls looks at its results as the first."""
    method: str = "gradskip"
    """Method of its space."""
    why_little: str = ""
    """Reason why settings of the space have little or no effect on its run; empty where not known."""
    answer: Mapping[str, Any] | None = None
    """Numbers of its answer (`summary_text.Answer`); None where there is none."""
    interrupted: bool = False
    """True if its search was interrupted before it ended."""
    storage: str = ""
    """URI of the study in object storage, where its trials share training; empty: all of it is in its folder."""
    script_epochs: int | None = None
    """Epochs of a script's command, or that its baseline reported where it gives no number; None until that ended."""
    format: int = FORMAT
    """Version of this file."""

    @property
    def length_text(self) -> str:
        """Return the epochs of each trial in words; for a script, those that it was given or reported."""
        if self.workload != SCRIPT:
            return f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"
        if self.script_epochs is None:
            return "the script's own epochs"
        return f"{self.script_epochs} epoch{'' if self.script_epochs == 1 else 's'} of the script"


class _File:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: Layout, owner: type[Layout]) -> Path:
        return layout.root / self._name


#: What loggers of experiments write into a study's folder (`search --log`).
LOGS = ("mlflow.db", "mlflow.db-shm", "mlflow.db-wal", "mlruns", "mlartifacts", "wandb")


@dataclass(frozen=True)
class Layout:
    """Paths of the files in one study folder."""

    root: Path  # the study folder

    info = _File("study.json")  # settings of the study
    journal = _File("optuna.journal")  # Optuna's journal
    lock = _File("search.lock")  # lock that a running search holds
    ray = _File("ray")  # folder of the Ray experiments, one per search command: ``run-000``, ``run-001``, ...
    tree = _File("tree")  # folder of the shared training: one folder per root, and checkpoints
    trials = _File("trials.parquet")  # table of trials, one row per trial
    ranking = _File("ranking.csv")  # ranked table
    best = _File("best.env")  # best settings as a shell file to source
    best_schedule = _File("best.yaml")  # compression schedule of the best settings, written where they compress
    report = _File("report.md")  # report in Markdown
    page = _File("report.html")  # report in HTML

    def foreign(self) -> list[str]:
        """Return the names of what is in the folder and is no file of a study or of its loggers, nor hidden."""
        own = {one._name for one in vars(Layout).values() if isinstance(one, _File)} | {self.confirmation.root.name}
        own |= set(LOGS)
        return sorted(one.name for one in self.root.iterdir() if one.name not in own and not one.name.startswith("."))

    @property
    def shared_tree(self) -> Path | str:
        """Return the place of the shared training: `tree`, or its URI for a study in object storage."""
        storage = self.read_info().storage
        return joined(storage, self.tree.name) if storage else self.tree

    @property
    def confirmation(self) -> Layout:
        """Return the layout of the confirmation of its best settings, a study of its own."""
        return Layout(self.root / "confirmation")

    def read_info(self) -> StudyInfo:
        """Read the settings of the study. UserError: there is no study, or this version cannot read it."""
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
        if isinstance(looks := values.get("looks"), int):  # of earlier versions, which counted those of one call
            values["looks"] = [[0] * looks] if looks > 1 else []
        known = {field.name for field in fields(StudyInfo)}  # options of earlier versions that are gone are left out
        return StudyInfo(**{name: value for name, value in values.items() if name in known})

    def write_info(self, info: StudyInfo) -> None:
        """Write `study.json` atomically."""
        with atomic_write(self.info) as file:
            file.write(f"{json.dumps(asdict(info), indent=2)}\n".encode())
