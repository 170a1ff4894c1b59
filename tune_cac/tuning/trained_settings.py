"""Settings that a study has trained, or that need no training, so that none is trained again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from optuna.trial import TrialState

from tune_cac.tuning.study_trials import StudyTrials


class TrainedSettings:
    """Follow a study; what it costs is what has changed since the last call.

    A setting that failed in an earlier search is not known: what was wrong may have been mended.

    Args:
        trials: of the study.
    """

    def __init__(self, trials: StudyTrials) -> None:
        self._trials = trials
        self._known: set[bytes] = set()
        self._open: dict[int, bytes] = {}  # of trials that have not ended, by their numbers; empty without a setting
        self._seen = 0
        self._failures_count = False
        self.follow()
        self._failures_count = True  # from here on

    def follow(self) -> bool:
        """Add what the study has begun and ended since the last call; return whether that is anything."""
        known = self._trials.all()
        changed = False
        for number in (*self._open, *range(self._seen, len(known))):
            state, attrs = known[number].state, known[number].user_attrs
            if not state.is_finished():
                changed |= number not in self._open
                if not self._open.get(number):  # its setting is written after it began
                    self._open[number] = _digest(attrs["config"]) if "config" in attrs else b""
                continue
            changed = True
            self._open.pop(number, None)
            ended = state == TrialState.COMPLETE or (self._failures_count and "continued_by" not in attrs)
            if ended and "config" in attrs:
                self._known.add(_digest(attrs["config"]))
        self._seen = len(known)
        return changed

    def leave_out(self, config: Mapping[str, Any]) -> None:
        """Take a configuration for known that need not be trained."""
        self._known.add(_digest(config))

    def have(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration is known, or is being trained, as of the last `follow`."""
        digest = _digest(config)
        return digest in self._known or digest in self._open.values()


def _digest(config: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).digest()
