"""Reader of Optuna's journal file, without Optuna: the present state of each trial of each study.

A journal is a log of JSON lines, one per operation (``optuna.storages.journal``); a trial's id is the number of trials
created before it in the file. Optuna's own reader fails at the first damaged line, and takes more than twice as long
(benchmarks/load_speed.py), as it also replays parameters and distributions. This one keeps only what the analysis
needs, writes nothing, takes no lock, and skips damaged lines.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.formatting import plural
from analysis.io.layout import STUDY_NAME
from trainables.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

#: Codes of the operations that are read (optuna.storages.journal._storage.JournalOperation).
_CREATE_STUDY, _DELETE_STUDY = 0, 1
_CREATE_TRIAL, _TRIAL_PARAM, _TRIAL_STATE, _TRIAL_USER_ATTR = 4, 5, 6, 8
#: Optuna's states by their number.
_STATES = ("RUNNING", "COMPLETE", "PRUNED", "FAIL", "WAITING")
_FINISHED = ("COMPLETE", "PRUNED", "FAIL")
#: First bytes of every line of Optuna. Inside a string the quotes would be escaped, so this is always a line start.
LINE_BEGIN = b'{"op_code":'


@dataclass(kw_only=True)
class JournalTrial:
    """State of one trial at the end of the journal."""

    number: int
    """Number within its study, from 0."""
    state: str = "RUNNING"
    """Optuna's state: RUNNING, COMPLETE, PRUNED, FAIL or WAITING."""
    user_attrs: dict[str, Any] = field(default_factory=dict)
    """User attributes that the search wrote."""
    values: list[float] | None = None
    """Objectives, where reported to Optuna."""
    stored_params: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Suggested values by name, as Optuna stores them: internal form and the distribution as JSON."""

    def params(self) -> dict[str, Any]:
        """Return the suggested values by name, as the objective received them."""
        return {name: _distribution(text).to_external_repr(value) for name, (value, text) in self.stored_params.items()}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the distributions of the suggested values by name."""
        return {name: _distribution(text) for name, (_, text) in self.stored_params.items()}


@cache
def _distribution(text: str) -> BaseDistribution:
    from optuna.distributions import json_to_distribution  # takes half a second; not needed for studies of tune_cac

    return json_to_distribution(text)


@dataclass(kw_only=True)
class JournalStudy:
    """One study of a journal."""

    name: str
    """Its name."""
    trials: list[JournalTrial] = field(default_factory=list)
    """Trials by number."""


def read_study(path: Path) -> JournalStudy:
    """Return the study that a search wrote, or the only study of the journal; see `read_studies`.

    Raises:
        UserError: the file does not exist or cannot be read, holds no study, or several and none of a search.
    """
    if not path.is_file():
        raise UserError(f"the study has no journal ({path}): its search never began; delete the folder and search anew")
    studies = {study.name: study for study in read_studies(path)}
    if not studies:
        raise UserError(f"the journal {path} holds no study: its search never began; delete the folder")
    if len(studies) > 1 and STUDY_NAME not in studies:
        raise UserError(
            f"a journal must hold one study or one named {STUDY_NAME}, {path} holds {', '.join(studies)}: "
            "copy one with optuna.copy_study"
        )
    return studies[STUDY_NAME] if len(studies) > 1 else next(iter(studies.values()))


def read_studies(path: Path) -> list[JournalStudy]:
    """Return the studies of a journal in the order of their creation.

    Damaged lines are left out with one warning that names them. Where an append after an incomplete line joined two
    lines, the second is read. A trial whose creation was lost is kept with what later lines say of it, so that the
    trials after it keep their numbers.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"the journal {path} cannot be read: {error.strerror}") from None
    replay, damaged = _Replay(), []
    for number, line in enumerate(lines, start=1):
        for operation in _operations(line, last=number == len(lines)):
            replay.lost += operation is None
            if operation is None or not replay.apply(operation):
                damaged.append(number)
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        noun = plural(len(damaged), "line").partition(" ")[2]
        warnings.warn(f"{path}: damaged and left out: {noun} {shown}", stacklevel=2)
    return list(replay.studies.values())


def torn_end(path: Path) -> int | None:
    """Return the byte offset of the last line of a journal if that line is incomplete; else None.

    Optuna skips an incomplete last line, but appends to it, and then can no longer read the journal. Truncate the file
    at this offset before writing to it, while no other process writes.
    """
    content = path.read_bytes()
    return None if not content or content.endswith(b"\n") else content.rfind(b"\n") + 1


def _operations(line: bytes, *, last: bool) -> Iterator[dict[str, Any] | None]:
    """Yield the operations of a line; None for one that cannot be read."""
    if not line.strip():
        return
    try:
        yield json.loads(line)
        return
    except ValueError:
        yield None
    # A damaged line that created a trial used up a number, unless it is the last line.
    if line.startswith(LINE_BEGIN + b"%d," % _CREATE_TRIAL) and not last:
        yield {"op_code": _CREATE_TRIAL, "study_id": None}
    second = line.rfind(LINE_BEGIN)
    if second > 0:
        try:
            yield json.loads(line[second:])
        except ValueError:
            return


class _Replay:
    """State after a sequence of operations, by Optuna's rules."""

    def __init__(self) -> None:
        self.studies: dict[int, JournalStudy] = {}
        self.lost = 0  # unreadable lines; each may have created one study or trial
        self._created = 0  # studies so far, including deleted ones
        self._trials: list[JournalTrial] = []  # by id, over all studies

    def apply(self, operation: Any) -> bool:
        """Apply one operation; return False if it is malformed. A valid one without effect returns True."""
        try:
            self._apply(operation["op_code"], operation)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):
            return False
        return True

    def _apply(self, code: int, operation: dict[str, Any]) -> None:
        if code == _CREATE_STUDY:
            self._create_study(operation["study_name"])
        elif code == _DELETE_STUDY:
            self.studies.pop(operation["study_id"], None)
        elif code == _CREATE_TRIAL:
            self._create_trial(operation)
        elif code in (_TRIAL_PARAM, _TRIAL_STATE, _TRIAL_USER_ATTR):
            trial = self._trial(operation["trial_id"])
            if trial.state in _FINISHED:
                return  # Optuna allows no changes to a finished trial
            if code == _TRIAL_USER_ATTR:
                trial.user_attrs.update(operation["user_attr"])
            elif code == _TRIAL_PARAM:
                suggested = (operation["param_value_internal"], operation["distribution"])
                trial.stored_params[operation["param_name"]] = suggested
            else:
                trial.state = _STATES[operation["state"]]
                trial.values = trial.values if operation["values"] is None else operation["values"]

    def _create_study(self, name: str) -> None:
        if name not in [study.name for study in self.studies.values()]:
            self.studies[self._created] = JournalStudy(name=name)
            self._created += 1

    def _study(self, number: int | None) -> JournalStudy | None:
        """Return a study by its id, None for a deleted one; the newest study where the id was lost."""
        if number is None:
            number = max(0, self._created - 1)
        while self._created <= number:  # its creation was lost
            self._spend_lost()
            self._create_study(STUDY_NAME if self._created == 0 else f"study {self._created}")
        return self.studies.get(number)

    def _create_trial(self, operation: dict[str, Any]) -> None:
        if operation["study_id"] is None:
            self._spend_lost()
        study = self._study(operation["study_id"])
        if study is None:
            return
        single = operation.get("value")  # Optuna's form of a single objective
        trial = JournalTrial(
            number=len(study.trials),
            state=_STATES[operation.get("state", 0)],
            user_attrs=dict(operation.get("user_attrs", {})),
            values=operation.get("values") if single is None else [single],
            stored_params={
                name: (value, operation["distributions"][name]) for name, value in operation.get("params", {}).items()
            },
        )
        study.trials.append(trial)
        self._trials.append(trial)

    def _trial(self, number: int) -> JournalTrial:
        while len(self._trials) <= number:  # its creation was lost
            before = len(self._trials)
            self._create_trial({"study_id": None})
            if len(self._trials) == before:
                raise KeyError(number)
        return self._trials[number]

    def _spend_lost(self) -> None:
        if self.lost == 0:
            raise KeyError("refers to what no line has created")
        self.lost -= 1
