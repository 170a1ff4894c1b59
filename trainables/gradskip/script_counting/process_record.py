"""Cost of the steps of a user's own training loop, counted from inside its optimizers with Gradient-Skip.

In a script only the optimizers observe the training, so a step lasts from the end of one `step()` in the process to
the end of the next, whichever optimizers take them. A few steps are measured after each change of the stopped layers or
of those that get gradients (`stretches`), and one of each new size of inputs (`input_sizes`); the others' cost follows
from these, and they are not slowed down.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainables.gradskip.advice import some
from trainables.gradskip.execution_order import (
    ExecutionRecorder,
    ModelTrace,
    in_autograd_function,
    in_backward,
    mask_of,
)
from trainables.gradskip.layers import has_trained_statistics, unit_ends, watch_needed
from trainables.gradskip.nothing_stops import weight_decays
from trainables.gradskip.numbering import Numbering, is_compiled
from trainables.gradskip.replay import Blueprint, layers_key, variance_name
from trainables.gradskip.script_counting.input_sizes import InputSizes, Size, WatchedCalls, reads_of
from trainables.gradskip.script_counting.step_flops import StepFlops
from trainables.gradskip.script_counting.stretches import (
    LOOK_EVERY,
    LOOKS,
    MOST_LOOKS,
    MOST_STRETCHES,
    SIZES_DENSE,
    SIZES_STOPPED,
    TRIES,
    Stretch,
    totals_of,
)
from trainables.gradskip.script_counting.trace_file import (
    DEFAULT_WATCH,
    TRACE_FILE,
    TRACE_VARIABLE,
    TRIAL_FOLDER,
    ScriptFacts,
    to_bytes,
)  # fmt: skip
from trainables.gradskip.settings import Settings
from trainables.gradskip.signals import variance
from trainables.gradskip.step import SkippingStep, has_closure
from trainables.gradskip.stops import blueprint_of
from trainables.runtime.memory import peak_bytes
from trainables.storage import atomic_write

# --- Recorder of a script's run without a method: weight variances at every step, layers, and what stops would save
# A search asks its baseline for it, so that it knows what a setting stops before the setting is trained. What a step
# costs with some layers stopped follows from the forward FLOPs of every weight: the gradient of a weight and that of
# its input cost as much each, and the latter is needed only where something trains upstream. Of a weight that is used
# several times the first use counts, so its stop may save less than this says. Shapes: K layers of the variance rule.

#: Steps whose variances stay on the device before the host reads them.
_STEPS_ON_DEVICE = 1000
#: Most variances that are kept; a longer run is not recorded.
MOST_VALUES = 20_000_000


class ScriptTrace:
    """Record an optimizer's run from its first step on, and write it when the process ends.

    Nothing is written where replay could not rely on it: several optimizers, parameters added, frozen or thawed or
    steps taken before, parameters that train outside of the optimizer, layers whose FLOPs are not seen (torch.compile),
    or more than `MOST_VALUES`. Recording never ends a training, and keeps neither model nor optimizer alive.

    ``gradskip`` is switched off, its parameters whole; ``watch`` is the ``CAC_WATCH`` of the study's trials, or
    `DEFAULT_WATCH`; the file is written into ``folder``.
    """

    def __init__(
        self, gradskip: SkippingStep, given_model: nn.Module | None, record: StepRecord, flops: StepFlops, *,
        watch: str, folder: Path,
    ) -> None:  # fmt: skip
        self._gradskip: Callable[[], SkippingStep | None] = weakref.ref(gradskip)
        self._record, self._flops, self._folder = record, flops, folder
        self._rows: list[Tensor] = []
        self._blocks: list[NDArray[np.float32]] = []
        self._process = os.getpid()
        self._layers: list[tuple[int, ...]] = []
        self._trains: list[bool] = []
        self._blueprints: list[tuple[Any, Blueprint]] = []
        self._trace: ModelTrace | None = None
        self._names: list[str] = []
        self.dropped = False  # true once nothing is recorded or written any more
        model = gradskip.numbering.model
        kinds = tuple(watch.split(",")) if watch != DEFAULT_WATCH else watch_needed(gradskip.parameters, model)
        watched = replace(Settings(), watch=kinds) if kinds else Settings()
        self._rules = (watched, replace(watched, stop_layer_num=(0,), stop_layer_itr=(0,)))
        numbering = Numbering(gradskip.optimizer.param_groups, model, watched)
        self._numbering: Numbering | None = numbering  # until the first step
        if numbering.wants_trace and given_model is not None and not is_compiled(given_model):
            numbering.record_first_pass()
        flops.attribute(gradskip.parameters)
        gradskip.before.append(self._before)
        gradskip.refresh()
        atexit.register(self.write)

    def drop(self) -> None:
        atexit.unregister(self.write)
        gradskip = self._gradskip()
        if gradskip is not None and self._before in gradskip.before:
            gradskip.before.remove(self._before)
        if self._numbering is not None:
            self._numbering.stop_recording()
        self._numbering, self.dropped = None, True
        self._flops.attribute(())
        self._rows.clear()
        self._blocks.clear()

    def _before(self, *_: Any) -> None:
        gradskip = self._gradskip()
        assert gradskip is not None  # its optimizer steps
        parameters = gradskip.parameters
        try:
            if not self._rows and not self._blocks and not self._begin(gradskip):
                return self.drop()
            if self._trains != [p.requires_grad for p in parameters]:
                return self.drop()  # the user froze or thawed layers: the rule would follow
            if len(self._rows) < LOOKS:
                self._flops.attribute_moved(parameters)
            self._rows.append(torch.stack([variance([parameters[n] for n in numbers]) for numbers in self._layers]))
            if len(self._rows) == _STEPS_ON_DEVICE:
                self._read()
                if len(self._layers) * _STEPS_ON_DEVICE * len(self._blocks) > MOST_VALUES:
                    self.drop()
        except Exception as error:  # noqa: BLE001 - parameters on several devices, a user's tensors: training goes on
            self.drop()
            warnings.warn(f"the run is not recorded for the search: {type(error).__name__}: {error}", stacklevel=2)

    def _begin(self, gradskip: SkippingStep) -> bool:
        """Take the layers before the first step; return whether the run can be recorded."""
        numbering = self._numbering
        if (
            numbering is None
            or len(numbering.parameters) != len(gradskip.parameters)  # some were added
            or gradskip.machine.iteration > 0  # it goes on from a checkpoint
            or _trains_elsewhere(gradskip)
            or (numbering.model is None and len(gradskip.optimizer.param_groups) > 1)  # nobody knows which come first
        ):
            return False
        numbering.end_recording_at_step()
        numbering.stop_recording()
        numbering.order_by_trace()
        gradskip.stops.look_at_user()
        self._trains = [p.requires_grad for p in gradskip.parameters]
        for settings in self._rules:
            numbering.settings = settings
            self._blueprints.append((layers_key(settings), blueprint_of(numbering, gradskip.stops)))
        self._layers = [unit.watched for unit in self._blueprints[0][1].plan.units]
        self._names = gradskip.names or [f"parameter {n}" for n in range(len(self._trains))]
        self._trace, self._numbering = numbering.trace, None
        return bool(self._layers)

    def _read(self) -> None:
        if self._rows:
            self._blocks.append(torch.stack(self._rows).float().cpu().numpy())
            self._rows.clear()

    def write(self) -> None:
        """Write the file; this process ends, so an error is only told."""
        if self.dropped or not (self._rows or self._blocks) or os.getpid() != self._process:
            return
        try:
            self._read()
            values = np.concatenate(self._blocks)
            facts = self._facts()
            if facts is not None and self._folder.is_dir():
                with atomic_write(self._folder / TRACE_FILE) as file:
                    file.write(to_bytes(facts, values))
        except Exception as error:  # noqa: BLE001 - the user's training has ended well
            warnings.warn(f"the run's variances were not kept for the search: {error}", stacklevel=2)

    def _facts(self) -> ScriptFacts | None:
        """Return the facts; None where the FLOPs of a layer were not seen."""
        totals = totals_of(self._record.stretches)
        shares = self._flops.shares(len(self._trains))
        if not totals["backward_flops"] or any(not any(shares[n] for n in numbers) for numbers in self._layers):
            return None
        trains = mask_text(self._trains)
        masks = {trains}
        for _, blueprint in self._blueprints:
            for unit in blueprint.plan.units:
                stopped = set(blueprint.stopped_numbers(unit.end))
                masks.add(mask_text([on and n not in stopped for n, on in enumerate(self._trains)]))
        backward_flops = totals["backward_flops"] / totals["steps"]
        dense = backward_units(shares, self._trains, self._trace)

        def backward_of(mask: str) -> int:
            return round(backward_flops * backward_units(shares, [digit == "1" for digit in mask], self._trace) / dense)

        return ScriptFacts(
            signals=[variance_name(numbers) for numbers in self._layers],
            layer_names=self._names,
            trains=trains,
            weight_decays=self._record.weight_decays,
            blueprints=[(key, blueprint.to_dict()) for key, blueprint in self._blueprints],
            forward_flops=round(totals["forward_flops"] / totals["steps"]),
            backward_flops={mask: backward_of(mask) for mask in sorted(masks)},
        )


def _trains_elsewhere(gradskip: SkippingStep) -> bool:
    model, own = gradskip.numbering.model, {id(p) for p in gradskip.parameters}
    return model is not None and any(p.requires_grad and id(p) not in own for p in model.parameters())


def mask_text(trains: Sequence[bool]) -> str:
    """Return the digit 1 for each parameter that trains, else 0."""
    return "".join("1" if on else "0" for on in trains)


def backward_units(forward: Sequence[float], trains: Sequence[bool], trace: ModelTrace | None) -> float:
    """Return what a backward pass costs, in the unit of the forward cost of each parameter's layer.

    Without a trace every parameter is downstream of those before it.

    >>> backward_units([1, 2, 4], [True, True, True], None), backward_units([1, 2, 4], [False, True, True], None)
    (13.0, 10.0)
    """
    total, before, training = 0.0, False, 0
    for number, on in enumerate(trains):
        training |= on << number
    for number, (cost, on) in enumerate(zip(forward, trains, strict=True)):
        upstream = before if trace is None else bool(trace.upstream[number] & training)
        total += cost * (on + upstream)
        before = before or on
    return total


# --- The steps of one optimizer, and those of all optimizers of the process -----------------------------------------

#: An optimizer without a step in this many latest steps of the process is no longer waited for.
_PATIENCE = 32


class StepRecord:
    """Record of the steps of an optimizer with Gradient-Skip, from construction on."""

    def __init__(self, gradskip: SkippingStep, process: ProcessRecord, given_model: nn.Module | None = None) -> None:
        self._process = process
        self.gradskip = weakref.ref(gradskip)
        self.now = Stretch()  # that of the next step
        self.stretches = [self.now]  # in the order in which they began
        self._begun_with: dict[tuple[str, str], set[Size]] = {}  # sizes of first calls in measured steps, by stretch
        self._got: list[bool] = []  # whether parameters got gradients in the last step
        self._missing: dict[tuple[Any, ...], int] = {}  # tries that are left to measure a step that was not
        self._looks: dict[str, int] = {}  # number of measured steps, by what was stopped
        self._loop = 0  # of the stretch
        self._has_rows = False  # true once steps of one size have differed
        self._size: Size = ()  # of the step's inputs
        #: Whether something was computed before the first call of a model in a step, such as a frozen backbone.
        self.is_led: bool | None = None
        self.calls: WatchedCalls | None = None  # of the model, until the first step
        self.last_step = process.steps  # this optimizer's, counted over all steps of the process
        self.parameters = len(gradskip.parameters)
        model, last = gradskip.numbering.model, len(gradskip.parameters) - 1
        self.watch = list(watch_needed(gradskip.parameters, model))
        if model is None:
            self.unit_ends = [unit.end for unit in gradskip.blueprint.plan.units if unit.end < last]
        else:
            self.unit_ends = list(unit_ends(gradskip.parameters, model))
        self._order: ExecutionRecorder | None = None
        self._knows_order = False
        is_off = gradskip.settings.mode == "off" and not gradskip.numbering.is_sharded  # others have it recorded
        if os.environ.get(TRIAL_FOLDER) and is_off and given_model is not None and not is_compiled(given_model):
            self._order = ExecutionRecorder(model, gradskip.parameters)
        self.weight_decays = weight_decays(gradskip.optimizer)
        self._keep_facts(gradskip)
        gradskip.before.append(self._before)
        gradskip.after.append(self._after)
        gradskip.refresh()
        gradskip.on_stop.append(process.change)

    def _keep_facts(self, gradskip: SkippingStep) -> None:
        # Plain values without tensors, which outlive the optimizer.
        self.machine, self.events, self.blueprint = gradskip.machine, gradskip.events, gradskip.blueprint
        self.warned = gradskip.advice.texts

    @property
    def iteration(self) -> int:
        gradskip = self.gradskip()
        return self.machine.iteration if gradskip is None else gradskip.iteration

    @property
    def _goes_on(self) -> bool:
        return self.gradskip() is not None and self._process.steps - self.last_step <= _PATIENCE

    @property
    def wants_look(self) -> bool:
        """Return whether too few steps since the last change were measured, and another one is expected."""
        if self._looks.get(self.now.stopped, 0) >= MOST_LOOKS:
            return (self._process.steps + 1) % LOOK_EVERY == 0 and self._goes_on
        return (self.now.wants_look or any(self._missing.values())) and self._goes_on

    def wants_size(self, size: Size) -> bool:
        """Return whether a step of this input size should be measured: none was, and few enough others were."""
        stretch = self.now
        begun_with = self._begun_with.setdefault((stretch.stopped, stretch.frozen), set())
        others = sum(reads_of(other) == reads_of(size) for other in begun_with)
        most = SIZES_DENSE if stretch.dense else SIZES_STOPPED
        if size in begun_with or others >= most or not self._goes_on:
            return False
        begun_with.add(size)
        return True

    def note_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reads: bool) -> None:
        """Note a training call of a model through a forward cache, and whether its prefix's outputs are read."""
        self._process.inputs.note_pass(model, args, kwargs, reads)

    def _look_at_order(self) -> None:
        """Leave out units before which a layer trains at the first step: the backward pass would run on to it.

        Norms that are registered late are no layers: stops before them save the gradients of weights at least.
        """
        gradskip, self._knows_order = self.gradskip(), True
        assert gradskip is not None  # its optimizer steps
        trace = gradskip.numbering.trace
        if self._order is not None:
            trace = self._order.trace() if self._order.has_seen else None
            self._order.remove()
            self._order = None
        if trace is None:
            return
        gradskip.stops.look_at_user()
        matrices = {n for n, p in enumerate(gradskip.parameters) if p.dim() >= 2 and gradskip.stops.user_trains(n)}
        left = {end: sorted(trace.left_upstream(range(end + 1)) & matrices) for end in self.unit_ends}
        self.unit_ends = [end for end, before in left.items() if not before]
        if left and not self.unit_ends:
            names = [gradskip.numbering.name(n) for n in next(iter(left.values()))]
            gradskip.advice.say("front", names=some(names, 2))

    def _before(self, args: Any, kwargs: Any) -> None:
        if not self._knows_order:
            self._look_at_order()
        self._process.stepping = True
        if not has_closure(args, kwargs):
            self._take()  # what follows is the optimizer's own arithmetic

    def _after(self, args: Any, kwargs: Any) -> None:
        if has_closure(args, kwargs):
            self._take()  # it ran the training inside the step
        gradskip = self.gradskip()
        assert gradskip is not None  # its optimizer keeps it alive
        self._keep_facts(gradskip)
        stretch, size = self.now, self._size
        stretch.steps += 1
        stretch.counts[size] = stretch.counts.get(size, 0) + 1
        kind = (*stretch.key, size[:1])
        if stretch.lacks(size):
            self._missing.setdefault(kind, TRIES)
        else:
            self._missing.pop(kind, None)
        self._size = ()
        if self.calls is not None and not self.calls.were_seen:
            self._process.watch_parts(gradskip.parameters)
        self.calls = None
        self._process.end_step(self)

    def _take(self) -> None:
        """Take the FLOPs of the step, whose gradients are there, if they were counted."""
        self._look_at_gradients()
        self.is_led = self.is_led or self._process.is_led()
        seen = self._process.take()
        self._size = self._process.inputs.take() or self._size
        if seen is None:
            return
        self._missing = {kind: max(0, tries - 1) for kind, tries in self._missing.items()}
        self._looks[self.now.stopped] = self._looks.get(self.now.stopped, 0) + 1
        if self.now.differs(self._size, *seen):
            if len(self.now.sizes) >= LOOKS:  # they were alike, or of a whole row: what follows is another loop
                self.change_loop()
            else:
                self.now.row_begins, self._has_rows = len(self.now.sizes) + 1, True
        self.now.add(self._size, *seen, self._process.flops.left_flops)
        self._take_bytes(self.now)

    def _look_at_gradients(self) -> None:
        """Go on with another stretch where other parameters got gradients in this step than in the last one."""
        gradskip = self.gradskip()
        assert gradskip is not None  # its optimizer steps
        got = [parameter.grad is not None and parameter.requires_grad for parameter in gradskip.parameters]
        if got != self._got and not self._process.changed:  # else stops have taken some since
            self._got = got
            self.begin_stretch(self.now.stopped)

    def change_loop(self) -> None:
        """Begin stretches of another loop: what was measured before says nothing of it."""
        self._loop += 1
        self.begin_stretch(self.now.stopped)

    def _take_bytes(self, stretch: Stretch) -> None:
        gradskip = self.gradskip()
        assert gradskip is not None
        stretch.gradient_bytes = stretch.optimizer_bytes = 0  # the first step creates state that the next one updates
        state = gradskip.optimizer.state
        for parameter in gradskip.parameters:
            if parameter.grad is not None:
                size = parameter.nbytes
                kept = sum(t.nbytes for t in state.get(parameter, {}).values() if isinstance(t, Tensor))
                stretch.gradient_bytes += size
                stretch.optimizer_bytes += 2 * size + kept

    def begin_stretch(self, stopped: str) -> None:
        """Go on with the stretch that has these stops and left out what the last step did, or begin it."""
        new = Stretch(dense=not stopped, stopped=stopped, loop=self._loop, row_begins=0 if self._has_rows else None)
        gradskip = self.gradskip()
        if gradskip is None:
            new.still, new.frozen, new.unused = self.now.still, self.now.frozen, self.now.unused
        else:
            still = mask_of(gradskip.stops.numbers)
            frozen = mask_of(n for n, parameter in enumerate(gradskip.parameters) if not parameter.requires_grad)
            unused = mask_of(n for n, got in enumerate(self._got) if not got) & ~frozen
            new.still, new.frozen, new.unused = (f"{mask:x}" for mask in (still, frozen & ~still, unused & ~still))
        if self.now.steps == 0 and not self.now.sizes:
            self.stretches = [stretch for stretch in self.stretches if stretch is not self.now]
        known = next((s for s in self.stretches if s.key == new.key), None)
        alike = [s for s in self.stretches if s.stopped == stopped]
        if known is None and len(alike) >= MOST_STRETCHES:
            known = max(alike, key=lambda one: one.likeness(new))
        if known is None:
            self.stretches.append(new)
        self.now = known or new

    def end_training(self) -> None:
        """Measure nothing until the next step was taken, or a state loaded: counting slows down every operation."""
        self.last_step = -_PATIENCE - 1
        self._process.stop_looking()

    def state_dict(self) -> dict[str, Any]:
        return {"trial": os.environ.get(TRIAL_FOLDER), "stretches": [asdict(stretch) for stretch in self.stretches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved steps; in a search from those of this trial.

        In a process that has taken steps already, which count, they say what this optimizer's cost, if it has none.
        """
        trial = os.environ.get(TRIAL_FOLDER)
        self.last_step = self._process.steps
        is_new = trial is None or self._process.steps == 0
        goes_on = not is_new and any(stretch.steps for stretch in self.stretches)
        if not isinstance(state, Mapping) or state["trial"] != trial or goes_on:
            return
        again: dict[str, Any] = {} if is_new else {"steps": 0, "counts": {}}
        self.stretches = [Stretch(**{**one, **again, "frozen": one.get("frozen") or "0"}) for one in state["stretches"]]
        self.now, self._looks, self._begun_with = self.stretches[-1], {}, {}
        self._loop = max(stretch.loop for stretch in self.stretches)
        self._has_rows = any(stretch.row_begins is not None for stretch in self.stretches)
        self._process.begin_step()


class ProcessRecord:
    """Record of the steps of all optimizers with Gradient-Skip in a process, including collected optimizers."""

    def __init__(self) -> None:
        self.flops = StepFlops()
        self.inputs = InputSizes(self._first_call, self._evaluation, self.stop_looking)
        self.records: list[StepRecord] = []
        self.steps = 0  # of all optimizers
        self._since: tuple[int, int] | None = None  # FLOPs at the step's begin; None: not counted
        self._lead: int | None = None  # FLOPs of the step before its first call of a model; None: none came
        self._ended = self._is_late = False  # whether an evaluation ended the step's count; whether a call began it
        self.changed = False  # true once the stopped layers did in this step
        self.stepping = False  # true while an optimizer steps
        self.has_model = False  # true if every optimizer was given its model
        self.has_norms = False  # true if one of these has norms with statistics of an earlier training
        self.trace: ScriptTrace | None = None  # of the only optimizer's run, if the search asks for it

    def add(self, gradskip: SkippingStep, given_model: nn.Module | None = None) -> StepRecord:
        record = StepRecord(gradskip, self, given_model)
        self.has_model = given_model is not None and (self.has_model or not self.records)
        self.has_norms |= given_model is not None and any(map(has_trained_statistics, given_model.modules()))
        record.calls = self.inputs.watch(gradskip.parameters, given_model)
        if self.trace is not None:
            self.trace.drop()  # settings stop layers of one optimizer, and these are several
        elif (watch := os.environ.get(TRACE_VARIABLE)) and not self.records and os.environ.get("RANK", "0") == "0":
            self._trace_run(gradskip, given_model, record, watch)
        self.records.append(record)
        record.begin_stretch(self.stopped())
        self.begin_step()
        return record

    def _trace_run(self, gradskip: SkippingStep, given_model: nn.Module | None, record: StepRecord, watch: str) -> None:
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
        if in_backward():
            self.flops.trains_in_backward = True
            return
        wanting = [record for record in self.records if record.wants_size(size) or record.wants_look]
        if self._lead is None:
            self._lead = 0 if self._since is None else self._counted()
            if self._since is not None and not self._lead:
                self._begin_count()  # anew: weights may have been detached since the last step, as for a checkpoint
        if wanting and self._since is None and not any(record.is_led for record in self.records):
            if not self.flops.at_work:
                self.flops.begin()
            self._begin_count()
            self._is_late = True

    def _evaluation(self) -> None:
        """End the count of a step that has no training call yet, if its first one is known to begin it.

        What runs in a reentrant checkpoint is no evaluation; the step may begin with it.
        """
        if self._since is None and not self._ended:
            return
        if in_autograd_function():
            self._first_call(())
        elif (self._since is not None or self.flops.at_work) and all(record.is_led is False for record in self.records):
            self.stop_looking()
            self._ended = True

    def _counted(self) -> int:
        """Return the FLOPs since the count's begin."""
        return self.flops.forward_flops + self.flops.backward_flops - sum(self._since or ())

    def is_led(self) -> bool | None:
        """Return whether something was computed in this step before its first call of a model; None: not known."""
        if self._since is None:
            return True if self._ended and self._lead is None else None
        return None if self._is_late else bool(self._counted() if self._lead is None else self._lead)

    def _begin_count(self) -> None:
        self._since = (self.flops.forward_flops, self.flops.backward_flops)
        skips = (skip for record in self.records if (skip := record.gradskip()) is not None)
        self.flops.begin_step([skip.parameters[number] for skip in skips for number in skip.stops.numbers])

    def watch_parts(self, parameters: Sequence[Tensor]) -> None:
        """Watch the modules that own these parameters; sizes so far were without their calls."""
        self.inputs.watch_parts(parameters)
        for record in self.records:
            record.change_loop()
            record.is_led = None

    def stop_looking(self) -> None:
        """Leave this step uncounted, unless its training is yet to begin.

        Counting slows down every operation, and `torch.jit.trace` takes results for constants meanwhile. In inference
        mode the counter stays on until later: torch, when it leaves that mode, takes those for active that were before.
        """
        if not torch.is_inference_mode_enabled():
            self.flops.end()
        self._since = None

    def take(self) -> tuple[int, int] | None:
        """Return the step's FLOPs (forward, backward) and end their count; None if not all were counted."""
        if self._since is None:
            return None
        (forward, backward), self._since = self._since, None
        self.flops.end_step()
        return self.flops.forward_flops - forward, self.flops.backward_flops - backward

    def end_step(self, record: StepRecord) -> None:
        self.stepping = False
        self.flops.forget_copies()
        self.steps += 1
        record.last_step = self.steps
        self._end_count()
        if self.changed:
            self._begin_stretches()
        self.settle()

    def change(self) -> None:
        """Note that the set of stopped layers changed, within a step that still has all gradients or between two."""
        self.changed = True
        if not self.stepping:
            self._begin_stretches()
            self.settle()

    def _begin_stretches(self) -> None:
        self.changed = False
        stopped = self.stopped()
        for record in self.records:
            record.begin_stretch(stopped)

    def stopped(self) -> str:
        """Return what the optimizers have stopped, as text; empty if nothing."""
        skips = ((number, record.gradskip()) for number, record in enumerate(self.records))
        return " ".join(
            f"{number}:{mask_of(skip.stops.numbers):x}" for number, skip in skips if skip is not None and skip.stops.any
        )

    def begin_step(self) -> None:
        """Begin a step with what comes now: what came before is no part of it."""
        self._end_count()
        self.settle()

    def _end_count(self) -> None:
        self._since = self._lead = None
        self._ended = self._is_late = False

    def settle(self) -> None:
        """Switch the counter on if a step is to be measured, else off."""
        wanted = any(record.wants_look for record in self.records) and not torch.is_inference_mode_enabled()
        if not wanted:
            self.stop_looking()
        elif not self.flops.at_work:
            self.flops.begin()
            self._since = None
        if wanted and self._since is None and not self.stepping:
            self._begin_count()

    def summary(self, processes: int = 1) -> dict[str, Any] | None:
        """Return the totals of all optimizers so far, in plain types; None without optimizers.

        Layers are those of the latest optimizer with the most parameters, units those that every optimizer can stop;
        FLOPs and bytes are those of all ``processes``.
        """
        if not self.records:
            return None
        totals = [totals_of(record.stretches) for record in self.records]
        iterations = [record.iteration for record in self.records]
        largest = max(reversed(self.records), key=lambda record: record.parameters)
        names, fewest = largest.blueprint.names, min(record.parameters for record in self.records)
        several = len(self.records) > 1
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            **{name: processes * sum(t[name] for t in totals) for name in totals[0]},
            "steps": sum(t["steps"] for t in totals),
            "measured_steps": sum(t["measured_steps"] for t in totals),
            "sizes": len(
                {size[:3] for record in self.records for stretch in record.stretches for size in stretch.counts}
            ),
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
            "warned": {key: text for record in self.records for key, text in record.warned.items()},
            "parameters": largest.parameters,
            "layer_names": None if names is None else list(names),
            "unit_ends": [end for end in largest.unit_ends if end < fewest],
            "watch": largest.watch,
            "has_model": self.has_model,
            "has_norms": self.has_norms and self.has_model,
            "weight_decays": largest.weight_decays,
            "peak_memory_bytes": peak_bytes(torch.device("cuda" if on_gpu else "cpu")),
        }


#: Record of this process, where a search runs its script.
_PROCESS = ProcessRecord()


def start(gradskip: SkippingStep, given_model: nn.Module | None = None) -> StepRecord:
    """Count an optimizer until its process ends, for `process_summary`."""
    return _PROCESS.add(gradskip, given_model)


def process_summary(processes: int = 1) -> dict[str, Any] | None:
    """Return the summary of this process's optimizers for several that train together; None if there are none."""
    return _PROCESS.summary(processes)
