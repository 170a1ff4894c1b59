"""Settings that a study has trained or is training, so that none is trained again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from optuna.trial import TrialState

from tune_cac.tuning.study_trials import StudyTrials


class TrainedSettings:
    """Follow a study; what it costs is what has changed since the last call.

    A setting that failed is not known: what was wrong may have been mended.

    Args:
        trials: of the study.
    """

    def __init__(self, trials: StudyTrials) -> None:
        self._trials = trials
        self._completed: set[bytes] = set()
        self._open: dict[int, bytes] = {}  # of trials that have not ended, by their numbers
        self._seen = 0

    def follow(self) -> None:
        """Add what the study has begun since the last call, and drop what has failed."""
        known = self._trials.all()
        for number in (*self._open, *range(self._seen, len(known))):
            state, config = known[number].state, known[number].user_attrs.get("config")
            self._open.pop(number, None)
            if state == TrialState.COMPLETE and config is not None:
                self._completed.add(_digest(config))
            elif not state.is_finished():
                self._open[number] = _digest(config or {})
        self._seen = len(known)

    def have(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration has completed, or is being trained, as of the last `follow`."""
        digest = _digest(config)
        return digest in self._completed or digest in self._open.values()


def _digest(config: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).digest()
