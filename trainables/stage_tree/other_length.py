"""The start that a cut run has in common with its study's full run, taken over instead of trained again.

Without a method both train alike until the first step in which their learning-rate schedules differ
(`equal_schedules`): to the cut run's end with a constant rate or drops at fixed epochs, through a warm-up of fixed
length, not at all with a cosine over the whole run. Signals, rows and checkpoints of that start are copied into the cut
run's root, so all that reads the tree finds them as if they had been trained there.
"""

from __future__ import annotations

import io
import pickle
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainables.config import TrialConfig
from trainables.runtime.checkpoint_file import read_state
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.equal_schedules import equal_schedules
from trainables.stage_tree.leases import StageLeases
from trainables.stage_tree.packing import pack, unpack
from trainables.stage_tree.root import root_facts, root_id
from trainables.stage_tree.store import Chunk, Stage, StageStore
from trainables.stage_tree.tree_writer import DIVERGED
from trainables.workloads.base import Workload

#: Small file of a cut run's root: how many of its first states, from 0 on, are those of the run of so many epochs.
_COMMON = "common-start-{epochs}.json"
#: Seconds that a full run, begun just before, may take until its first stage is leased.
_BEGINS_S = 30.0


def common_states(store: StageStore, full_epochs: int) -> int:
    """Return how many states of a cut run, from its first on, are those of the full run; 0 where that is not known.

    Args:
        store: of the cut run's root.
        full_epochs: epochs of the full run.
    """
    return int(store.read(_COMMON.format(epochs=full_epochs)) or 0)


class CommonStart:
    """The first stage of the full run, for trials of a cut one.

    Args:
        config: of a trial of the cut run.
        full_epochs: E of the full run, more than the trial's.
        workload: as built for the trial.
        store: the tree of the trial's root.
        checkpoints: of the study.
        claims: leases of stages; None if no other trial runs.
        holder: the trial's name in the leases.
        is_awaited: whether the full run has been begun and may not hold its lease yet.
        warn_unloadable: warns that a checkpoint cannot be loaded.
    """

    def __init__(
        self, config: TrialConfig, full_epochs: int, workload: Workload, store: StageStore, checkpoints: Checkpoints,
        claims: StageLeases | None, holder: str, *, is_awaited: bool, warn_unloadable: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._warn_unloadable = warn_unloadable
        self._config, self._full_epochs, self._workload, self._store = config, full_epochs, workload, store
        self._checkpoints, self._claims, self._holder = checkpoints, claims, holder
        full = root_id(root_facts(replace(config, epochs=full_epochs), workload))
        self._full = StageStore(store.tree, full).first()
        self._total_steps = workload.steps_per_epoch * config.epochs
        self._until = min(self._common_states(), self._total_steps)
        self._awaited_until_s = time.monotonic() + (_BEGINS_S if is_awaited else 0.0)

    def _common_states(self) -> int:
        """Return for how many steps, from 0 on, both runs stand in the same state; 0 if hardly any."""
        known = self._store.read(_COMMON.format(epochs=self._full_epochs))
        if known is None:
            try:
                known, _ = equal_schedules(self._config, self._workload, self._full_epochs)
            except Exception as error:  # noqa: BLE001 - the user's model and schedule may raise anything
                known = 0
                warnings.warn(
                    f"a run of {self._config.epochs} epochs is trained from its start, for its schedule could not be "
                    f"compared with that of {self._full_epochs}: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
            with suppress(OSError):  # else the next trial counts again
                self._store.write(_COMMON.format(epochs=self._full_epochs), known)
        return int(known) if known > 1 else 0

    def take(self, stage: Stage) -> bool:
        """Copy signals and rows that the full run has recorded by now; return whether that was anything.

        Args:
            stage: first stage of the cut run.
        """
        begin = stage.known_until
        if begin >= self._until and not self._lacks_rows(stage):
            return False
        self._full.refresh()
        end = max(begin, min(self._full.known_until, self._until))
        rows = {
            step: found
            for step, row in self._full.rows.items()
            if step <= end and step < self._until and step not in stage.rows and (found := self._row(row)) is not None
        }
        if end == begin and not rows:
            return False
        names = tuple(name for name in self._full.names if self._full.covers(name, begin, end))
        columns = [self._full.dense(name)[begin:end] for name in names]
        values = np.column_stack(columns) if columns else np.empty((end - begin, 0))
        chunk = Chunk(
            begin=begin, end=end, names=names, values=values,
            sparse=self._full.sparse(begin, end), rows=rows,
        )  # fmt: skip
        try:
            self._store.publish(stage, chunk, None)
        except OSError as error:
            warnings.warn(f"the start of a cut run is trained though the full run has it: {error}", stacklevel=2)
            self._until = 0
        return True

    def _lacks_rows(self, stage: Stage) -> bool:
        every = self._workload.steps_per_epoch
        return any(step not in stage.rows for step in range(every, self._until, every))

    def must_wait(self, stage: Stage) -> bool:
        """Return whether another trial trains what is still to be taken, or is about to."""
        if self._claims is None or stage.known_until >= self._until:
            return False
        if self._claims.is_held(self._full.id, self._holder):
            self._awaited_until_s = 0.0
            return True
        return not self._full.known_until and time.monotonic() < self._awaited_until_s

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a row of the full run as the cut one's; None if more or less than its budget was executed."""
        if DIVERGED in row:
            return dict(row)
        flops = row["forward_flops"] + row["backward_flops"]
        if row["compute_saved"] or row["backward_saved"]:
            return None
        return {**row, "dense_flops": flops * self._config.epochs // row["epoch"]}

    def copy_checkpoints(self, stage: Stage) -> None:
        """Copy the checkpoints of what was taken, each with the cut run's own schedule; call before training.

        Args:
            stage: first stage of the cut run.
        """
        there = {entry.step for entry in self._checkpoints.entries(stage.id)}
        wanted = {
            entry.step: entry
            for entry in self._checkpoints.entries(self._full.id)
            if entry.step <= stage.known_until
            and entry.step < self._until
            and entry.kind == "any"
            and entry.step not in there
        }
        if not wanted:
            return
        _, schedules = equal_schedules(self._config, self._workload, self._full_epochs, keep=wanted)
        for step, schedule in schedules.items():
            if (data := self._checkpoints.read(self._full.id, wanted[step])) is None:
                continue
            try:
                state = unpack(read_state(io.BytesIO(data)))
            except (RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
                self._warn_unloadable(error)
                return
            file = io.BytesIO()
            torch.save(pack({**state, "scheduler": schedule}), file)
            self._checkpoints.put(stage.id, step, file.getvalue())
