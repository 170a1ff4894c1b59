"""One training to its end, in this process."""

from __future__ import annotations

from typing import Any

from trainables.config import TrialConfig
from trainables.training.run import TrainingRun


def last_row(config: TrialConfig) -> dict[str, Any]:
    """Return the last row of a training."""
    with TrainingRun(config) as training:
        while not training.finished:
            row = training.train_epoch()
    return row
