"""The start that a cut run has in common with its study's full run, taken over instead of trained again.

Without a method both train alike until the first step in which their learning-rate schedules differ: to the cut run's
end with a constant rate or drops at fixed epochs, through a warm-up of fixed length, not at all with a cosine over the
whole run. Signals, rows and checkpoints of that start are copied into the cut run's root, so all that reads the tree
finds them as if they had been trained there.
"""

from __future__ import annotations

import copy
import io
import time
import warnings
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from trainables.config import TrialConfig
from trainables.runtime.checkpoint_file import read_state
from trainables.runtime.isolation import isolated
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.leases import StageLeases
from trainables.stage_tree.packing import pack, unpack
from trainables.stage_tree.root import root_facts, root_id
from trainables.stage_tree.stage_lease import BEGINNING_S
from trainables.stage_tree.store import Chunk, Stage, StageStore
from trainables.stage_tree.tree_writer import DIVERGED
from trainables.training.recipe.recipe import Recipe
from trainables.workloads.base import Workload

#: Small file of a cut run's root: how many of its first states, from 0 on, are the full run's.
_COMMON = "common-start.json"
#: Seconds that a full run, begun just before, may take until its first stage is leased.
_BEGINS_S = 30.0


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
    """

    def __init__(
        self, config: TrialConfig, full_epochs: int, workload: Workload, store: StageStore, checkpoints: Checkpoints,
        claims: StageLeases | None, holder: str,
    ) -> None:  # fmt: skip
        self._config, self._full_epochs, self._workload, self._store = config, full_epochs, workload, store
        self._checkpoints, self._claims, self._holder = checkpoints, claims, holder
        full = root_id(root_facts(replace(config, epochs=full_epochs), workload))
        self._full = StageStore(store.tree, full).first()
        self._total_steps = workload.steps_per_epoch * config.epochs
        self._until = min(self._common_states(), self._total_steps)
        self._waits_until_s = time.monotonic() + _BEGINS_S

    def _common_states(self) -> int:
        """Return for how many steps, from 0 on, both runs stand in the same state; 0 if hardly any."""
        known = self._store.read(_COMMON)
        if known is None:
            known, _ = _equal_schedules(self._config, self._workload, self._full_epochs)
            with suppress(OSError):  # else the next trial counts again
                self._store.write(_COMMON, known)
        return int(known) if known > 1 else 0

    def take(self, stage: Stage) -> bool:
        """Copy what the full run has recorded by now; return whether that was anything.

        Args:
            stage: first stage of the cut run.
        """
        begin = stage.known_until
        if begin >= self._until:
            return False
        self._full.refresh()
        end = min(self._full.known_until, self._until)
        if end <= begin:
            return False
        names = tuple(name for name in self._full.names if self._full.covers(name, begin, end))
        columns = [self._full.dense(name)[begin:end] for name in names]
        values = np.column_stack(columns) if columns else np.empty((end - begin, 0))
        rows = {
            step: found
            for step, row in self._full.rows.items()
            if begin < step <= end and step < self._total_steps and (found := self._row(row)) is not None
        }
        chunk = Chunk(
            begin=begin, end=end, names=names, values=values,
            sparse=self._full.sparse(begin, end), rows=rows,
        )  # fmt: skip
        self._copy_checkpoints(stage.id, begin, end)
        try:
            self._store.publish(stage, chunk, None)
        except OSError as error:
            warnings.warn(f"the start of a cut run is trained though the full run has it: {error}", stacklevel=2)
            self._until = 0
        return True

    def must_wait(self, stage: Stage) -> bool:
        """Return whether another trial trains what is still to be taken, or is about to."""
        if self._claims is None or stage.known_until >= self._until:
            return False
        if not self._claims.claim(self._full.id, self._holder, BEGINNING_S):
            self._waits_until_s = 0.0
            return True
        self._claims.release(self._full.id, self._holder)
        return not self._full.known_until and time.monotonic() < self._waits_until_s

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a row of the full run as the cut one's; None if more or less than its budget was executed."""
        if DIVERGED in row:
            return dict(row)
        flops = row["forward_flops"] + row["backward_flops"]
        if row["compute_saved"] or row["backward_saved"]:
            return None
        return {**row, "dense_flops": flops * self._config.epochs // row["epoch"]}

    def _copy_checkpoints(self, stage: str, begin: int, end: int) -> None:
        """Copy the checkpoints of steps in [begin, end], each with the schedule of the cut run."""
        wanted = {
            entry.step: entry
            for entry in self._checkpoints.entries(self._full.id)
            if begin <= entry.step <= min(end, self._until - 1) and entry.kind == "any"
        }
        if not wanted:
            return
        _, schedules = _equal_schedules(self._config, self._workload, self._full_epochs, keep=wanted)
        for step, schedule in schedules.items():
            if (data := self._checkpoints.read(self._full.id, wanted[step])) is not None:
                file = io.BytesIO()
                torch.save(pack({**unpack(read_state(io.BytesIO(data))), "scheduler": schedule}), file)
                self._checkpoints.put(stage, step, file.getvalue())


def _equal_schedules(
    config: TrialConfig, workload: Workload, full_epochs: int, *, keep: Container[int] = ()
) -> tuple[int, dict[int, dict[str, Any]]]:
    """Step the schedules of the cut and the full run until their rates differ, at most to the cut run's end.

    Args:
        config: of the cut run.
        workload: of both.
        full_epochs: of the full run.
        keep: steps before which the cut run's schedule is wanted.

    Returns:
        For how many states, from that before step 0 on, the rates are equal; and the wanted states of the schedule.
    """
    kept: dict[int, dict[str, Any]] = {}
    with isolated(seed=config.seed, threads=config.threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedules are stepped without their optimizers
        model = workload.make_model()
        recipe = Recipe(config, torch.device("cpu"))
        made = (workload.make_optimizer(model.named_parameters()) for _ in range(2))
        own, full = (recipe.prepare_optimizer(optimizer, workload.batch_factor) for optimizer in made)
        steps = workload.steps_per_epoch
        of_own = workload.make_scheduler(own, steps * config.epochs)
        of_full = workload.make_scheduler(full, steps * full_epochs)
        for step in range(steps * config.epochs + 1):
            if _rates(own) != _rates(full):
                return step, kept
            if step in keep:
                kept[step] = copy.deepcopy(of_own.state_dict())
            of_own.step()
            of_full.step()
    return steps * config.epochs + 1, kept


def _rates(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return everything that the optimizer's groups have but parameters: learning rates, momentum, ..."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
