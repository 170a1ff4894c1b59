"""Recorder of a script's run without a method: weight variances at every step, layers, and what stops would save.

A search asks its baseline for it, so that it knows what a setting stops before the setting is trained. What a step
costs with some layers stopped is not measured but follows from the forward FLOPs of every weight: the gradient of a
weight and that of its input cost as much each, and the latter is needed only where something trains upstream. A weight
that is used several times counts as at its first use, so its stop may save less than this says.

Shapes: K layers of the variance rule.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainables.atomic_write import atomic_write
from trainables.gradskip.decisions import Decisions
from trainables.gradskip.layer_plan import Blueprint
from trainables.gradskip.layers import watch_needed
from trainables.gradskip.model_trace import ModelTrace
from trainables.gradskip.numbering import Numbering, is_compiled
from trainables.gradskip.replay import layers_key, variance_name
from trainables.gradskip.script_counting.step_flops import StepFlops
from trainables.gradskip.script_counting.stretches import LOOKS, StepTotals
from trainables.gradskip.script_counting.trace_file import DEFAULT_WATCH, TRACE_FILE, ScriptFacts, to_bytes
from trainables.gradskip.settings import Settings
from trainables.gradskip.signals import variance
from trainables.gradskip.status import Status

#: Steps whose variances stay on the device before the host reads them.
_STEPS_ON_DEVICE = 1000
#: Most variances that are kept; a longer run is not recorded.
MOST_VALUES = 20_000_000


class Steps(Protocol):
    """The part of an optimizer's `StepRecord` that is needed here."""

    @property
    def weight_decays(self) -> Sequence[float] | None: ...

    @property
    def iteration(self) -> int: ...

    def totals(self) -> StepTotals: ...


class ScriptTrace:
    """Record an optimizer's run from its first step on, and write it when the process ends.

    Nothing is written where replay could not rely on it: several optimizers, parameters added, frozen or thawed or
    steps taken before, parameters that train outside of the optimizer, layers whose FLOPs are not seen (torch.compile),
    or more than `MOST_VALUES`. Recording never ends a training, and keeps neither model nor optimizer alive.

    Args:
        gradskip: of the optimizer, switched off, its parameters whole.
        given_model: the model that the user gave, with its wrappers; None for none.
        record: counts the optimizer's steps.
        flops: counts the first steps of the process.
        watch: ``CAC_WATCH`` of the study's trials, or `DEFAULT_WATCH`.
        folder: where the file is written.
    """

    def __init__(
        self, gradskip: Status, given_model: nn.Module | None, record: Steps, flops: StepFlops, *, watch: str,
        folder: Path,
    ) -> None:  # fmt: skip
        self._gradskip: Callable[[], Status | None] = weakref.ref(gradskip)
        self._record, self._flops, self._folder = record, flops, folder
        self._rows: list[Tensor] = []
        self._blocks: list[NDArray[np.float32]] = []
        self._process = os.getpid()
        self._layers: list[tuple[int, ...]] = []
        self._trains: list[bool] = []
        self._blueprints: list[tuple[Any, Blueprint]] = []
        self._trace: ModelTrace | None = None
        self._names: list[str] = []
        self.dropped = False
        """True once nothing is recorded or written any more."""
        model = gradskip.numbering.model
        kinds = tuple(watch.split(",")) if watch != DEFAULT_WATCH else watch_needed(gradskip.parameters, model)
        watched = replace(Settings(), watch=kinds) if kinds else Settings()
        self._rules = (watched, replace(watched, stop_layer_num=(0,), stop_layer_itr=(0,)))
        numbering = Numbering(gradskip.optimizer.param_groups, model, watched)
        self._numbering: Numbering | None = numbering  # until the first step
        if numbering.wants_trace and given_model is not None and not is_compiled(given_model):
            numbering.record_first_pass()
        flops.attribute(gradskip.parameters)
        gradskip.step.before.append(self._before)
        gradskip.step.refresh()
        atexit.register(self.write)

    def drop(self) -> None:
        """Record and write nothing."""
        atexit.unregister(self.write)
        gradskip = self._gradskip()
        if gradskip is not None and self._before in gradskip.step.before:
            gradskip.step.before.remove(self._before)
        if self._numbering is not None:
            self._numbering.stop_recording()
        self._numbering, self.dropped = None, True
        self._flops.attribute(())
        self._rows.clear()
        self._blocks.clear()

    def _before(self, *_: Any) -> None:
        gradskip = self._gradskip()
        assert gradskip is not None  # its optimizer steps
        try:
            if not self._rows and not self._blocks and not self._begin(gradskip):
                return self.drop()
            if self._trains != [p.requires_grad for p in gradskip.parameters]:
                return self.drop()  # the user froze or thawed layers: the rule would follow
            if len(self._rows) < LOOKS:
                self._flops.attribute_moved(gradskip.parameters)
            parameters = gradskip.parameters
            self._rows.append(torch.stack([variance([parameters[n] for n in numbers]) for numbers in self._layers]))
            if len(self._rows) == _STEPS_ON_DEVICE:
                self._read()
                if len(self._layers) * _STEPS_ON_DEVICE * len(self._blocks) > MOST_VALUES:
                    self.drop()
        except Exception as error:  # noqa: BLE001 - parameters on several devices, a user's tensors: training goes on
            self.drop()
            warnings.warn(f"the run is not recorded for the search: {type(error).__name__}: {error}", stacklevel=2)

    def _begin(self, gradskip: Status) -> bool:
        """Take the layers before the first step; return whether the run can be recorded."""
        numbering = self._numbering
        if numbering is None or len(numbering.parameters) != len(gradskip.parameters):  # some were added
            return False
        if gradskip.machine.iteration > 0 or _trains_elsewhere(gradskip):  # the former goes on from a checkpoint
            return False
        if numbering.model is None and len(gradskip.optimizer.param_groups) > 1:  # nobody knows which come first
            return False
        numbering.end_recording_at_step()
        numbering.stop_recording()
        numbering.order_by_trace()
        gradskip.stops.look_at_user()
        self._trains = [p.requires_grad for p in gradskip.parameters]
        for settings in self._rules:
            numbering.settings = settings
            decisions = Decisions(gradskip.optimizer, settings, gradskip.advice)
            decisions.begin(numbering, gradskip.stops)
            self._blueprints.append((layers_key(settings), decisions.blueprint))
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
            # Steps that a fused optimizer skipped for a scaler would shift the others.
            if facts is not None and len(values) == self._record.iteration and self._folder.is_dir():
                with atomic_write(self._folder / TRACE_FILE) as file:
                    file.write(to_bytes(facts, values))
        except Exception as error:  # noqa: BLE001 - the user's training has ended well
            warnings.warn(f"the run's variances were not kept for the search: {error}", stacklevel=2)

    def _facts(self) -> ScriptFacts | None:
        """Return the facts; None where the FLOPs of a layer were not seen."""
        totals: StepTotals = self._record.totals()
        shares = self._flops.shares(len(self._trains))
        if not totals.backward_flops or any(not any(shares[n] for n in numbers) for numbers in self._layers):
            return None
        trains = mask_text(self._trains)
        masks = {trains}
        for plan in (blueprint.plan for _, blueprint in self._blueprints):
            for unit in plan.units:
                stopped = set(plan.order[: unit.end + 1])
                masks.add(mask_text([on and n not in stopped for n, on in enumerate(self._trains)]))
        backward_flops = totals.backward_flops / totals.steps
        dense = backward_units(shares, self._trains, self._trace)

        def backward_of(mask: str) -> int:
            return round(backward_flops * backward_units(shares, [digit == "1" for digit in mask], self._trace) / dense)

        return ScriptFacts(
            signals=[variance_name(numbers) for numbers in self._layers],
            layer_names=self._names,
            trains=trains,
            weight_decays=self._record.weight_decays,
            blueprints=[(key, blueprint.to_dict()) for key, blueprint in self._blueprints],
            forward_flops=round(totals.forward_flops / totals.steps),
            backward_flops={mask: backward_of(mask) for mask in sorted(masks)},
        )


def _trains_elsewhere(gradskip: Status) -> bool:
    """Return whether parameters of the model train that the optimizer does not have."""
    model, own = gradskip.numbering.model, {id(p) for p in gradskip.parameters}
    return model is not None and any(p.requires_grad and id(p) not in own for p in model.parameters())


def mask_text(trains: Sequence[bool]) -> str:
    """Return one digit for each parameter.

    >>> mask_text([True, False])
    '10'
    """
    return "".join("1" if on else "0" for on in trains)


def backward_units(forward: Sequence[float], trains: Sequence[bool], trace: ModelTrace | None) -> float:
    """Return what a backward pass costs, in the unit of the forward costs.

    >>> backward_units([1, 2, 4], [True, True, True], None), backward_units([1, 2, 4], [False, True, True], None)
    (13.0, 10.0)

    Args:
        forward: cost of the forward pass of each parameter's layer, by number.
        trains: whether each parameter trains.
        trace: what is upstream of what; None: every parameter of those before it.
    """
    total, before, training = 0.0, False, 0
    for number, on in enumerate(trains):
        training |= on << number
    for number, (cost, on) in enumerate(zip(forward, trains, strict=True)):
        upstream = before if trace is None else bool(trace.upstream[number] & training)
        total += cost * (on + upstream)
        before = before or on
    return total
