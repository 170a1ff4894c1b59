"""Records signals of a run as it trains: weight variances at every step's start, and measurements by the rule itself.

Shapes: K layers; variances of a step (K,) on the device of the run, read by the host at decisions and for chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainables.gradskip.controller import GradientSkip
from trainables.gradskip.layers import make_plan, numbered
from trainables.gradskip.replay import signal_name, variance_name
from trainables.gradskip.signals import variance
from trainables.gradskip.variables import MEASURED_RULES
from trainables.interventions import MissingSignal
from trainables.stage_tree.store import Chunk
from trainables.training.run import TrainingRun


class SignalRecorder:
    """Record the signals of one run that has not started or was just loaded, in ascending order of its steps.

    Besides all convolutions and linear weights, the layers of ``watches``, values of ``CAC_WATCH``, are recorded.
    """

    def __init__(self, run: TrainingRun, watches: Iterable[Sequence[str]] = ()) -> None:
        self._gradskip: GradientSkip | None = getattr(run.method, "gradskip", None)
        self._layers = _recorded_layers(run, watches)
        self._run = run
        self._rows: list[tuple[tuple[str, ...], Tensor]] = []
        self._read: dict[int, dict[str, float]] = {}
        self._sparse: dict[str, dict[int, float]] = {}
        self._begin = run.step
        self._stopped_through, self._ahead = -1, frozenset[int]()
        if self._gradskip is not None and self._gradskip.settings.mode in MEASURED_RULES:
            settings = self._gradskip.settings
            self._gradskip.on_measured.append(
                lambda unit, number: self._measured(signal_name(settings, unit.watched), number)
            )

    def _measured(self, name: str, number: float) -> None:
        self._sparse.setdefault(name, {})[self._run.step] = number

    def before_step(self) -> None:
        """Record the step that is about to begin, without waiting for the device."""
        # Layers that run before stopped ones and were stopped with them by CAC_PREFIX_AUTOGRAD=0 no longer train, but
        # the rule has yet to decide on them.
        gradskip = self._gradskip
        if gradskip is not None and gradskip.stopped_through != self._stopped_through:
            self._stopped_through = gradskip.stopped_through
            ahead = gradskip.plan.order[self._stopped_through + 1 :] if self._stopped_through >= 0 else ()
            self._ahead = frozenset(ahead)
        alive = [
            (name, weights)
            for name, numbers, weights in self._layers
            if any(weight.requires_grad for weight in weights)
            or not self._ahead.isdisjoint(numbers)
            or self._run.step == 0  # of which others know nothing that has stopped before it
        ]
        values = [variance(weights) for _, weights in alive]
        names = tuple(name for name, _ in alive)
        self._rows.append((names, torch.stack(values) if values else torch.zeros(0)))

    def at(self, name: str, iteration: int) -> float:
        """Return a signal of a step since the last `cut`; waits for the device."""
        sparse = self._sparse.get(name, {}).get(iteration)
        if sparse is not None:
            return sparse
        place = iteration - self._begin
        if not 0 <= place < len(self._rows):
            raise MissingSignal(name)
        if iteration not in self._read:
            names, values = self._rows[place]
            self._read[iteration] = dict(zip(names, values.tolist(), strict=True))
        if name not in self._read[iteration]:
            raise MissingSignal(name)
        return self._read[iteration][name]

    def cut(self, rows: dict[int, dict[str, Any]]) -> Chunk:
        """Return everything recorded since the last cut as a chunk with these rows, and clear it."""
        begin, end = self._begin, self._begin + len(self._rows)
        names = tuple(dict.fromkeys(name for step_names, _ in self._rows for name in step_names))
        values = np.full((len(self._rows), len(names)), np.nan)
        column = {name: place for place, name in enumerate(names)}
        for step_names, steps in groupby(range(len(self._rows)), key=lambda step: self._rows[step][0]):
            alike = list(steps)
            if step_names:
                block = torch.stack([self._rows[step][1] for step in alike]).double().cpu().numpy()
                values[np.ix_(alike, [column[name] for name in step_names])] = block
        chunk = Chunk(
            begin=begin,
            end=end,
            names=names,
            values=values,
            sparse={name: tuple(sorted(found.items())) for name, found in self._sparse.items()},
            rows=rows,
        )
        self._begin = end
        self._rows.clear()
        self._read.clear()
        self._sparse.clear()
        return chunk


def _recorded_layers(
    run: TrainingRun, watches: Iterable[Sequence[str]]
) -> list[tuple[str, tuple[int, ...], list[Tensor]]]:
    """Return the signal, parameters' numbers and parameters of each layer whose variance is recorded."""
    parameters, _ = numbered(run.optimizer.param_groups, run.model)
    layers = [unit.watched for unit in make_plan(parameters, ("conv", "linear"), model=run.model).units]
    layers += run.method.watched_layers()
    for watch in watches:
        layers += (unit.watched for unit in make_plan(parameters, tuple(watch), model=run.model).units)
    found = {variance_name(numbers): tuple(numbers) for numbers in layers}
    return [(name, numbers, [parameters[n] for n in numbers]) for name, numbers in found.items()]
