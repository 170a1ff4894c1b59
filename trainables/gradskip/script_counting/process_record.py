"""Cost of the steps of a user's own training loop, counted from inside its optimizers with Gradient-Skip.

In a script only the optimizers observe the training, so a step lasts from the end of one `step()` in the process to
the end of the next, whichever optimizers take them: sums over several optimizers count nothing twice. A few steps are
measured after each change of the stopped layers, and one of each new size of inputs (`input_sizes`); the others' cost
follows from these. No other step is slowed down.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainables.gradskip.advice.never_fires import weight_decays
from trainables.gradskip.layer_plan import Blueprint, StopEvent
from trainables.gradskip.layers import watch_needed
from trainables.gradskip.rules.state_machine import SkipMachine
from trainables.gradskip.script_counting.input_sizes import InputSizes, Size, as_text
from trainables.gradskip.script_counting.script_trace import ScriptTrace
from trainables.gradskip.script_counting.step_flops import StepFlops
from trainables.gradskip.script_counting.stretches import (
    LOOKS,
    SIZES_DENSE,
    SIZES_STOPPED,
    StepTotals,
    Stretch,
    totals_of,
)
from trainables.gradskip.script_counting.trace_file import FIRST_STEP_VARIABLE, TRACE_VARIABLE, TRIAL_FOLDER
from trainables.gradskip.status import Status
from trainables.gradskip.step import has_closure
from trainables.runtime.memory import peak_bytes

#: An optimizer without a step in this many latest steps of the process is no longer waited for.
_PATIENCE = 32


class StepRecord:
    """Record of the steps of an optimizer with Gradient-Skip, from construction on.

    Args:
        gradskip: Gradient-Skip of the optimizer, which has not stepped yet.
        process: record of the process that these steps belong to.
    """

    def __init__(self, gradskip: Status, process: ProcessRecord) -> None:
        self._process = process
        self._ref = weakref.ref(gradskip)
        self._stretches = [Stretch()]
        self._begun_with: set[str] = set()  # sizes of first calls in measured steps of the stretch
        self._size: Size = ()
        self.last_step = process.steps
        """Number of this optimizer's last step, counted over all steps of the process."""
        self.parameters = len(gradskip.parameters)
        self.watch = list(watch_needed(gradskip.parameters, None))
        self.weight_decays = weight_decays(gradskip.optimizer)
        self._keep_facts(gradskip)
        gradskip.step.before.append(self._before)
        gradskip.step.after.append(self._after)
        gradskip.step.refresh()
        gradskip.on_stop.append(process.change)
        # Steps of a collected optimizer stay counted, but no further one is waited for.
        finalizer = weakref.finalize(gradskip, process.wait_for_fewer)
        finalizer.atexit = False

    @property
    def gradskip(self) -> Status | None:
        """Return the optimizer's Gradient-Skip; None once it is collected."""
        return self._ref()

    def _keep_facts(self, gradskip: Status) -> None:
        # Plain values without tensors, which outlive the optimizer.
        self.machine: SkipMachine = gradskip.machine
        self.events: list[StopEvent] = gradskip.events
        self.blueprint: Blueprint = gradskip.blueprint

    @property
    def iteration(self) -> int:
        """Return the iterations of the optimizer."""
        gradskip = self.gradskip
        return self.machine.iteration if gradskip is None else gradskip.iteration

    @property
    def wants_look(self) -> bool:
        """Return whether too few steps since the last change were measured and another one is expected."""
        return len(self._stretches[-1].forward_flops) < LOOKS and self._goes_on

    @property
    def _goes_on(self) -> bool:
        return self.gradskip is not None and self._process.steps - self.last_step <= _PATIENCE

    def wants_size(self, text: str) -> bool:
        """Return whether no step was measured that began with a call of this size, and few enough others were."""
        most = SIZES_DENSE if self._stretches[-1].dense else SIZES_STOPPED
        if text in self._begun_with or len(self._begun_with) >= most or not self._goes_on:
            return False
        self._begun_with.add(text)
        return True

    def _before(self, args: Any, kwargs: Any) -> None:
        self._process.begin_step()
        if not has_closure(args, kwargs):
            self._take()  # what follows is the optimizer's own arithmetic

    def _after(self, args: Any, kwargs: Any) -> None:
        self._take()  # a closure ran the training inside the step
        gradskip = self.gradskip
        assert gradskip is not None  # its optimizer keeps it alive
        self._keep_facts(gradskip)
        stretch, text = self._stretches[-1], as_text(self._size)
        stretch.steps += 1
        stretch.counts[text] = stretch.counts.get(text, 0) + 1
        self._size = ()
        self._process.end_step(self)

    def _take(self) -> None:
        seen = self._process.take()
        stretch = self._stretches[-1]
        self._size = self._process.inputs.take() or self._size
        text = as_text(self._size)
        if seen is not None and stretch.sizes.count(text) < LOOKS:
            stretch.sizes.append(text)
            stretch.forward_flops.append(seen[0])
            stretch.backward_flops.append(seen[1])
            self._take_bytes(stretch)

    def _take_bytes(self, stretch: Stretch) -> None:
        gradskip = self.gradskip
        assert gradskip is not None
        stretch.gradient_bytes = stretch.optimizer_bytes = 0  # the first step creates state that the next one updates
        state = gradskip.optimizer.state
        for parameter in gradskip.parameters:
            if parameter.grad is not None:
                size = parameter.nbytes
                kept = sum(t.nbytes for t in state.get(parameter, {}).values() if isinstance(t, Tensor))
                stretch.gradient_bytes += size
                stretch.optimizer_bytes += 2 * size + kept

    def begin_stretch(self, *, dense: bool) -> None:
        """Begin to count steps with another set of stopped layers."""
        if self._stretches[-1].steps == 0:
            self._stretches.pop()
        self._stretches.append(Stretch(dense=dense))
        self._begun_with.clear()

    def totals(self) -> StepTotals:
        """Return the total cost of the steps so far."""
        return totals_of(self._stretches)

    @property
    def sizes(self) -> set[str]:
        """Return the sizes of inputs of the steps so far, as texts."""
        return {text for stretch in self._stretches for text in stretch.counts}

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far and the trial that took them, in plain types."""
        return {"trial": os.environ.get(TRIAL_FOLDER), "stretches": [asdict(stretch) for stretch in self._stretches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the steps of another process of this trial, if this one has taken none.

        Steps of another trial, whose checkpoint the script has found, are none of this one.
        """
        if self._process.steps == 0 and isinstance(state, Mapping) and state["trial"] == os.environ.get(TRIAL_FOLDER):
            self._stretches = [Stretch(**stretch) for stretch in state["stretches"]]


class ProcessRecord:
    """Record of the steps of all optimizers with Gradient-Skip in a process, including collected optimizers."""

    def __init__(self) -> None:
        self.flops = StepFlops()
        self.inputs = InputSizes(self._first_call)
        self.records: list[StepRecord] = []
        self.steps = 0
        """Steps of all optimizers so far."""
        self._since: tuple[int, int] | None = None  # FLOPs at the step's begin; None: not counted
        self._changed = False
        self._stepping = False
        self.trace: ScriptTrace | None = None
        """Recorder of the only optimizer's run, if the search asks for it."""

    def add(self, gradskip: Status, given_model: nn.Module | None = None) -> StepRecord:
        """Count an optimizer's steps until the process ends, and record its run if the search asks for that.

        Args:
            gradskip: of the optimizer.
            given_model: the model that the user gave with it, with its wrappers.
        """
        record = StepRecord(gradskip, self)
        self.inputs.watch(gradskip.parameters, given_model)
        if self.trace is not None:
            self.trace.drop()  # settings stop layers of one optimizer, and these are several
        elif (watch := os.environ.get(TRACE_VARIABLE)) and not self.records and os.environ.get("RANK", "0") == "0":
            self._trace_run(gradskip, given_model, record, watch)
        self.records.append(record)
        record.begin_stretch(dense=self._nothing_is_stopped())
        self.settle()
        return record

    def _trace_run(self, gradskip: Status, given_model: nn.Module | None, record: StepRecord, watch: str) -> None:
        if gradskip.numbering.is_sharded:  # every process would have to measure
            return
        folder = Path(os.environ.get(TRIAL_FOLDER, os.curdir))
        try:
            self.trace = ScriptTrace(gradskip, given_model, record, self.flops, watch=watch, folder=folder)
        except Exception as error:  # noqa: BLE001 - a user's tensors; the training goes on
            self.flops.attribute(())
            warnings.warn(f"the run is not recorded for the search: {type(error).__name__}: {error}", stacklevel=2)

    def _first_call(self, size: Size) -> None:
        """Count the step that begins with this call of the model, if its size is a new one."""
        text = as_text(size)
        wanting = [record for record in self.records if record.wants_size(text)]
        if wanting and self._since is None:
            if not self.flops.at_work:
                self.flops.begin()
            self._since = (self.flops.forward_flops, self.flops.backward_flops)

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
        self.flops.forget_copies()
        self.steps += 1
        if self.steps == 1 and (asked := os.environ.get(FIRST_STEP_VARIABLE)):
            Path(asked).touch()
            os._exit(0)  # nothing more is to happen: a checkpoint would be found by the baseline
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

    def summary(self, processes: int = 1) -> dict[str, Any] | None:
        """Return the totals of all optimizers so far, in plain types; None without optimizers.

        Layers are those of the optimizer with the most parameters, the latest of several.

        Args:
            processes: number that train together, data-parallel. Each executes what this one does, so FLOPs and bytes
                are multiplied by it.
        """
        if not self.records:
            return None
        totals = [record.totals() for record in self.records]
        iterations = [record.iteration for record in self.records]
        largest = max(reversed(self.records), key=lambda record: record.parameters)
        names = largest.blueprint.names
        several = len(self.records) > 1
        return {
            **{name: processes * sum(getattr(t, name) for t in totals) for name in StepTotals.__dataclass_fields__},
            "steps": sum(t.steps for t in totals),
            "measured_steps": sum(t.measured_steps for t in totals),
            "sizes": len({text for record in self.records for text in record.sizes}),
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


def start(gradskip: Status, given_model: nn.Module | None = None) -> StepRecord:
    """Count an optimizer until its process ends, for `process_summary`."""
    return _PROCESS.add(gradskip, given_model)


def process_summary(processes: int = 1) -> dict[str, Any] | None:
    """Return the summary of this process's optimizers for several that train together; None if there are none."""
    return _PROCESS.summary(processes)


def _peak_bytes() -> int:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return peak_bytes(torch.device("cuda" if on_gpu else "cpu"))
