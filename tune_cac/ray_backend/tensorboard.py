"""TensorBoard logger that writes one event per result row, under the metric's own name.

Ray's own writes one per number and flushes after each row, 5 ms: 30 rows cost more than a trial that the stage tree
answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray.tune.logger import TBXLoggerCallback
from tensorboardX.proto.summary_pb2 import Summary

from trainables.metrics import metrics_of, named_row
from trainables.quality import ACCURACY, Quality, quality_in


class RowEvents(TBXLoggerCallback):
    """Ray's TensorBoard logger with one event per row; hyperparameters are written at a trial's end as in Ray's."""

    def log_trial_result(self, iteration: int, trial: Any, result: Mapping[str, Any]) -> None:
        """Write a row."""
        if trial not in self._trial_writer:
            self.log_trial_start(trial)
        self._trial_result[trial] = values = scalars(result, quality_in(trial.config.get("config", {})))
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._trial_writer[trial].file_writer.add_summary(summary, int(result["training_iteration"]))


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
