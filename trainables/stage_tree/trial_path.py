"""The stages on a trial's path through the stage tree, with the trial's replay at its end."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from trainables.interventions import Intervention, MethodReplay, MissingSignal
from trainables.stage_tree.checkpoints import Checkpoints, Entry
from trainables.stage_tree.recorder import SignalRecorder
from trainables.stage_tree.store import Stage, StageStore


@dataclass(kw_only=True)
class Visit:
    """A stage on the trial's path."""

    stage: Stage
    entered_by: Intervention | None
    replay_state: dict[str, Any]
    """State of the replay when it entered the stage."""


class TrialPath:
    """The path of one trial through the stage tree, and the replay of its method along it.

    Args:
        store: the tree of the trial's root.
        replay: replay of the trial's method, at iteration 0.
    """

    def __init__(self, store: StageStore, replay: MethodReplay) -> None:
        self._store = store
        self.replay = replay
        self.visits = [Visit(stage=store.first(), entered_by=None, replay_state=replay.state_dict())]

    @property
    def here(self) -> Stage:
        """Return the last stage."""
        return self.visits[-1].stage

    @property
    def depth(self) -> int:
        """Return the number of interventions so far."""
        return len(self.visits) - 1

    @property
    def link(self) -> tuple[Stage, Intervention] | None:
        """Return the stage before the last, and the intervention between them; None at the root."""
        entered_by = self.visits[-1].entered_by
        return None if entered_by is None else (self.visits[-2].stage, entered_by)

    def enter(self, intervention: Intervention) -> Stage:
        """Append the stage that an intervention leads to, and return it."""
        stage = self._store.child(self.here, intervention)
        self.visits.append(Visit(stage=stage, entered_by=intervention, replay_state=self.replay.state_dict()))
        return stage

    def set_back(self, step: int) -> None:
        """Reset path and replay to the start of a step."""
        while len(self.visits) > 1 and self.here.start > step:
            self.visits.pop()
        visit = self.visits[-1]
        self.replay.load_state_dict(visit.replay_state)
        self.replay.advance(visit.stage, step)

    def nearest_checkpoint(
        self, checkpoints: Checkpoints, frontier: int, refused: Container[Entry]
    ) -> tuple[int, Entry] | None:
        """Return the last checkpoint that this trial can continue from: place on the path, and entry.

        Args:
            checkpoints: checkpoints of the tree.
            frontier: largest step that the checkpoint may have.
            refused: entries that cannot be read.
        """
        until = frontier
        for place in range(len(self.visits) - 1, -1, -1):
            visit = self.visits[place]
            usable = [
                entry
                for entry in checkpoints.entries(visit.stage.id)
                if visit.stage.start <= entry.step <= until
                and (self.replay.kind == "any" or entry.kind == self.replay.kind)
                and entry not in refused
            ]
            if usable and not (place > 0 and self.replay.first_stage_only):
                return place, max(usable, key=lambda entry: entry.step)
            if visit.entered_by is not None:
                until = visit.entered_by.iteration
        return None

    def acts_at(self, recorder: SignalRecorder, step: int) -> bool:
        """Return whether the method acts in the step that begins; other trials are likely to fork there."""
        if self.replay.is_quiet():
            return False
        state = self.replay.state_dict()
        try:
            return self.replay.advance(recorder, step + 1) is not None
        except MissingSignal:
            return False  # measured in the step itself
        finally:
            self.replay.load_state_dict(state)
