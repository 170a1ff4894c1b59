"""TensorBoard logger that writes one event per result row.

Ray's own logger writes one event per number, through the queue of another thread: a row of 22 numbers costs the search
5 ms, and 30 rows cost more than a trial that the stage tree answers. Rows are not synced to the disk either (1.4 ms
each): only the study's journal must survive a crash of the machine.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.tune.logger import TBXLoggerCallback
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from trainables.metrics import metrics_of, named_row
from trainables.quality import ACCURACY, Quality, quality_in

#: Numeric columns, with Ray's own names for its scalars.


class EventFile:
    """Event file with the methods that Ray's logger calls on a writer.

    Args:
        folder: where the file is created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
        self._file = (folder / name).open("wb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.file_writer = self
        """Writer to which Ray's logger writes hyperparameters."""

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of one step, by tag."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def add_summary(self, summary: Any) -> None:
        """Write any other summary."""
        self._write(Event(wall_time=time.time(), summary=summary))

    def _write(self, event: Event) -> None:
        """Write one record: its length and contents, each with a checksum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._file.write(b"".join((length, checks[0], data, checks[1])))

    def flush(self) -> None:
        """Flush the file for readers."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RowEvents(TBXLoggerCallback):
    """Ray's TensorBoard logger with one event per row; hyperparameters are written at a trial's end as in Ray's."""

    def __init__(self) -> None:
        self._trial_writer: dict[Any, EventFile] = {}
        self._trial_result: dict[Any, dict[str, float]] = {}

    def log_trial_start(self, trial: Any) -> None:
        """Open an event file for the trial, and close an earlier one."""
        if trial in self._trial_writer:
            self._trial_writer[trial].close()
        trial.init_local_path()
        self._trial_writer[trial] = EventFile(Path(trial.local_path))
        self._trial_result[trial] = {}

    def log_trial_result(self, iteration: int, trial: Any, result: Mapping[str, Any]) -> None:
        """Write a row."""
        if trial not in self._trial_writer:
            self.log_trial_start(trial)
        values = scalars(result, _quality_of(trial))
        self._trial_result[trial] = values
        self._trial_writer[trial].add_scalars(values, int(result["training_iteration"]))
        self._trial_writer[trial].flush()


def _quality_of(trial: Any) -> Quality:
    """Return the metric of a Ray trial of ours."""
    config = trial.config.get("config", {}) if isinstance(getattr(trial, "config", None), Mapping) else {}
    return quality_in(config)


def scalars(result: Mapping[str, Any], quality: Quality = ACCURACY) -> dict[str, float]:
    """Return the numbers of a row by tag, without missing and non-finite ones; the metric has its own name.

    >>> scalars({"accuracy": 0.5, "test_accuracy": None, "stage": "x", "step": 3})
    {'ray/tune/step': 3.0, 'ray/tune/accuracy': 0.5}
    """
    found = {}
    named = named_row(result, quality)
    for name in (column for column, metric in metrics_of(quality).items() if metric.dtype != "string"):
        value, tag = named.get(name), f"ray/tune/{name}"
        if isinstance(value, (int, float)) and math.isfinite(value):
            found[tag] = float(value)
    return found
