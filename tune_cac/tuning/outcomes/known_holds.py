"""Probabilities of holding on another seed, as far as a search knows them.

They are written after every trial, so that a search that is killed leaves them behind.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ray import tune

if TYPE_CHECKING:
    from analysis.io.layout import Layout
    from tune_cac.tuning.outcomes.outcome_queue import OutcomeQueue


class Search(Protocol):
    """A searcher that may choose outcomes."""

    outcomes: OutcomeQueue | None
    """Knows the probabilities; None where a sampler chooses."""

    @property
    def gave_up(self) -> str:
        """Return why the search ended before anything could be known; empty otherwise."""


class HoldsWriter(tune.Callback):
    """Write `StudyInfo.holds` after each trial.

    Args:
        layout: of the study.
        searcher: that knows them, where it chooses outcomes.
    """

    def __init__(self, layout: Layout, searcher: Search) -> None:
        self._layout, self._searcher = layout, searcher

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles its callbacks for a restore that we do not use; a searcher cannot be pickled.
        return {}

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Write them once the searcher has the trial's result."""
        with suppress(OSError):  # Ray would take it for the trial's; they are written again after the next one
            write_holds(self._layout, self._searcher)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Write them without a trial that failed."""
        self.on_trial_complete(iteration, trials, trial)


def write_holds(layout: Layout, searcher: Search) -> None:
    """Write the probabilities of all trained outcomes into `study.json`, unless it has the same."""
    if (known := _known(searcher)) is None:
        return
    holds = {str(trial): share for trial, share in known.holds().items()}
    if (info := layout.read_info()).holds != holds:
        layout.write_info(replace(info, holds=holds))


def unsure_trials(searcher: Search) -> list[int]:
    """Return trials that are less sure to hold on another seed than the answer is to be, as far as that is known."""
    known = _known(searcher)
    return [] if known is None else known.unsure()


def _known(searcher: Search) -> OutcomeQueue | None:
    return None if searcher.gave_up else searcher.outcomes
