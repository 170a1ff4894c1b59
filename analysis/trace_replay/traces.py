"""What a study has recorded of its training: the stage tree of one root, ready for replay. Without torch.

Shapes: T steps of the full run, E steps of an epoch, K stages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.io.layout import Layout
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.layer_plan import Blueprint
from trainables.gradskip.replay import blueprint_key
from trainables.interventions import Intervention
from trainables.stage_tree.store import Stage, StageStore, roots

#: Counts up to here are exact in float64; larger ones are kept as Python's integers.
_EXACT_IN_FLOAT = 2**53


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """FLOPs of a run's steps with one set of parameters training. Every epoch costs the same."""

    forward: NDArray[Any]
    """(E + 1,) forward FLOPs of an epoch's first 0..E steps; int64, or Python integers where those are too large."""
    backward: NDArray[Any]
    """(E + 1,) the same of the backward pass."""

    @classmethod
    def of_epoch(cls, steps: Iterable[tuple[int, int, int]], total_steps: int) -> StepCosts:
        """From (count, forward FLOPs, backward FLOPs) of an epoch's steps in order."""
        runs = [(int(count), int(forward), int(backward)) for count, forward, backward in steps]
        epoch = sum(count for count, _, _ in runs)
        most = sum(count * (forward + backward) for count, forward, backward in runs) * (total_steps // epoch + 1)
        dtype = np.int64 if most <= _EXACT_IN_FLOAT else object
        counts = [count for count, _, _ in runs]

        def summed(values: list[int]) -> NDArray[Any]:
            return np.concatenate([np.zeros(1, dtype), np.cumsum(np.repeat(np.array(values, dtype), counts))])

        return cls(forward=summed([run[1] for run in runs]), backward=summed([run[2] for run in runs]))

    def before(self, steps: NDArray[np.int64] | int) -> tuple[Any, Any]:
        """FLOPs (forward and backward together, backward alone) of the run's first so many steps."""
        epochs, rest = np.divmod(np.asarray(steps, np.int64), len(self.forward) - 1)
        epochs = epochs.astype(self.forward.dtype)
        backward = epochs * self.backward[-1] + self.backward[rest]
        return epochs * self.forward[-1] + self.forward[rest] + backward, backward


@dataclass(frozen=True, kw_only=True)
class TraceStage:
    """One recorded stage."""

    recorded: Stage
    """Its signals and rows."""
    parent: int | None
    """Place of its parent among the trace's stages; None for the dense run."""
    intervention: Intervention | None
    """What leads to it from there."""
    children: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Places of its children, by iteration and action of their interventions."""

    @property
    def id(self) -> str:
        """Its id in the stage tree."""
        return self.recorded.id

    @property
    def start(self) -> int:
        """Its first own iteration."""
        return self.recorded.start

    @property
    def known_until(self) -> int:
        """Every iteration from `start` to before this one is recorded."""
        return self.recorded.known_until

    def result(self, total_steps: int) -> Mapping[str, Any] | None:
        """The row of the run that ends in this stage, without the method's columns; None if none did."""
        row = self.recorded.rows.get(total_steps)
        complete = self.known_until >= total_steps and row is not None and "accuracy" in row  # not of a diverged run
        return row if complete else None

    def signal(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """A dense signal over [start, known_until), and where it was recorded (what was not is NaN)."""
        values = self.recorded.dense(name)
        there = np.ones(len(values), dtype=bool)
        for place in np.flatnonzero(np.isnan(values)):
            there[place] = self.recorded.has(name, self.start + int(place))
        return values, there


@dataclass(frozen=True, kw_only=True)
class RunTrace:
    """One root's recorded training: the dense run and every stage that trials have trained from it."""

    root: str
    """The root's id."""
    run: Mapping[str, Any]
    """What its runs have in common: workload, epochs, seed, ..."""
    total_steps: int
    """Optimizer steps of the full run."""
    steps_per_epoch: int
    """Of an epoch."""
    layer_names: tuple[str, ...]
    """Names of the parameters by number."""
    trains: str
    """``1`` or ``0`` for each parameter by number: whether it trains at the start."""
    stages: tuple[TraceStage, ...]
    """The dense run first, parents before children."""
    facts: Mapping[str, Blueprint] = field(default_factory=dict)
    """What rules need to know of the model, by `facts_key`."""
    costs: Mapping[str, StepCosts] = field(default_factory=dict)
    """Costs of steps by the parameters that train, in the form of `trains`."""

    @property
    def dense(self) -> TraceStage:
        """The run without a method."""
        return self.stages[0]

    def dense_only(self) -> RunTrace:
        """The same without what trials have trained beyond the dense run, which grows while a search goes on."""
        return replace(self, stages=(replace(self.dense, children={}),))

    def blueprint(self, config: TrialConfig) -> Blueprint:
        """What the configuration's rule needs to know of the model.

        Raises:
            UserError: no trial of the study had this plan of layers.
        """
        facts = self.facts.get(facts_key(config))
        if facts is None:
            settings = config.gradskip_settings()
            rule = "the variance rule" if settings.mode == "auto" else "another rule than variance"
            raise UserError(
                f"the study has not recorded which layers {rule} stops with CAC_WATCH={','.join(settings.watch)} "
                f"CAC_WHOLE_UNITS={int(settings.whole_units)}: the command replay looks at the model itself, or run "
                "one trial with these"
            )
        return facts

    def costs_of(self, trains: str) -> StepCosts:
        """Costs of steps with these parameters training.

        Raises:
            UserError: they were never counted.
        """
        if trains not in self.costs:
            stopped = [name for name, at_first, now in zip(self.layer_names, self.trains, trains, strict=False)
                       if at_first != now]  # fmt: skip
            raise UserError(
                f"the study has not counted what a step costs with {', '.join(stopped) or 'nothing'} stopped "
                f"(costs of trains={trains}): the command replay counts it, or run one trial that stops there"
            )
        return self.costs[trains]


def facts_key(config: TrialConfig) -> str:
    """Configurations of one run with equal keys have equal blueprints."""
    return json.dumps(blueprint_key(config))


def load_trace(path: str | Path, *, root: str | None = None) -> RunTrace:
    """Read what a study has recorded, for `replay`.

    Args:
        path: the folder that a search wrote.
        root: id of one of the study's roots, or how it begins; None for the one with the most recorded steps. A study
            has one as a rule, and more after a change of code, data or machine.

    Raises:
        UserError: no study there, no recorded training in it, no such root, or its dense run is not complete.
    """
    layout = Layout(Path(path))
    layout.read_info()
    found = roots(layout.tree)
    if not found:
        raise UserError(
            f"{layout.root} has no recorded training ({layout.tree.name}/): search with sharing records it, as in "
            f"python -m tune_cac search --name {layout.root.name} (without --no-sharing)"
        )
    matching = [name for name in found if root is None or name.startswith(root)]
    if not matching:
        raise UserError(f"{layout.root} has no root {root!r}: give one of {', '.join(found)}, or its beginning")
    traces = [read_trace(StageStore(layout.tree, name)) for name in matching]
    trace = max(traces, key=lambda t: sum(stage.known_until - stage.start for stage in t.stages))
    if trace.dense.known_until < trace.total_steps:
        raise UserError(
            f"the run without a method is recorded for {trace.dense.known_until} of {trace.total_steps} steps in "
            f"{layout.root}, and replay needs all of it: finish the study's baseline with "
            f"python -m tune_cac search --resume {layout.root.name}"
        )
    return trace


def read_trace(store: StageStore) -> RunTrace:
    """The trace of one root, complete or not."""
    values = store.read("root.json")
    if values is None:
        raise UserError(f"{store.folder / 'root.json'} is missing or damaged: search on, which writes it anew")
    facts, costs = {}, {}
    for name in _names(store.folder):
        if name.startswith("facts-") and (found := store.read(name)) is not None and "plan" in found["facts"]:
            facts[json.dumps(found["key"])] = found["facts"]  # Gradient-Skip's; compression's have no plan of layers
        if name.startswith("costs-") and (found := store.read(name)) is not None:
            costs[found["trains"]] = StepCosts.of_epoch(found["steps"], values["total_steps"])
    return assemble(values, store.root, list(store.stages()), facts=facts, costs=costs)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder))
    except OSError:
        return []


def assemble(
    values: Mapping[str, Any],
    root: str,
    stages: Iterable[tuple[Stage, tuple[str, Intervention] | None]],
    *,
    facts: Mapping[str, Mapping[str, Any]],
    costs: Mapping[str, StepCosts],
) -> RunTrace:
    """A trace from its parts; stages that no path from the root leads to (a damaged file between) are left out.

    Args:
        values: of ``root.json``.
        root: the root's id, also of its first stage.
        stages: each with its parent's id and intervention, None for the first.
        facts: blueprints in plain types, by `facts_key`.
        costs: as in `RunTrace`.
    """
    by_id: dict[str, Stage] = {}
    below: dict[str, list[tuple[Intervention, str]]] = {}
    for stage, link in stages:
        by_id[stage.id] = stage
        if link is not None:
            below.setdefault(link[0], []).append((link[1], stage.id))
    dense = by_id.get(root) or Stage(Path(), root, 0)
    places = [_Place(stage=dense, parent=None, intervention=None)]
    for number, place in enumerate(places):  # grows while it is read: parents before children
        for intervention, child in sorted(below.get(place.stage.id, ()), key=lambda c: (c[0].iteration, c[0].action)):
            place.children.setdefault(intervention.iteration, {})[intervention.action] = len(places)
            places.append(_Place(stage=by_id[child], parent=number, intervention=intervention))
    return RunTrace(
        root=root,
        run=dict(values),
        total_steps=int(values["total_steps"]),
        steps_per_epoch=int(values["steps_per_epoch"]),
        layer_names=tuple(values["layer_names"]),
        trains=values["trains"],
        stages=tuple(
            TraceStage(recorded=p.stage, parent=p.parent, intervention=p.intervention, children=p.children)
            for p in places
        ),
        facts={key: Blueprint.from_dict(values) for key, values in facts.items()},
        costs=dict(costs),
    )


@dataclass(kw_only=True)
class _Place:
    stage: Stage
    parent: int | None
    intervention: Intervention | None
    children: dict[int, dict[str, int]] = field(default_factory=dict)
