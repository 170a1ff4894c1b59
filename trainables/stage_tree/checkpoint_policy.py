"""The steps at which a trial writes a checkpoint on its path, and the checkpoint's content."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trainables.interventions import MethodReplay
from trainables.stage_tree.checkpoint_interval import checkpoint_interval
from trainables.stage_tree.checkpoints import Checkpoints, StageWeight
from trainables.stage_tree.live import LiveRun
from trainables.stage_tree.packing import pack
from trainables.stage_tree.store import Stage, StageStore


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Options of sharing training between the trials of a study."""

    tree: Path | str
    """The study's ``tree`` folder on a disk that all processes see, or its URI in object storage."""
    budget_bytes: int = 20 * 10**9
    """Most bytes of checkpoints."""
    trials: int = 24
    """Trials of the study; determines how many forks are expected."""
    watches: tuple[tuple[str, ...], ...] = ()
    """Values of ``CAC_WATCH`` in the study; their layers are recorded from the first trial on."""
    checkpoint_every_s: float = 60.0
    """Most seconds of training that a crash may lose; 0 for one epoch."""


class CheckpointPolicy:
    """Write checkpoints on one trial's path: where forks are likely, where the rule acts, and against a crash.

    Args:
        store: store of the trial's root.
        sharing: budget and frequency.
        replay: the trial's replay; its kind is that of the checkpoints.
        epoch_steps: steps of an epoch.
        total_steps: steps of the run.
    """

    def __init__(
        self, store: StageStore, sharing: Sharing, replay: MethodReplay, *, epoch_steps: int, total_steps: int
    ) -> None:
        self._store = store
        self._sharing = sharing
        self._replay = replay
        self._epoch_steps = epoch_steps
        self._total_steps = total_steps
        self.checkpoints = Checkpoints(sharing.tree, sharing.budget_bytes, self._stage_weight)
        self._write_s = 0.0
        self._kept: dict[str, list[int]] = {}
        self._weights: dict[str, StageWeight] | None = None

    def may(self, live: LiveRun, depth: int) -> bool:
        """Return whether checkpoints are kept at all and a trial could continue from one here.

        Args:
            live: the run at a step's start.
            depth: interventions before its stage.
        """
        return self._sharing.budget_bytes > 0 and live.run.step > 0 and not (self._replay.first_stage_only and depth)

    def is_overdue(self, live: LiveRun) -> bool:
        """Return whether a crash would now lose too much training; 0 seconds mean every epoch, not every step."""
        every_s = self._sharing.checkpoint_every_s
        if every_s == 0 and live.run.step % self._epoch_steps != 0:
            return False
        return time.monotonic() - live.checkpointed >= every_s

    def wants(self, live: LiveRun, stage: Stage, depth: int, acts_now: Callable[[], bool]) -> bool:
        """Return whether a checkpoint should be written here.

        Args:
            live: the run at a step's start.
            stage: its stage.
            depth: interventions before the stage.
            acts_now: returns whether the rule acts in the step that begins; other trials are likely to fork there.
        """
        step = live.run.step
        if not self.may(live, depth):
            return False
        kept = self._kept.get(stage.id)
        if kept is None:
            kind = self._replay.kind
            kept = [entry.step for entry in self.checkpoints.entries(stage.id) if entry.kind == kind]
            self._kept[stage.id] = kept
        if step in kept:
            live.checkpointed = time.monotonic()  # another trial's checkpoint serves as well
            return False
        if step == stage.start or self.is_overdue(live):
            return True
        if depth == 0 and step == self._total_steps - self._epoch_steps:  # the search examines the trained baseline
            return True
        if not self._write_s or not live.step_s:
            return not self._write_s
        apart = checkpoint_interval(
            write_s=self._write_s,
            step_s=live.step_s,
            total_steps=self._total_steps,
            trials=self._sharing.trials,
            depth=depth,
        )
        last = max((there for there in kept if there < step), default=stage.start)
        return step - last >= apart or acts_now()

    def write(self, live: LiveRun, stage: Stage) -> None:
        """Write a checkpoint of the run at a step's start."""
        run = live.run
        begun = time.perf_counter()
        state = run.state_dict()
        state["optimizer"] = {k: v for k, v in state["optimizer"].items() if k != "gradskip"}
        for name in ("config", "row", "wall_time_s", "search_flops", "method"):
            state.pop(name)
        state["training_state"] = run.method.training_state()
        file = io.BytesIO()
        torch.save(pack(state), file)
        self._weights = None
        self.checkpoints.put(stage.id, run.step, file.getvalue(), kind=self._replay.kind)
        self._kept.setdefault(stage.id, []).append(run.step)
        took = time.perf_counter() - begun
        self._write_s = took if self._write_s == 0.0 else 0.8 * self._write_s + 0.2 * took
        live.checkpointed = time.monotonic()

    def _stage_weight(self, stage: str) -> StageWeight:
        """Return how likely and expensive a fork from a stage is; visits counts the stage and its descendants."""
        if self._weights is None:
            self._weights = _weights(self._store, self._total_steps)
        return self._weights.get(stage, StageWeight(start=0, end=self._total_steps, visits=1))


def _weights(store: StageStore, total_steps: int) -> dict[str, StageWeight]:
    links = store.links()
    below: dict[str, int] = dict.fromkeys(links, 1)
    for stage in links:
        link = links[stage]
        while link is not None and link[0] in below:
            below[link[0]] += 1
            link = links[link[0]]
    return {
        stage: StageWeight(start=0 if link is None else link[1].iteration + 1, end=total_steps, visits=below[stage])
        for stage, link in links.items()
    }
