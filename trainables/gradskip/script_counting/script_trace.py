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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from trainables.gradskip.script_counting.stretches import StepTotals
from trainables.gradskip.script_counting.trace_file import DEFAULT_WATCH, TRACE_FILE, ScriptFacts, to_bytes
from trainables.gradskip.settings import Settings
from trainables.gradskip.signals import variance
from trainables.gradskip.status import Status

#: Steps whose variances stay on the device before the host reads them.
_STEPS_ON_DEVICE = 1000
#: Most variances that are kept; a longer run is not recorded.
MOST_VALUES = 20_000_000


class ScriptTrace:
    """Record an optimizer's run from its first step on, and write it when the process ends.

    Nothing is written where replay could not rely on it: several optimizers, parameters added or steps taken before,
    torch.compile (which hides the FLOPs), or more than `MOST_VALUES`.

    Args:
        gradskip: of the optimizer, switched off.
        given_model: the model that the user gave, with its wrappers; None for none.
        flops: counts the first steps of the process.
        watch: ``CAC_WATCH`` of the study's trials, or `DEFAULT_WATCH`.
        folder: where the file is written.
    """

    def __init__(
        self, gradskip: Status, given_model: nn.Module | None, flops: StepFlops, *, watch: str, folder: Path
    ) -> None:
        model = gradskip.numbering.model
        kinds = tuple(watch.split(",")) if watch != DEFAULT_WATCH else watch_needed(gradskip.parameters, model)
        watched = replace(Settings(), watch=kinds) if kinds else Settings()
        self._rules = (watched, replace(watched, stop_layer_num=(0,), stop_layer_itr=(0,)))
        self._gradskip: Status | None = gradskip
        self._flops, self._folder = flops, folder
        self._numbering = Numbering(gradskip.optimizer.param_groups, model, self._rules[0])
        if self._numbering.wants_trace and given_model is not None and not is_compiled(given_model):
            self._numbering.record_first_pass()
        self._trains = [p.requires_grad for p in gradskip.parameters]
        self._layers: list[tuple[str, list[Tensor]]] | None = None
        self._rows: list[Tensor] = []
        self._blocks: list[NDArray[np.float32]] = []
        flops.attribute(gradskip.parameters)
        gradskip.step.before.append(self._before)
        gradskip.step.refresh()
        self._process = os.getpid()
        atexit.register(self.write)

    def drop(self) -> None:
        """Record and write nothing."""
        atexit.unregister(self.write)
        if self._gradskip is not None:
            self._gradskip.step.before.remove(self._before)
            self._gradskip = None
            self._flops.attribute(())
            self._numbering.stop_recording()
            self._rows.clear()
            self._blocks.clear()

    def _before(self, *_: Any) -> None:
        assert self._gradskip is not None
        if self._layers is None:
            self._numbering.end_recording_at_step()
            self._numbering.stop_recording()
            self._numbering.order_by_trace()
            added = len(self._gradskip.parameters) != len(self._trains)
            if added or self._gradskip.machine.iteration > 0:  # the latter goes on from a checkpoint
                return self.drop()
            parameters = self._gradskip.parameters
            watched = [unit.watched for unit in self._blueprint(self._rules[0]).plan.units]
            self._layers = [(variance_name(numbers), [parameters[n] for n in numbers]) for numbers in watched]
            if not self._layers:
                return self.drop()
        self._rows.append(torch.stack([variance(weights) for _, weights in self._layers]))
        if len(self._rows) == _STEPS_ON_DEVICE:
            self._read()
            if len(self._layers) * _STEPS_ON_DEVICE * len(self._blocks) > MOST_VALUES:
                self.drop()

    def _read(self) -> None:
        if self._rows:
            self._blocks.append(torch.stack(self._rows).float().cpu().numpy())
            self._rows.clear()

    def _blueprint(self, settings: Settings) -> Blueprint:
        """Return what a rule of these settings needs to know of the model."""
        assert self._gradskip is not None
        self._numbering.settings = settings
        decisions = Decisions(self._gradskip.optimizer, settings, self._gradskip.advice)
        decisions.begin(self._numbering, self._gradskip.stops)
        return decisions.blueprint

    def write(self) -> None:
        """Write the file; this process ends, so an error is only told."""
        if self._gradskip is None or self._layers is None or os.getpid() != self._process:
            return
        try:
            self._read()
            values = np.concatenate(self._blocks)
            facts = self._facts(self._gradskip)
            # Skipped steps, of a scaler, and added parameters would shift the steps or numbers.
            if facts is not None and len(values) == self._gradskip.iteration and self._folder.is_dir():
                with atomic_write(self._folder / TRACE_FILE) as file:
                    file.write(to_bytes(facts, values))
        except Exception as error:  # noqa: BLE001 - the user's training has ended well
            warnings.warn(f"the run's variances were not kept for the search: {error}", stacklevel=2)

    def _facts(self, gradskip: Status) -> ScriptFacts | None:
        """Return the facts; None where the FLOPs of the weights are not known."""
        assert self._layers is not None
        record: Any = gradskip.step_record
        totals: StepTotals = record.totals()
        shares = self._flops.shares(len(self._trains))
        if len(gradskip.parameters) != len(self._trains) or not totals.backward_flops:
            return None
        blueprints = [self._blueprint(settings) for settings in self._rules]
        if any(not any(shares[n] for n in unit.watched) for unit in blueprints[0].plan.units):
            return None  # compiled code reads copies of the weights
        trains = mask_text(self._trains)
        masks = {trains}
        for plan in (blueprint.plan for blueprint in blueprints):
            for unit in plan.units:
                stopped = set(plan.order[: unit.end + 1])
                masks.add(mask_text([on and n not in stopped for n, on in enumerate(self._trains)]))
        backward_flops = round(totals.backward_flops / totals.steps)
        dense = backward_units(shares, self._trains, self._numbering.trace)
        return ScriptFacts(
            signals=[name for name, _ in self._layers],
            layer_names=gradskip.names or [f"parameter {n}" for n in range(len(self._trains))],
            trains=trains,
            weight_decays=record.weight_decays,
            blueprints=[
                (layers_key(settings), blueprint.to_dict())
                for settings, blueprint in zip(self._rules, blueprints, strict=True)
            ],
            forward_flops=round(totals.forward_flops / totals.steps),
            backward_flops={
                mask: round(
                    backward_flops
                    * backward_units(shares, [digit == "1" for digit in mask], self._numbering.trace)
                    / dense
                )
                for mask in sorted(masks)
            },
        )


def mask_text(trains: Sequence[bool]) -> str:
    """Return one digit for each parameter.

    >>> mask_text([True, False])
    '10'
    """
    return "".join("1" if on else "0" for on in trains)


def backward_units(forward: Sequence[float], trains: Sequence[bool], trace: ModelTrace | None) -> float:
    """Return what a backward pass costs, in the unit of the forward costs.

    >>> backward_units([1, 2, 4], [True, True, True], None), backward_units([1, 2, 4], [False, True, True], None)
    (13, 10)

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
