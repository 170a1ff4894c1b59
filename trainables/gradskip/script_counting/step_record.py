"""Count the cost of the steps of a user's own training loop, from inside its optimizers.

In a script only the optimizers observe the training, so a step lasts from the end of one `step()` in the process to
the end of the next, whichever optimizers take them: sums over several optimizers count nothing twice. A few steps are
measured after each change of the stopped layers, and their median is used for all steps until the next change: steps
of one optimizer are assumed to be alike. No other step is slowed down.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Any, Protocol

from torch import Tensor

from trainables.gradskip.advice.never_fires import weight_decays
from trainables.gradskip.layer_plan import Blueprint, StopEvent
from trainables.gradskip.layers import watch_needed
from trainables.gradskip.rules.state_machine import SkipMachine
from trainables.gradskip.status import Status
from trainables.gradskip.step import has_closure

#: Steps that are measured for each set of stopped layers: one of them may be an epoch's last, smaller one, or include
#: an evaluation without `torch.no_grad()`.
LOOKS = 3
#: An optimizer without a step in this many latest steps of the process is no longer waited for.
_PATIENCE = 32


@dataclass(kw_only=True)
class Stretch:
    """Steps of one optimizer with one set of stopped layers in the process."""

    steps: int = 0
    dense: bool = True
    """True where nothing was stopped anywhere."""
    forward_flops: list[int] = field(default_factory=list)
    backward_flops: list[int] = field(default_factory=list)
    gradient_bytes: int = 0
    optimizer_bytes: int = 0


@dataclass(kw_only=True)
class StepTotals:
    """Total cost of the steps of one optimizer, in FLOPs and bytes."""

    steps: int
    forward_flops: int
    backward_flops: int
    dense_flops: int
    """FLOPs of the same number of steps with nothing stopped, forward and backward."""
    dense_backward_flops: int
    gradient_bytes: int
    optimizer_bytes: int


class Process(Protocol):
    """Interface of `process_record.ProcessRecord`, the record of all steps of a process."""

    steps: int

    def change(self) -> None:
        """Note that the set of stopped layers changed."""

    def wait_for_fewer(self) -> None:
        """End the count if no optimizer is left to wait for."""

    def begin_step(self) -> None:
        """Note that an optimizer's step begins."""

    def take(self) -> tuple[int, int] | None:
        """Return the FLOPs of the step's training (forward, backward) and end their count; None if unknown."""

    def end_step(self, record: Any) -> None:
        """Note that an optimizer's step has ended."""


class StepRecord:
    """Record of the steps of an optimizer with Gradient-Skip, from construction on.

    Args:
        gradskip: Gradient-Skip of the optimizer, which has not stepped yet.
        process: record of the process that these steps belong to.
    """

    def __init__(self, gradskip: Status, process: Process) -> None:
        self._process = process
        self._ref = weakref.ref(gradskip)
        self._stretches: list[Stretch] = [Stretch()]
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
    def steps(self) -> int:
        """Return the number of recorded steps of the optimizer."""
        return sum(stretch.steps for stretch in self._stretches)

    @property
    def wants_look(self) -> bool:
        """Return whether too few steps since the last change were measured and another one is expected."""
        waited = self._process.steps - self.last_step
        return len(self._stretches[-1].forward_flops) < LOOKS and self.gradskip is not None and waited <= _PATIENCE

    def close(self) -> None:
        """Stop counting."""
        gradskip = self.gradskip
        if gradskip is not None and self._process.change in gradskip.on_stop:
            gradskip.on_stop.remove(self._process.change)
            gradskip.step.before.remove(self._before)
            gradskip.step.after.remove(self._after)
            gradskip.step.refresh()

    def _before(self, args: Any, kwargs: Any) -> None:
        self._process.begin_step()
        if not has_closure(args, kwargs):
            self._take()  # what follows is the optimizer's own arithmetic

    def _after(self, args: Any, kwargs: Any) -> None:
        self._take()  # a closure ran the training inside the step
        gradskip = self.gradskip
        assert gradskip is not None  # its optimizer keeps it alive
        self._keep_facts(gradskip)
        self._stretches[-1].steps += 1
        self._process.end_step(self)

    def _take(self) -> None:
        seen = self._process.take()
        stretch = self._stretches[-1]
        if seen is not None and len(stretch.forward_flops) < LOOKS:
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

    def totals(self) -> StepTotals:
        """Return the total cost of the steps so far."""
        stretches = self._stretches
        # Stops do not change the forward pass.
        forward = [flops for stretch in stretches for flops in stretch.forward_flops][:LOOKS]
        forward_step = median_low(forward) if forward else 0
        seen = next((s for s in stretches if s.dense and s.backward_flops), None)
        seen = seen or next((s for s in stretches if s.backward_flops), stretches[0])
        dense_step = median_low(seen.backward_flops) if seen.backward_flops else 0
        steps, backward, sent, visited = self.steps, 0, 0, 0
        for stretch in stretches:
            if stretch.backward_flops:  # one too short to be measured has the cost of the one before it
                seen = stretch
            backward += stretch.steps * (median_low(seen.backward_flops) if seen.backward_flops else 0)
            sent += stretch.steps * seen.gradient_bytes
            visited += stretch.steps * seen.optimizer_bytes
        return StepTotals(
            steps=steps,
            forward_flops=steps * forward_step,
            backward_flops=backward,
            dense_flops=steps * (forward_step + dense_step),
            dense_backward_flops=steps * dense_step,
            gradient_bytes=sent,
            optimizer_bytes=visited,
        )

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the steps so far, in plain types."""
        return [asdict(stretch) for stretch in self._stretches]

    def load_state_dict(self, state: list[Mapping[str, Any]]) -> None:
        """Continue from the steps of another process, if this one has taken none."""
        if self._process.steps == 0:
            self._stretches = [Stretch(**stretch) for stretch in state]
