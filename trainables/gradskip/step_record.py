"""Count what the steps of a user's own training loop cost, from inside its optimizers.

In a script nobody but the optimizers sees the training, so a step is what happens from the end of one `step()` in the
process to the end of the next, whichever optimizers take them: sums over several optimizers count nothing twice. FLOPs
are by the formulas of `trainables.flops`, told apart by whether autograd's backward pass is at work; what runs without
gradients outside of it, such as an evaluation between two steps, is no part of a step. A few steps are looked at after
each change of the stopped layers, and their median stands for all until the next: steps of one optimizer are taken to
be alike. No other step is slowed down.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from trainables.flops import formula_of
from trainables.gradskip.checks import weight_decays
from trainables.gradskip.execution_order import in_backward
from trainables.gradskip.layers import watch_needed
from trainables.training.memory import peak_bytes

if TYPE_CHECKING:
    from trainables.gradskip.blueprint import Blueprint, StopEvent
    from trainables.gradskip.controller import GradientSkip
    from trainables.gradskip.machine import SkipMachine

#: Steps that are looked at for each set of stopped layers: one of them may be an epoch's last, smaller one, or hold an
#: evaluation that forgot `torch.no_grad()`.
_LOOKS = 3
#: An optimizer that has not stepped in the last so many steps of the process is not waited for.
_PATIENCE = 32
#: Parts of the names of operations that cost much and have no formula: fused recurrences and attention.
_COSTLY = ("rnn_layer", "cudnn_rnn", "miopen_rnn", "lstm_mps", "dot_product", "flash_attention", "efficient_attention")
#: The code of `torch.autograd.Function.apply`, which runs a forward pass with gradients switched off.
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class StepFlops(TorchDispatchMode):
    """Sums FLOPs of what is executed while it is at work, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_flops = 0
        """Of operations that autograd records."""
        self.backward_flops = 0
        """Of operations inside a backward pass, recomputed activations among them."""
        self.switching = False
        """True while the stack of modes is being changed."""
        self.uncounted: set[str] = set()
        """Names of costly operations whose FLOPs nobody knows."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile; the operations that compiled code calls are seen."""
        return True

    @property
    def at_work(self) -> bool:
        """Return whether operations of this thread are counted."""
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def begin(self) -> None:
        """Count from here on, below the modes that the user has entered: leaving one of them takes off the topmost."""
        self.switching = True
        with _without_user_modes():
            _push_mode(self)
        self.switching = False

    def end(self) -> None:
        """Count no more, whatever modes the user has entered since."""
        if self.at_work:
            self.switching = True
            with _without_user_modes(above=self):
                _pop_mode()
            self.switching = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = formula_of(func._overloadpacket)
        costly = count is None and any(part in str(func) for part in _COSTLY)
        if count is None and not costly:
            return out
        backward = in_backward()
        if not backward and not torch.is_grad_enabled() and not _in_autograd_function():
            return out  # an evaluation
        if count is None:
            self.uncounted.add(str(func).removeprefix("aten.").partition(".")[0])
            return out
        flops = int(count(*args, **kwargs, out_val=out))
        if backward:
            self.backward_flops += flops
        else:
            self.forward_flops += flops
        return out


def _in_autograd_function() -> bool:
    """Return whether an autograd function's forward pass runs: compiled, a reentrant checkpoint, or the user's own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _without_user_modes(above: TorchDispatchMode | None = None) -> Iterator[None]:
    """Take modes off torch's stack for a moment: all that users enter, or those above one."""
    stack = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
    keep = 0 if above is None else 1 + next(place for place, mode in enumerate(stack) if mode is above)
    taken = [_pop_mode() for _ in stack[keep:]]
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push_mode(mode)


@dataclass(kw_only=True)
class _Stretch:
    """Steps of one optimizer with one set of stopped layers in the process."""

    steps: int = 0
    dense: bool = True
    """Whether nothing was stopped anywhere."""
    forward_flops: list[int] = field(default_factory=list)
    backward_flops: list[int] = field(default_factory=list)
    gradient_bytes: int = 0
    optimizer_bytes: int = 0


@dataclass(kw_only=True)
class StepTotals:
    """What the steps of one optimizer cost; FLOPs and bytes over all of them."""

    steps: int
    forward_flops: int
    backward_flops: int
    dense_flops: int
    """Of as many steps with nothing stopped, forward and backward."""
    dense_backward_flops: int
    gradient_bytes: int
    optimizer_bytes: int


class StepRecord:
    """The steps of an optimizer with Gradient-Skip, from now on.

    Args:
        gradskip: of the optimizer, which has not stepped yet.
        process: of whose steps these are a part.
    """

    def __init__(self, gradskip: GradientSkip, process: ProcessRecord) -> None:
        self._process = process
        self._ref = weakref.ref(gradskip)
        self._stretches: list[_Stretch] = [_Stretch()]
        self.last_step = process.steps
        """Number of the process's step that was this optimizer's last."""
        self.parameters = len(gradskip.parameters)
        self.watch = list(watch_needed(gradskip.parameters, None))
        self.weight_decays = weight_decays(gradskip.optimizer)
        self._keep_facts(gradskip)
        self._handles = [
            gradskip.optimizer.register_step_pre_hook(self._before),
            gradskip.optimizer.register_step_post_hook(self._after),
        ]
        gradskip.on_stop.append(process.change)
        # What an optimizer that nobody holds any more has done stays counted, but no step of it is waited for.
        finalizer = weakref.finalize(gradskip, process.wait_for_fewer)
        finalizer.atexit = False

    @property
    def gradskip(self) -> GradientSkip | None:
        """The control of the optimizer, while there is one."""
        return self._ref()

    def _keep_facts(self, gradskip: GradientSkip) -> None:
        # Plain numbers, which hold no tensor: they outlive the optimizer.
        self.machine: SkipMachine = gradskip.machine
        self.events: list[StopEvent] = gradskip.events
        self.blueprint: Blueprint = gradskip.blueprint

    @property
    def iteration(self) -> int:
        """Iterations of the optimizer."""
        gradskip = self.gradskip
        return self.machine.iteration if gradskip is None else gradskip.iteration

    @property
    def steps(self) -> int:
        """Steps of the optimizer in this process."""
        return sum(stretch.steps for stretch in self._stretches)

    @property
    def wants_look(self) -> bool:
        """Return whether too few steps since the last change were looked at, and another is to be expected."""
        waited = self._process.steps - self.last_step
        return len(self._stretches[-1].forward_flops) < _LOOKS and self.gradskip is not None and waited <= _PATIENCE

    def close(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()
        gradskip = self.gradskip
        if gradskip is not None and self._process.change in gradskip.on_stop:
            gradskip.on_stop.remove(self._process.change)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _is_nested(optimizer):
            return
        self._process.begin_step()
        if not any(callable(a) for a in (*args[1:], *kwargs.values())):
            self._take()  # what follows is the optimizer's own arithmetic

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _is_nested(optimizer):
            return
        self._take()  # a closure ran the training inside the step
        gradskip = self.gradskip
        assert gradskip is not None  # its optimizer holds it
        self._keep_facts(gradskip)
        self._stretches[-1].steps += 1
        self._process.end_step(self)

    def _take(self) -> None:
        seen = self._process.take()
        stretch = self._stretches[-1]
        if seen is not None and len(stretch.forward_flops) < _LOOKS:
            stretch.forward_flops.append(seen[0])
            stretch.backward_flops.append(seen[1])
            self._take_bytes(stretch)

    def _take_bytes(self, stretch: _Stretch) -> None:
        gradskip = self.gradskip
        assert gradskip is not None
        stretch.gradient_bytes = stretch.optimizer_bytes = 0  # the first step has made state that the next one visits
        state = gradskip.optimizer.state
        for parameter in gradskip.parameters:
            if parameter.grad is not None:
                size = parameter.nbytes
                kept = sum(t.nbytes for t in state.get(parameter, {}).values() if isinstance(t, Tensor))
                stretch.gradient_bytes += size
                stretch.optimizer_bytes += 2 * size + kept

    def begin_stretch(self, *, dense: bool) -> None:
        """Count steps with another set of stopped layers from here on."""
        if self._stretches[-1].steps == 0:
            self._stretches.pop()
        self._stretches.append(_Stretch(dense=dense))

    def totals(self) -> StepTotals:
        """Add up what was executed so far."""
        stretches = self._stretches
        # Stops leave the forward pass as it is.
        forward = [flops for stretch in stretches for flops in stretch.forward_flops][:_LOOKS]
        forward_step = median_low(forward) if forward else 0
        seen = next((s for s in stretches if s.dense and s.backward_flops), None)
        seen = seen or next((s for s in stretches if s.backward_flops), stretches[0])
        dense_step = median_low(seen.backward_flops) if seen.backward_flops else 0
        steps, backward, sent, visited = self.steps, 0, 0, 0
        for stretch in stretches:
            if stretch.backward_flops:  # one too short to be looked at costs what the one before it did
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
        """The steps so far, in plain types."""
        return [asdict(stretch) for stretch in self._stretches]

    def load_state_dict(self, state: list[Mapping[str, Any]]) -> None:
        """Go on from the steps of another process, where this one has taken none."""
        if self._process.steps == 0:
            self._stretches = [_Stretch(**stretch) for stretch in state]


class ProcessRecord:
    """The steps of all optimizers with Gradient-Skip in a process, those that are gone among them."""

    def __init__(self) -> None:
        self.flops = StepFlops()
        self.records: list[StepRecord] = []
        self.steps = 0
        """Optimizer steps so far, of any of them."""
        self._since: tuple[int, int] | None = None  # the counter's numbers where the step began; None: it was away
        self._changed = False
        self._stepping = False

    def add(self, gradskip: GradientSkip) -> StepRecord:
        """Count an optimizer's steps until the process ends."""
        record = StepRecord(gradskip, self)
        self.records.append(record)
        record.begin_stretch(dense=self._nothing_is_stopped())
        self.settle()
        return record

    def close(self) -> None:
        """Count no more."""
        for record in self.records:
            record.close()
        self.records.clear()
        self.settle()

    def begin_step(self) -> None:
        """An optimizer's `step()` begins."""
        self._stepping = True

    def take(self) -> tuple[int, int] | None:
        """End the step's training, forward and backward FLOPs; None where they were not all seen, or taken already."""
        if self._since is None:
            return None
        (forward, backward), self._since = self._since, None
        return self.flops.forward_flops - forward, self.flops.backward_flops - backward

    def end_step(self, record: StepRecord) -> None:
        """An optimizer has stepped."""
        self._stepping = False
        self.steps += 1
        record.last_step = self.steps
        self._since = None
        if self._changed:
            self._begin_stretches()
        self.settle()

    def change(self) -> None:
        """The set of stopped layers is another one: in a step that has all gradients still, or between two."""
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
        return all(control is None or control.stopped_through < 0 for control in controls)

    def wait_for_fewer(self) -> None:
        """End the count if nobody is left to wait for. Called by Python's collector, at any place in any thread.

        Where the counter is not at work, because an operation is being counted or another thread runs this, the next
        step will see to it.
        """
        if self.flops.at_work and not self.flops.switching and not any(record.wants_look for record in self.records):
            self.flops.end()
            self._since = None

    def settle(self) -> None:
        """Have the counter at work where a step is to be looked at, else not."""
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
        """Return what was executed so far, in plain types, summed over all optimizers; None for none.

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


#: Of this process, where a search runs its script.
_PROCESS = ProcessRecord()


def start(gradskip: GradientSkip) -> StepRecord:
    """Count an optimizer until its process ends, for `process_summary`."""
    return _PROCESS.add(gradskip)


def process_summary() -> dict[str, Any] | None:
    """Return the summary of this process's optimizers; None for none."""
    return _PROCESS.summary()


def _is_nested(optimizer: Any) -> bool:
    from trainables.gradskip.controller import is_nested_step  # which imports this module

    return is_nested_step(optimizer)


def _peak_bytes() -> int:
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return peak_bytes(torch.device("cuda" if on_gpu else "cpu"))
