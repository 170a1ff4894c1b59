"""A method that is switched on at one iteration of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables.attachment import Attached
from trainables.config import TrialConfig
from trainables.gradients.fields import settings_of


class SwitchedOn(Attached):
    """Base of the estimators in trials: before ``gradient_start_itr`` a run is plain training.

    Args:
        config: with a method of `fields.ESTIMATORS`.
    """

    def __init__(self, config: TrialConfig) -> None:
        self.settings = settings_of(config)
        self._start = int(self.settings["gradient_start_itr"])
        self._iteration = 0

    @property
    def is_on(self) -> bool:
        """Return whether the estimator gives the gradients of this step."""
        return self._iteration >= self._start

    def end_step(self) -> None:
        self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        return {"decision_state": self.decision_state(), "training_state": self.training_state()}

    def decision_state(self) -> dict[str, Any]:
        return {"iteration": self._iteration}

    def resume(self, decision_state: Mapping[str, Any], training_state: Mapping[str, Any]) -> None:
        self._iteration = int(decision_state["iteration"])
