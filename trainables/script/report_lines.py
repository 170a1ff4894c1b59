"""Reports of a script, printed or put into the trial's file: one JSON object per line.

A line is a report if it is a JSON object with the study's metric, such as ``accuracy``, or with the marker ``tune_cac``
(its value is ignored) where that is not known yet. Anything else that a script prints is ignored.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import sys
from typing import Any

from trainables.errors import UserError
from trainables.gradskip.script_counting.trace_file import TRIAL_FOLDER

#: Keys whose values are numbers, in the order in which they are written.
NUMBERS = (
    "accuracy", "step", "epoch", "loss", "train_loss", "test_accuracy", "compute_saved", "executed_flops",
    "dense_flops", "train_time_s",
)  # fmt: skip
#: Keys of what was computed, for which NaN and infinity are errors.
COUNTS = ("step", "epoch", "executed_flops", "dense_flops", "compute_saved")
#: The key whose value is a JSON object: what the gradient-skip optimizers have counted.
COUNTED = "gradskip"
MARKER = "tune_cac"
#: The file of a trial into which `tune_cac.report` puts its lines.
REPORTS_FILE = "reports.jsonl"
#: Errors of what has no ``item()``, such as a text, or several items, such as an array.
_NO_SCALAR = (AttributeError, TypeError, ValueError, RuntimeError)


#: How a search is told of the metric by which a trainer chooses checkpoints.
_BY_METRIC = "search with --metric {} --direction {}"
_NAMED = re.compile(_BY_METRIC.format(r"(\S+)", "(max|min)"))


def by_metric(name: str, direction: str) -> str:
    """Return the words with which a script's error asks for a metric; `asked_metric` reads them."""
    return _BY_METRIC.format(name, direction)


def asked_metric(error: str) -> dict[str, str]:
    """Return the options that a script's error asks for; empty for another error.

    >>> asked_metric(f"the search compares by accuracy: {by_metric('f1', 'max')}")
    {'metric': 'f1', 'direction': 'max'}
    """
    found = _NAMED.search(error)
    return {} if found is None else {"metric": found[1], "direction": found[2]}


class ReportError(UserError):
    """A report with a value of the wrong kind."""


def read_report(line: str, metric: str = "accuracy") -> dict[str, Any] | None:
    """Return what a line reports; None if it is not a report with the study's metric.

    The keys of `NUMBERS` and `COUNTED` are at the top level, all others under ``extra``, which is omitted if empty.
    ReportError: a value of the report is of the wrong kind.

    >>> read_report('{"accuracy": 0.91, "step": 200, "lr": 0.1}')
    {'accuracy': 0.91, 'step': 200, 'extra': {'lr': 0.1}}
    """
    text = line.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if metric not in values and MARKER not in values:
        return None
    _check(values, metric)
    report = {key: values[key] for key in (*NUMBERS, COUNTED) if key in values}
    extra = {key: value for key, value in values.items() if key not in report and key != MARKER}
    return {**report, "extra": extra} if extra else report


def format_report(**values: Any) -> str:
    """Return the line that reports these values, scalars of NumPy and torch among them; `read_report` reads them back.

    ReportError: a value is of the wrong kind, or cannot be written as JSON.
    """
    values = {key: _plain(value) for key, value in values.items() if key != MARKER}
    _check(values)
    ordered = {} if "accuracy" in values else {MARKER: 1}
    ordered |= {key: values[key] for key in (*NUMBERS, COUNTED) if key in values} | values
    for key, value in ordered.items():
        try:
            json.dumps(value, default=_item)
        except _NO_SCALAR:
            raise ReportError(f"{key} must be a value that JSON can hold, got {_shown(value)}") from None
    return json.dumps(ordered, default=_item)


def _check(values: dict[str, Any], metric: str = "accuracy") -> None:
    for key in (*NUMBERS, metric, f"test_{metric}"):
        if key in values and (isinstance(values[key], bool) or not isinstance(values[key], int | float)):
            raise ReportError(f"{key} must be a number, got {_shown(values[key])}")
    for key in COUNTS:
        if key in values and not -math.inf < values[key] < math.inf:
            raise ReportError(f"{key} must be a finite number, got {_shown(values[key])}")
    if not isinstance(values.get(COUNTED, {}), dict):
        raise ReportError(f"{COUNTED} must be an object, got {_shown(values[COUNTED])}")


def _item(value: Any) -> Any:
    return value.item()


def _plain(value: Any) -> Any:
    """Return the Python number of a scalar with ``item()``; anything else unchanged."""
    try:
        return _item(value)
    except _NO_SCALAR:
        return value


def _shown(value: Any) -> str:
    short = reprlib.Repr()  # also of values that are nested too deep for `repr`
    short.maxstring = short.maxother = 60
    return " ".join(short.repr(value).split())


def report(*, accuracy: Any = None, step: Any = None, **metrics: Any) -> None:
    """Report metrics of the training to a search; outside of a search it prints the same line.

    In a search the line goes into a file of the trial, so that nothing else that is printed can spoil it.

    The report includes what the gradient-skip optimizers have counted. Of several processes that train together
    (torch.distributed, or a launcher that sets RANK and WORLD_SIZE) only the first one reports, for all: its FLOPs and
    bytes times the number of processes, whose shares of the data are equal.

    Args:
        accuracy: higher is better, 1 at most; on data that is not used for training. A search of another metric
            (``--metric val_loss``) needs that one instead: ``report(val_loss=...)``.
        step: optimizer steps so far, where no gradient-skip optimizer counts them.
        metrics: any other metrics, numbers; of a meaning of their own: ``loss``, ``epoch``, ``test_accuracy`` (read
            once, at the end), ``train_time_s``, ``compute_saved`` or ``executed_flops`` where no gradient-skip
            optimizer counts them.
    """
    rank, processes = _rank_and_processes()
    if rank != 0:
        return
    values = {k: v for k, v in {"accuracy": accuracy, "step": step}.items() if v is not None} | metrics
    if "trainables.gradskip.script_counting.process_record" in sys.modules:
        from trainables.gradskip.script_counting.process_record import process_summary

        counted = process_summary(processes)
        if counted is not None:
            values[COUNTED] = counted
    line = format_report(**values)
    print(f"tune_cac.report: {line}" if _put_in_file(line) else line, flush=True)


def _put_in_file(line: str) -> bool:
    """Append a line to the trial's file of reports; return whether there is one."""
    folder = os.environ.get(TRIAL_FOLDER)
    if not folder:
        return False
    try:
        file = os.open(os.path.join(folder, REPORTS_FILE), os.O_WRONLY | os.O_APPEND)  # never made here
        with os.fdopen(file, "wb", buffering=0) as reports:
            data = f"{line}\n".encode()
            return reports.write(data) == len(data)
    except OSError:
        return False


def _rank_and_processes() -> tuple[int, int]:
    """Return this process's rank and the number of processes that train together, as torch or the launcher says."""
    if "torch" in sys.modules:
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # torchrun's and accelerate's, before the process group is made and after it is destroyed
    rank, processes = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(processes)) if rank.isdigit() and processes.isdigit() else (0, 1)
