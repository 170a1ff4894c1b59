"""Steps of all optimizers with Gradient-Skip in a process, and their total cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from trainables.gradskip.script_counting.step_flops import StepFlops
from trainables.gradskip.script_counting.step_record import StepRecord, StepTotals
from trainables.gradskip.status import Status
from trainables.runtime.memory import peak_bytes


class ProcessRecord:
    """Record of the steps of all optimizers with Gradient-Skip in a process, including collected optimizers."""

    def __init__(self) -> None:
        self.flops = StepFlops()
        self.records: list[StepRecord] = []
        self.steps = 0
        """Steps of all optimizers so far."""
        self._since: tuple[int, int] | None = None  # FLOPs at the step's begin; None: not counted
        self._changed = False
        self._stepping = False

    def add(self, gradskip: Status) -> StepRecord:
        """Count an optimizer's steps until the process ends."""
        record = StepRecord(gradskip, self)
        self.records.append(record)
        record.begin_stretch(dense=self._nothing_is_stopped())
        self.settle()
        return record

    def close(self) -> None:
        """Stop counting."""
        for record in self.records:
            record.close()
        self.records.clear()
        self.settle()

    def begin_step(self) -> None:
        """Note that an optimizer's step begins."""
        self._stepping = True

    def take(self) -> tuple[int, int] | None:
        """Return the FLOPs of the step's training (forward, backward) and end their count.

        None where they were not all counted, or were taken already.
        """
        if self._since is None:
            return None
        (forward, backward), self._since = self._since, None
        return self.flops.forward_flops - forward, self.flops.backward_flops - backward

    def end_step(self, record: StepRecord) -> None:
        """Note that an optimizer's step has ended."""
        self._stepping = False
        self.steps += 1
        record.last_step = self.steps
        self._since = None
        if self._changed:
            self._begin_stretches()
        self.settle()

    def change(self) -> None:
        """Note that the set of stopped layers changed.

        The change comes within a step, which still has all gradients, or between two steps.
        """
        self._changed = True
        if not self._stepping:
            self._begin_stretches()
            self.settle()

    def _begin_stretches(self) -> None:
        self._changed = False
        dense = self._nothing_is_stopped()
        for record in self.records:
            record.begin_stretch(dense=dense)

    def _nothing_is_stopped(self) -> bool:
        controls = [record.gradskip for record in self.records]
        return all(control is None or not control.stops.any for control in controls)

    def wait_for_fewer(self) -> None:
        """End the count if no optimizer is left to wait for.

        Called by Python's garbage collector, at any place in any thread. If the counter is not active, because an
        operation is being counted or another thread runs this, the next step ends the count.
        """
        if self.flops.at_work and not self.flops.switching and not any(record.wants_look for record in self.records):
            self.flops.end()
            self._since = None

    def settle(self) -> None:
        """Switch the counter on if a step is to be measured, else off."""
        wanted = any(record.wants_look for record in self.records)
        if not wanted:
            self.flops.end()
            self._since = None
        elif not self.flops.at_work:
            self.flops.begin()
            self._since = None
        if wanted and self._since is None and not self._stepping:
            self._since = (self.flops.forward_flops, self.flops.backward_flops)

    def summary(self) -> dict[str, Any] | None:
        """Return the totals of all optimizers so far, in plain types; None without optimizers.

        Layers are those of the optimizer with the most parameters, the latest of several.
        """
        if not self.records:
            return None
        totals = [record.totals() for record in self.records]
        iterations = [record.iteration for record in self.records]
        largest = max(reversed(self.records), key=lambda record: record.parameters)
        names = largest.blueprint.names
        several = len(self.records) > 1
        return {
            **{name: sum(getattr(t, name) for t in totals) for name in StepTotals.__dataclass_fields__},
            "iteration": sum(iterations),
            "longest_iteration": max(iterations),
            "stopped_through": largest.machine.stopped_through,
            "events": [
                {**asdict(event), **({"optimizer": number} if several else {})}
                for number, record in enumerate(self.records)
                for event in record.events
            ],
            "uncounted": sorted(self.flops.uncounted),
            "optimizers": len(self.records),
            "parameters": largest.parameters,
            "layer_names": None if names is None else list(names),
            "unit_ends": [unit.end for unit in largest.blueprint.plan.units],
            "watch": largest.watch,
            "weight_decays": largest.weight_decays,
            "peak_memory_bytes": _peak_bytes(),
        }


#: Record of this process, where a search runs its script.
_PROCESS = ProcessRecord()


def start(gradskip: Status) -> StepRecord:
    """Count an optimizer until its process ends, for `process_summary`."""
    return _PROCESS.add(gradskip)


def process_summary() -> dict[str, Any] | None:
    """Return the summary of this process's optimizers; None if there are none."""
    return _PROCESS.summary()


def _peak_bytes() -> int:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return peak_bytes(torch.device("cuda" if on_gpu else "cpu"))
