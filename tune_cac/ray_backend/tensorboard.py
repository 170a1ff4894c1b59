"""TensorBoard logger that writes one event per result row, without syncing it to the disk.

Ray's own logger writes one event per number, through the queue of another thread: a row of 22 numbers costs the search
5 ms, and 30 rows cost more than a trial that the stage tree answers.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from typing import Any

from ray.tune.logger import TBXLoggerCallback
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from trainables.metrics import metrics_of, named_row
from trainables.quality import ACCURACY, Quality, quality_in


class EventFile(RecordWriter):
    """Event file with the methods that Ray's logger calls on a writer."""

    def __init__(self, folder: str, **_: Any) -> None:
        super().__init__(f"{folder}/events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}")
        self.file_writer = self
        """Writer to which Ray's logger writes hyperparameters."""
        self.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add_summary(self, summary: Any, step: int = 0) -> None:
        """Write a summary."""
        self.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())

    def flush(self) -> None:
        """Flush the file for readers, without syncing it."""
        self._writer.flush()


class RowEvents(TBXLoggerCallback):
    """Ray's TensorBoard logger with one event per row; hyperparameters are written at a trial's end as in Ray's."""

    def __init__(self) -> None:
        super().__init__()
        self._summary_writer_cls = EventFile

    def log_trial_result(self, iteration: int, trial: Any, result: Mapping[str, Any]) -> None:
        """Write a row."""
        if trial not in self._trial_writer:
            self.log_trial_start(trial)
        config = getattr(trial, "config", None)
        values = scalars(result, quality_in(config.get("config", {}) if isinstance(config, Mapping) else {}))
        self._trial_result[trial] = values
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._trial_writer[trial].add_summary(summary, int(result["training_iteration"]))
        self._trial_writer[trial].flush()


def scalars(result: Mapping[str, Any], quality: Quality = ACCURACY) -> dict[str, float]:
    """Return the numbers of a row by tag, without missing and non-finite ones; the metric has its own name.

    >>> scalars({"accuracy": 0.5, "test_accuracy": None, "stage": "x", "step": 3})
    {'ray/tune/step': 3.0, 'ray/tune/accuracy': 0.5}
    """
    named = named_row(result, quality)
    columns = [name for name, metric in metrics_of(quality).items() if metric.dtype != "string"]
    values = {f"ray/tune/{name}": named.get(name) for name in columns}
    return {
        tag: float(value) for tag, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)
    }
