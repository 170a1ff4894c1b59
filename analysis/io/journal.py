"""Optuna's journal file, read without Optuna: what each trial of each study is now.

A journal is a log of JSON lines, one an operation (``optuna.storages.journal``); a trial's id is the count of trials
created before it in the file. Optuna's own reader gives up at the first damaged line, and takes more than twice as long
(benchmarks/load_speed.py), as it replays parameters and distributions, too. This one keeps what analysis asks for,
writes nothing, takes no lock, and reads past damage.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from analysis.io.layout import STUDY_NAME
from trainables.errors import UserError

#: Codes of the operations that matter here (optuna.storages.journal._storage.JournalOperation).
_CREATE_STUDY, _DELETE_STUDY, _STUDY_SYSTEM_ATTR = 0, 1, 3
_CREATE_TRIAL, _TRIAL_PARAM, _TRIAL_STATE, _TRIAL_USER_ATTR = 4, 5, 6, 8
#: Optuna's states by their number.
_STATES = ("RUNNING", "COMPLETE", "PRUNED", "FAIL", "WAITING")
_FINISHED = ("COMPLETE", "PRUNED", "FAIL")
#: How Optuna begins every line. Inside a string its quotes would be escaped, so it begins nothing else.
_LINE_BEGIN = b'{"op_code":'


@dataclass(kw_only=True)
class JournalTrial:
    """One trial as the journal leaves it."""

    number: int
    """Within its study, from 0."""
    state: str = "RUNNING"
    """Optuna's: RUNNING, COMPLETE, PRUNED, FAIL or WAITING."""
    user_attrs: dict[str, Any] = field(default_factory=dict)
    """What the search wrote about it."""
    values: list[float] | None = None
    """Objectives, where it was told."""
    stored_params: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Suggested values by name, as Optuna stores them: internal form and the distribution as JSON."""

    def params(self) -> dict[str, Any]:
        """Return what was suggested, by name, in the values that the objective saw."""
        return {name: _external(distribution, value) for name, (value, distribution) in self.stored_params.items()}


@dataclass(kw_only=True)
class JournalStudy:
    """One study of a journal."""

    name: str
    """Its name."""
    metric_names: tuple[str, ...] = ()
    """Names of the objectives, where they were set."""
    trials: list[JournalTrial] = field(default_factory=list)
    """By number."""


def read_studies(path: Path) -> list[JournalStudy]:
    """The studies of a journal, in the order of their creation.

    Damaged lines are left out with one warning that names them. Of two lines run together, as an append after a torn
    one leaves them, the second is read. A trial whose creation was lost counts as one of which only what was said later
    is known, so that those behind it keep their numbers.

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
            if operation is None:
                replay.lost += 1
            if operation is None or not replay.apply(operation):
                damaged.append(number)
    if damaged:
        warnings.warn(f"{path}: {_numbered(damaged)}", stacklevel=2)
    return list(replay.studies.values())


def choose_study(studies: list[JournalStudy], path: Path) -> JournalStudy:
    """The one that a search wrote, or the only one there is.

    Raises:
        UserError: there is none, or several of other names.
    """
    for study in studies:
        if study.name == STUDY_NAME or len(studies) == 1:
            return study
    if not studies:
        raise UserError(f"the journal {path} holds no study: its search never began; delete the folder")
    names = ", ".join(study.name for study in studies)
    raise UserError(
        f"a journal must hold one study or one named {STUDY_NAME}, {path} holds {names}: "
        "copy one with optuna.copy_study"
    )


def torn_end(path: Path) -> int | None:
    """Where the last line of a journal begins, in bytes, if it was not written to its end; else None.

    Optuna reads past such a line, but appends to it, and then reads the journal no more: cut the file there before
    it is written to, while nobody else does.
    """
    content = path.read_bytes()
    return None if not content or content.endswith(b"\n") else content.rfind(b"\n") + 1


def _operations(line: bytes, *, last: bool) -> Iterator[dict[str, Any] | None]:
    """The operations of a line; None stands for one that cannot be read."""
    if not line.strip():
        return
    try:
        yield json.loads(line)
        return
    except ValueError:
        yield None
    # A trial that was created here took a number, unless nothing came after it.
    if line.startswith(_LINE_BEGIN + b"%d," % _CREATE_TRIAL) and not last:
        yield {"op_code": _CREATE_TRIAL, "study_id": None}
    second = line.rfind(_LINE_BEGIN)
    if second > 0:
        try:
            yield json.loads(line[second:])
        except ValueError:
            return


def _external(distribution: str, value: float) -> Any:
    return _distribution(distribution).to_external_repr(value)


@cache
def _distribution(text: str) -> Any:
    from optuna.distributions import json_to_distribution  # half a second, which our own studies do not need

    return json_to_distribution(text)


def _numbered(lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:5])) + (f" and {len(lines) - 5} more" if len(lines) > 5 else "")
    return f"damaged and left out: line{'' if len(lines) == 1 else 's'} {shown}"


class _Replay:
    """The state that operations add up to, by Optuna's rules."""

    def __init__(self) -> None:
        self.studies: dict[int, JournalStudy] = {}
        self.lost = 0  # lines that were not read; each may have created one study or trial
        self._created = 0  # studies so far, deleted ones among them
        self._trials: list[JournalTrial] = []  # by id, over all studies

    def apply(self, operation: Any) -> bool:
        """Whether it could be understood; one that is valid and has no effect counts."""
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
        elif code == _STUDY_SYSTEM_ATTR:
            names = operation["system_attr"].get("study:metric_names")
            if names is not None and (study := self._study(operation["study_id"])) is not None:
                study.metric_names = tuple(names)
        elif code == _CREATE_TRIAL:
            self._create_trial(operation)
        elif code in (_TRIAL_PARAM, _TRIAL_STATE, _TRIAL_USER_ATTR):
            trial = self._trial(operation["trial_id"])
            if trial.state in _FINISHED:
                return  # Optuna lets nothing change after the end
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
        """A study by its id, None for one that was deleted; the newest where the id was lost."""
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
        single = operation.get("value")  # how Optuna writes one objective
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
