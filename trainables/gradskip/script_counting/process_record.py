"""Cost of the steps of a user's own training loop, counted from inside its optimizers with Gradient-Skip.

In a script only the optimizers observe the training, so a step lasts from the end of one `step()` in the process to
the end of the next, whichever optimizers take them. A few steps are measured after each change of the stopped layers,
and one of each new size of inputs (`input_sizes`); the others' cost follows from these, and they are not slowed down.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainables.gradskip.execution_order import ModelTrace, mask_of
from trainables.gradskip.layers import has_trained_statistics, make_plan, watch_needed
from trainables.gradskip.nothing_stops import weight_decays
from trainables.gradskip.numbering import Numbering, is_compiled
from trainables.gradskip.replay import Blueprint, layers_key, variance_name
from trainables.gradskip.script_counting.input_sizes import InputSizes, Size, WatchedCalls, fitted
from trainables.gradskip.script_counting.step_flops import StepFlops
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
from trainables.gradskip.stops import Reason, blueprint_of
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


# --- Total cost of an optimizer's steps, from some measured steps of each stretch with one set of stopped layers. Pure
# The median of the measured steps of a size of inputs stands for all of that size, or, where these differ (a penalty
# every few steps), the mean of many in a row; what others cost is fitted (`input_sizes.fitted`). Stops do not change
# the forward pass, and the backward pass of all sizes by one share. Steps that read from a forward cache have a
# forward pass of their own, alike in a stretch. The dense run has the layers frozen that the user has, and the loop
# that the step has: where both were measured under stops alone, what these save is the share that they saved before,
# or nothing where that is unknown.

#: Steps that are measured for each set of stopped layers and size of inputs: one of them may include an evaluation
#: without `torch.no_grad()`.
LOOKS = 3
#: Steps that are measured in a row where two of one size differ by more than a share.
LOOKS_IN_A_ROW, ALIKE = 100, 0.01
#: Further steps of a stretch that are measured, to find such differences, and each that is a multiple of a number.
LATER_LOOKS, LOOK_EVERY = frozenset(round(1.5**n) for n in range(4, 12)), 97
#: Most stretches that what the user freezes begins; behind them it is looked at no more.
MOST_STRETCHES = 64
#: Most sizes that are measured with nothing stopped, and with a set of layers stopped.
SIZES_DENSE, SIZES_STOPPED = 40, 8


@dataclass(kw_only=True)
class Stretch:
    """Steps of one optimizer with one set of stopped layers in the process, and of layers that the user froze."""

    steps: int = 0
    dense: bool = True  # true where nothing was stopped anywhere
    stopped: str = ""  # what was stopped in the process
    frozen: str = ""  # what the user froze of this optimizer
    loop: int = 0  # how often the loop had changed, so that it costs other FLOPs, or is seen by other sizes
    row_begins: int | None = None  # number of the first measured step of those in a row, which count alone
    forward_flops: list[int] = field(default_factory=list)  # of each measured step
    backward_flops: list[int] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)  # size of each measured step's inputs
    counts: dict[Size, int] = field(default_factory=dict)  # number of steps of each size
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def wants_look(self) -> bool:
        """Return whether the next step is to be measured."""
        looks, begin = len(self.sizes), self.row_begins
        in_a_row = begin is not None and looks - begin < LOOKS_IN_A_ROW
        return looks < LOOKS or in_a_row or self.steps + 1 in LATER_LOOKS or (self.steps + 1) % LOOK_EVERY == 0

    def differs(self, size: Size, forward_flops: int, backward_flops: int) -> bool:
        """Return whether another measured step of this size costs something else."""
        if self.row_begins is not None or size not in self.sizes:
            return False
        known = self.sizes.index(size)
        pairs = ((forward_flops, self.forward_flops[known]), (backward_flops, self.backward_flops[known]))
        return any(abs(new - old) > ALIKE * old for new, old in pairs)

    def add(self, size: Size, forward_flops: int, backward_flops: int) -> None:
        """Note a measured step."""
        self.sizes.append(size)
        self.forward_flops.append(forward_flops)
        self.backward_flops.append(backward_flops)


def totals_of(stretches: Sequence[Stretch]) -> dict[str, int]:
    """Return the total cost of the steps of one optimizer, in FLOPs and bytes.

    FLOPs were counted in ``measured_steps``; those of the others follow from them. ``dense_flops`` and
    ``dense_backward_flops`` are those of the same number of steps with nothing stopped.
    """
    measured = [s for s in stretches if s.backward_flops]
    seen = next((s for s in measured if s.dense), measured[0] if measured else stretches[0])
    names = (
        "forward_flops", "backward_flops", "dense_flops", "dense_backward_flops", "gradient_bytes", "optimizer_bytes"
    )  # fmt: skip
    totals = dict.fromkeys(names, 0.0)
    shares: dict[tuple[str, str], float] = {}  # of the backward pass that is left, by what is stopped and frozen
    for stretch in stretches:
        if stretch.backward_flops:  # one too short to be measured has the cost of the one before it
            seen = stretch
        own, own_forward = _typical([seen], "backward_flops"), _typical([seen], "forward_flops")
        reading = {size: flops for size, flops in own_forward.items() if _reads(size)}
        of_loop = [s for s in measured if s.loop == seen.loop]
        whole_forward = {size: flops for size, flops in _typical(of_loop, "forward_flops").items() if not _reads(size)}
        alike = [s for s in of_loop if s.frozen == seen.frozen]
        beside = [s for s in alike if s.dense] or (alike[:1] if seen.loop == 0 else [])
        key = seen.stopped, seen.frozen
        if beside or seen.loop == 0:
            dense = _typical(beside, "backward_flops")
            whole = sum(fitted(dense, size) for size in own)
            shares[key] = sum(own.values()) / whole if whole else 0.0
        else:
            if key not in shares:  # stopped since the loop has changed: beside a dense step of whatever size before
                earlier = [s for s in measured if s.dense and s.frozen == seen.frozen]
                before = fitted(_typical(earlier, "backward_flops"), ())
                shares[key] = min(1.0, fitted(own, ()) / before) if before else 1.0
            dense = {size: flops / (shares[key] or 1.0) for size, flops in own.items()}
        share = shares[key]
        for size, count in stretch.counts.items():
            computing = (*size[:3], 0) if size else ()
            full, forward = fitted(dense, computing), fitted(whole_forward, computing)
            executed = fitted(reading, size) if reading and _reads(size) else forward
            totals["forward_flops"] += count * executed
            # Where nothing was stopped the user froze what is read, and the dense run reads it, too.
            totals["dense_flops"] += count * ((executed if stretch.dense else forward) + full)
            totals["dense_backward_flops"] += count * full
            totals["backward_flops"] += count * next((own[s] for s in (size, computing) if s in own), share * full)
        totals["gradient_bytes"] += stretch.steps * seen.gradient_bytes
        totals["optimizer_bytes"] += stretch.steps * seen.optimizer_bytes
    return {
        "steps": sum(stretch.steps for stretch in stretches),
        "measured_steps": sum(len(stretch.sizes) for stretch in stretches),
        **{name: round(value) for name, value in totals.items()},
    }


def _typical(stretches: Iterable[Stretch], name: str) -> dict[Size, float]:
    """Return the FLOPs of a step by size: of those in a row the mean, else the median."""
    first: dict[Size, list[int]] = {}
    in_a_row: dict[Size, list[int]] = {}
    for stretch in stretches:
        for look, (size, flops) in enumerate(zip(stretch.sizes, getattr(stretch, name), strict=True)):
            counts = stretch.row_begins is not None and look >= stretch.row_begins
            (in_a_row if counts else first).setdefault(size, []).append(flops)
    medians = {size: float(median_low(values[:LOOKS])) for size, values in first.items()}
    return medians | {size: fmean(values) for size, values in in_a_row.items()}


def _reads(size: Size) -> int:
    """Return how many of a step's calls read from a cache."""
    return sum(size[3:])


# --- The steps of one optimizer, and those of all optimizers of the process -----------------------------------------

#: An optimizer without a step in this many latest steps of the process is no longer waited for.
_PATIENCE = 32


class StepRecord:
    """Record of the steps of an optimizer with Gradient-Skip, from construction on."""

    def __init__(self, gradskip: SkippingStep, process: ProcessRecord) -> None:
        self._process = process
        self.gradskip = weakref.ref(gradskip)
        self.stretches = [Stretch()]
        self._begun_with: dict[tuple[str, str], set[Size]] = {}  # sizes of first calls in measured steps, by stretch
        self._trained: list[bool] = []  # what required a gradient at the last step
        self._loop = 0  # of the stretch
        self._has_rows = False  # true once steps of one size have differed
        self._size: Size = ()  # of the step's inputs
        self.calls: WatchedCalls | None = None  # of the model, until the first step
        self.last_step = process.steps  # this optimizer's, counted over all steps of the process
        self.parameters = len(gradskip.parameters)
        model, last = gradskip.numbering.model, len(gradskip.parameters) - 1
        self.watch = list(watch_needed(gradskip.parameters, model))
        plan = gradskip.blueprint.plan
        if model is not None:  # units end behind their biases and norms
            watch = self.watch or Settings().watch
            plan = make_plan(gradskip.parameters, watch, model=model, whole_units=True)
        self.unit_ends = [unit.end for unit in plan.units if unit.end < last]
        self.weight_decays = weight_decays(gradskip.optimizer)
        self._keep_facts(gradskip)
        gradskip.before.append(self._before)
        gradskip.after.append(self._after)
        gradskip.refresh()
        gradskip.on_stop.append(process.change)

    def _keep_facts(self, gradskip: SkippingStep) -> None:
        # Plain values without tensors, which outlive the optimizer.
        self.machine, self.events, self.blueprint = gradskip.machine, gradskip.events, gradskip.blueprint

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
        return self.stretches[-1].wants_look and self._goes_on

    def wants_size(self, size: Size) -> bool:
        """Return whether a step of this input size should be measured: none was, and few enough others were."""
        stretch = self.stretches[-1]
        begun_with = self._begun_with.setdefault((stretch.stopped, stretch.frozen), set())
        others = sum(_reads(other) == _reads(size) for other in begun_with)
        most = SIZES_DENSE if stretch.dense else SIZES_STOPPED
        if size in begun_with or others >= most or not self._goes_on:
            return False
        begun_with.add(size)
        return True

    def read(self, model: nn.Module) -> None:
        """Note that the latest call of a model reads the outputs of its prefix from a forward cache."""
        self._process.inputs.read(model)

    def _before(self, args: Any, kwargs: Any) -> None:
        self._process.stepping = True
        self.look_at_user()
        if not has_closure(args, kwargs):
            self._take()  # what follows is the optimizer's own arithmetic

    def _after(self, args: Any, kwargs: Any) -> None:
        self._take()  # a closure ran the training inside the step
        gradskip = self.gradskip()
        assert gradskip is not None  # its optimizer keeps it alive
        self._keep_facts(gradskip)
        stretch = self.stretches[-1]
        stretch.steps += 1
        stretch.counts[self._size] = stretch.counts.get(self._size, 0) + 1
        self._size = ()
        if self.calls is not None and not self.calls.were_seen:
            self._process.watch_parts(gradskip.parameters)
        self.calls = None
        self._process.end_step(self)

    def _take(self) -> None:
        seen = self._process.take()
        stretch = self.stretches[-1]
        self._size = self._process.inputs.take() or self._size
        if seen is not None and stretch.differs(self._size, *seen):
            if len(stretch.sizes) >= LOOKS:  # they were alike: what follows is another loop
                self.change_loop()
                stretch = self.stretches[-1]
            else:
                stretch.row_begins = len(stretch.sizes) + 1
            self._has_rows = True
        if seen is not None:
            stretch.add(self._size, *seen)
            self._take_bytes(stretch)

    def look_at_user(self) -> None:
        """Begin another stretch where the user has frozen or unfrozen parameters."""
        gradskip = self.gradskip()
        if gradskip is None or len(self.stretches) >= MOST_STRETCHES:
            return
        trained = [parameter.requires_grad for parameter in gradskip.parameters]
        if trained != self._trained:
            self._trained = trained
            if self._frozen() != self.stretches[-1].frozen:
                self.begin_stretch(self._process.stopped())

    def change_loop(self) -> None:
        """Begin stretches of another loop: what was measured before says nothing of it."""
        self._loop += 1
        self.begin_stretch(self.stretches[-1].stopped)

    def _frozen(self) -> str:
        gradskip = self.gradskip()
        if gradskip is None:
            return self.stretches[-1].frozen
        frozen = [n for n, reason in gradskip.stops.reasons.items() if reason == Reason.USER]
        return f"{mask_of(frozen):x}" if frozen else ""

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
        """Go on with the stretch that has these stops and what the user has frozen now, or begin it."""
        frozen = self._frozen()
        if self.stretches[-1].steps == 0:
            self.stretches.pop()
        key = (stopped, frozen, self._loop)
        known = [place for place, s in enumerate(self.stretches) if (s.stopped, s.frozen, s.loop) == key]
        new = Stretch(dense=not stopped, stopped=stopped, frozen=frozen, loop=self._loop)
        new.row_begins = 0 if self._has_rows else None
        self.stretches.append(self.stretches.pop(known[0]) if known else new)

    def state_dict(self) -> dict[str, Any]:
        return {"trial": os.environ.get(TRIAL_FOLDER), "stretches": [asdict(stretch) for stretch in self.stretches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved steps; in a search from those of this trial, and if this process has taken none."""
        trial = os.environ.get(TRIAL_FOLDER)
        is_new = trial is None or self._process.steps == 0
        if is_new and isinstance(state, Mapping) and state["trial"] == trial:
            self.stretches = [Stretch(**stretch) for stretch in state["stretches"]]
            self._loop = max(stretch.loop for stretch in self.stretches)
            self._has_rows = any(stretch.row_begins is not None for stretch in self.stretches)


class ProcessRecord:
    """Record of the steps of all optimizers with Gradient-Skip in a process, including collected optimizers."""

    def __init__(self) -> None:
        self.flops = StepFlops()
        self.inputs = InputSizes(self._first_call, self._stop_looking)
        self.records: list[StepRecord] = []
        self.steps = 0  # of all optimizers
        self._since: tuple[int, int] | None = None  # FLOPs at the step's begin; None: not counted
        self._changed = False
        self.stepping = False  # true while an optimizer steps
        self.has_model = False  # true if every optimizer was given its model
        self.has_norms = False  # true if one of these has norms with statistics of an earlier training
        self.trace: ScriptTrace | None = None  # of the only optimizer's run, if the search asks for it

    def add(self, gradskip: SkippingStep, given_model: nn.Module | None = None) -> StepRecord:
        record = StepRecord(gradskip, self)
        self.has_model = given_model is not None and (self.has_model or not self.records)
        self.has_norms |= given_model is not None and any(map(has_trained_statistics, given_model.modules()))
        record.calls = self.inputs.watch(gradskip.parameters, given_model)
        if self.trace is not None:
            self.trace.drop()  # settings stop layers of one optimizer, and these are several
        elif (watch := os.environ.get(TRACE_VARIABLE)) and not self.records and os.environ.get("RANK", "0") == "0":
            self._trace_run(gradskip, given_model, record, watch)
        self.records.append(record)
        record.begin_stretch(self.stopped())
        self.settle()
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
        if len(self.records) == 1:  # of several nobody knows whose step begins
            self.records[0].look_at_user()
        wanting = [record for record in self.records if record.wants_size(size) or record.wants_look]
        if wanting and self._since is None:
            if not self.flops.at_work:
                self.flops.begin()
            self._since = (self.flops.forward_flops, self.flops.backward_flops)

    def watch_parts(self, parameters: Sequence[Tensor]) -> None:
        """Watch the modules that own these parameters; sizes so far were without their calls."""
        self.inputs.watch_parts(parameters)
        for record in self.records:
            record.change_loop()

    def _stop_looking(self) -> None:
        """Leave this step uncounted: `torch.jit.trace` takes results for constants while operations are counted."""
        self.flops.end()
        self._since = None

    def take(self) -> tuple[int, int] | None:
        """Return the step's FLOPs (forward, backward) and end their count; None if not all were counted."""
        if self._since is None:
            return None
        (forward, backward), self._since = self._since, None
        return self.flops.forward_flops - forward, self.flops.backward_flops - backward

    def end_step(self, record: StepRecord) -> None:
        self.stepping = False
        self.flops.forget_copies()
        self.steps += 1
        record.last_step = self.steps
        self._since = None
        if self._changed:
            self._begin_stretches()
        self.settle()

    def change(self) -> None:
        """Note that the set of stopped layers changed, within a step that still has all gradients or between two."""
        self._changed = True
        if not self.stepping:
            self._begin_stretches()
            self.settle()

    def _begin_stretches(self) -> None:
        self._changed = False
        stopped = self.stopped()
        for record in self.records:
            record.begin_stretch(stopped)

    def stopped(self) -> str:
        """Return what the optimizers have stopped, as text; empty if nothing."""
        skips = ((number, record.gradskip()) for number, record in enumerate(self.records))
        return " ".join(
            f"{number}:{mask_of(skip.stops.numbers):x}" for number, skip in skips if skip is not None and skip.stops.any
        )

    def settle(self) -> None:
        """Switch the counter on if a step is to be measured, else off."""
        wanted = any(record.wants_look for record in self.records)
        if not wanted:
            self._stop_looking()
        elif not self.flops.at_work:
            self.flops.begin()
            self._since = None
        if wanted and self._since is None and not self.stepping:
            self._since = (self.flops.forward_flops, self.flops.backward_flops)

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
