"""Reader of Optuna's journal file, without Optuna: the present state of each trial of a search.

A journal is a log of JSON lines, one per operation (``optuna.storages.journal``); a trial's id is the number of trials
created before it in the file. Optuna's own reader fails at the first damaged line, and replays parameters and
distributions, too. This one keeps only what the analysis needs, writes nothing, takes no lock, and skips damaged lines.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.io.study_files import STUDY_NAME
from trainables.errors import UserError

#: Codes of the operations that are read (optuna.storages.journal._storage.JournalOperation).
_CREATE_STUDY, _CREATE_TRIAL, _TRIAL_STATE, _TRIAL_USER_ATTR = 0, 4, 6, 8
#: Optuna's states by their number.
_STATES = ("RUNNING", "COMPLETE", "PRUNED", "FAIL", "WAITING")
_FINISHED = ("COMPLETE", "PRUNED", "FAIL")
#: First bytes of every line of Optuna. Inside a string the quotes would be escaped, so this is always a line start.
_LINE_BEGIN = b'{"op_code":'


#: A line that does not even tell what it was.
_UNKNOWN: dict[str, Any] = {}


@dataclass(kw_only=True)
class JournalTrial:
    """State of one trial at the end of the journal."""

    number: int = 0  # number within its study, from 0
    state: str = "RUNNING"  # Optuna's state: RUNNING, COMPLETE, PRUNED, FAIL or WAITING
    user_attrs: dict[str, Any] = field(default_factory=dict)  # user attributes that the search wrote
    values: list[float] | None = None  # objectives, where reported to Optuna


def read_study(path: Path) -> list[JournalTrial]:
    """Return the trials of the study that a search wrote, by number.

    Damaged lines are left out with one warning that names them, but for an incomplete last one, which may be being
    written. Where an append after an incomplete line joined two lines, the second is read. A trial whose creation was
    lost is kept with what later lines say of it, so that the trials after it keep their numbers. UserError: the file
    does not exist or cannot be read, or holds no study of a search; or a damaged line does not even tell what it was,
    so that it may have created a trial.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"the study has no journal ({path}): its search never began; delete the folder and search anew"
        ) from None
    except OSError as error:
        raise UserError(f"the journal {path} cannot be read: {error.strerror}") from None
    studies: list[str] = []
    trials: list[tuple[str, JournalTrial]] = []  # by id, over all studies
    damaged: list[int] = []
    for number, line in enumerate(content[: _torn_end(content)].splitlines(), start=1):
        for operation in _operations(line):
            if operation == _UNKNOWN:
                raise UserError(
                    f"the journal {path} is damaged: nothing tells what its line {number} was; restore it from a "
                    "copy, or read trials.parquet and ranking.csv beside it"
                )
            if "damaged" in operation:
                damaged.append(number)
                if operation["op_code"] == _CREATE_STUDY:
                    studies.append(STUDY_NAME)
                elif operation["op_code"] == _CREATE_TRIAL:
                    trials.append((studies[-1], JournalTrial()))
            elif not _apply(operation, studies, trials):
                damaged.append(number)
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        warnings.warn(f"{path}: damaged and left out: line{'s' if len(damaged) > 1 else ''} {shown}", stacklevel=2)
    if STUDY_NAME not in studies:
        raise UserError(
            f"the journal {path} holds no study of a search of tune_cac (named {STUDY_NAME}): its search never began, "
            "or it is of another program, for optuna.load_study"
        )
    found = [trial for study, trial in trials if study == STUDY_NAME]
    for number, trial in enumerate(found):
        trial.number = number
    return found


def torn_end(path: Path) -> int | None:
    """Return the byte offset of the last line of a journal if that line is incomplete; else None.

    Optuna skips an incomplete last line, but appends to it, and then can no longer read the journal. Truncate the file
    at this offset before writing to it, while no other process writes.
    """
    return _torn_end(path.read_bytes())


def _torn_end(content: bytes) -> int | None:
    return None if not content or content.endswith(b"\n") else content.rfind(b"\n") + 1


def _operations(line: bytes) -> Iterator[dict[str, Any]]:
    """Yield the operations of a line; of one that cannot be read, what it created."""
    if not line.strip():
        return
    try:
        found = json.loads(line)
        yield found if isinstance(found, dict) else _UNKNOWN
        return
    except ValueError:
        code = line.removeprefix(_LINE_BEGIN).partition(b",")[0]
        yield {"op_code": int(code), "damaged": True} if line.startswith(_LINE_BEGIN) and code.isdigit() else _UNKNOWN
    second = line.rfind(_LINE_BEGIN)
    if second > 0:
        with suppress(ValueError):
            yield json.loads(line[second:])


def _apply(operation: dict[str, Any], studies: list[str], trials: list[tuple[str, JournalTrial]]) -> bool:
    """Apply an operation by Optuna's rules; return False for one that is malformed."""
    try:
        code = operation["op_code"]
        if code == _CREATE_STUDY:
            name = operation["study_name"]
            studies += [name] if name not in studies else []
        elif code == _CREATE_TRIAL:
            single = operation.get("value")  # Optuna's form of a single objective
            trial = JournalTrial(
                state=_STATES[operation.get("state", 0)],
                user_attrs=dict(operation.get("user_attrs", {})),
                values=operation.get("values") if single is None else [single],
            )
            trials.append((studies[operation["study_id"]], trial))
        elif code in (_TRIAL_STATE, _TRIAL_USER_ATTR):
            trial = trials[operation["trial_id"]][1]
            if trial.state in _FINISHED:
                return True  # Optuna allows no changes to a finished trial
            if code == _TRIAL_USER_ATTR:
                trial.user_attrs.update(operation["user_attr"])
            else:
                trial.state = _STATES[operation["state"]]
                trial.values = trial.values if operation["values"] is None else operation["values"]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError):
        return False
    return True
