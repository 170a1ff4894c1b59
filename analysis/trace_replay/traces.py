"""Recorded training of a study: the stage tree of one root, prepared for replay. Without torch.

Shapes: T steps of the full run, E steps of an epoch, K stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.io.study_files import Layout
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.replay import FROM_START, Blueprint, acts_from_start, blueprint_key
from trainables.interventions import Intervention
from trainables.quality import Quality, quality_in
from trainables.stage_tree.store import Stage, StageStore, roots

# --- Results of the replay of n settings, and FLOPs that their stops save ---------------------------------------------
# A stop decided at iteration t with braking distance d takes effect after the update of step t + max(d, 1) - 1, so the
# steps from t + max(d, 1) on cost less.


#: Results of the replay of settings, see `nothing_stopped`.
Outcomes = SimpleNamespace


def nothing_stopped(count: int, trace: RunTrace, *, own: bool = True) -> Outcomes:
    """Return (n,) arrays of settings that have stopped nothing yet, to be filled while they are replayed.

    ``own`` says whether the trace's runs begin as theirs do (`RunTrace.begins`).

    Those are ``stops`` decided; ``stopped_through``, position of the last parameter stopped at the end, -1 for none;
    ``first_stop``, iteration of the first decision, -1 for none; ``events``, JSON of the stops without its
    brackets; ``spared`` and ``spared_backward``, FLOPs not executed; ``certain_until``, first iteration at which a
    value of another run was read, the run's length for none; ``stage``, index of the deepest recorded stage on the
    setting's path; ``own``, whether the path ends in that stage; ``unknown``, whether a value was needed that no stage
    has recorded, so that the rest of the run is not predicted.
    """
    flops = trace.costs_of(trace.trains).forward.dtype
    initial = {
        "stops": (int, 0), "stopped_through": (int, -1), "first_stop": (int, -1), "events": (object, ""),
        "spared": (flops, 0), "spared_backward": (flops, 0), "certain_until": (int, trace.total_steps),
        "stage": (int, 0), "own": (bool, own), "unknown": (bool, False),
    }  # fmt: skip
    return Outcomes(**{name: np.full(count, value, kind) for name, (kind, value) in initial.items()})


def take_outcomes(outcomes: Outcomes, rows: NDArray[np.int64], part: Outcomes) -> None:
    """Take the outcomes of some of the settings from elsewhere."""
    for name, values in vars(outcomes).items():
        values[rows] = getattr(part, name)


def trains_after(trace: RunTrace, blueprint: Blueprint, through: int) -> str:
    """Return which parameters train after all up to a position have stopped, in the form of `RunTrace.trains`.

    If no parameter is left, the last one stays in the graph so that the loss has a gradient, which is discarded. With
    ``CAC_PREFIX_AUTOGRAD=0``, running parameters before stopped ones stop, too; these depend on the model and are not
    removed here.
    """
    stopped = blueprint.stopped_numbers(through)
    flags = list(trace.trains)
    for number in stopped:
        flags[number] = "0"
    trained = [number for number in blueprint.plan.order[: through + 1] if trace.trains[number] == "1"]
    if "1" not in flags and trained:
        flags[trained[-1]] = "1"
    return "".join(flags)


def spared(trace: RunTrace, before: str, after: str, effective: NDArray[np.int64] | int) -> tuple[Any, Any]:
    """Return the FLOPs (all, backward) that a change of the training parameters saves, from a step to the end.

    ``before`` and ``after`` have the form of `RunTrace.trains`; ``effective`` is the first step (of each of m settings)
    that costs less, at most the run's length.
    """
    rest = []
    for trains in (before, after):
        costs = trace.costs_of(trains)
        whole, first = costs.before(trace.total_steps), costs.before(effective)
        rest.append((whole[0] - first[0], whole[1] - first[1]))
    return rest[0][0] - rest[1][0], rest[0][1] - rest[1][1]


#: Key of ``root.json``: the run is a script's, whose layers and costs are all that it left.
OF_SCRIPT = "of_script"
#: Counts up to this are exact in float64; larger ones are kept as Python integers.
_EXACT_IN_FLOAT = 2**53


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """FLOPs of a run's steps with one set of parameters training. Every epoch costs the same."""

    forward: NDArray[Any]
    """(E + 1,) forward FLOPs of an epoch's first 0..E steps; int64, or Python integers where those are too large."""
    backward: NDArray[Any]  # (E + 1,) the same for the backward pass

    @classmethod
    def of_epoch(cls, steps: Iterable[tuple[int, int, int]], total_steps: int) -> StepCosts:
        """Build from (count, forward FLOPs, backward FLOPs) of an epoch's steps in order."""
        runs = [(int(count), int(forward), int(backward)) for count, forward, backward in steps]
        epoch = sum(count for count, _, _ in runs)
        most = sum(count * (forward + backward) for count, forward, backward in runs) * (total_steps // epoch + 1)
        dtype = np.int64 if most <= _EXACT_IN_FLOAT else object
        counts = [count for count, _, _ in runs]

        def summed(values: list[int]) -> NDArray[Any]:
            return np.concatenate([np.zeros(1, dtype), np.cumsum(np.repeat(np.array(values, dtype), counts))])

        return cls(forward=summed([run[1] for run in runs]), backward=summed([run[2] for run in runs]))

    def before(self, steps: NDArray[np.int64] | int) -> tuple[Any, Any]:
        """Return the FLOPs (forward plus backward, backward alone) of the run's first `steps` steps."""
        epochs, rest = np.divmod(np.asarray(steps, np.int64), len(self.forward) - 1)
        epochs = epochs.astype(self.forward.dtype)
        backward = epochs * self.backward[-1] + self.backward[rest]
        return epochs * self.forward[-1] + self.forward[rest] + backward, backward


@dataclass(frozen=True, kw_only=True)
class TraceStage:
    """One recorded stage."""

    recorded: Stage  # recorded signals and rows
    parent: int | None  # index of its parent in the trace's stages; None for the dense run
    children: dict[int, dict[str, int]] = field(default_factory=dict)
    """Indices of its children, by iteration and action of their interventions."""

    @property
    def id(self) -> str:
        return self.recorded.id

    @property
    def start(self) -> int:
        """Return its first own iteration."""
        return self.recorded.start

    @property
    def known_until(self) -> int:
        """Return the end of its recorded range; every iteration in [start, known_until) is recorded."""
        return self.recorded.known_until

    def result(self, total_steps: int) -> Mapping[str, Any] | None:
        """Return the row of the run that ends in this stage, without the method's columns; None if no run does."""
        row = self.recorded.rows.get(total_steps)
        if self.known_until < total_steps or row is None or row.get("quality") is None:  # the last: it diverged
            return None
        return row

    def signal(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return a dense signal over [start, known_until), and a mask of recorded values (the others are NaN)."""
        values = self.recorded.dense(name)
        there = np.ones(len(values), dtype=bool)
        for place in np.flatnonzero(np.isnan(values)):
            there[place] = self.recorded.has(name, self.start + int(place))
        return values, there


@dataclass(frozen=True, kw_only=True)
class RunTrace:
    """Recorded training of one root: the dense run and every stage that trials have trained from it."""

    root: str  # id of the root
    run: Mapping[str, Any]  # common properties of its runs: workload, epochs, seed, ...
    total_steps: int  # optimizer steps of the full run
    steps_per_epoch: int  # optimizer steps of an epoch
    layer_names: tuple[str, ...]  # names of the parameters by number
    trains: str  # text with ``1`` or ``0`` for each parameter by number: whether it trains at the start
    stages: tuple[TraceStage, ...]  # stages, the dense run first, parents before children
    facts: Mapping[str, Blueprint] = field(default_factory=dict)
    """Facts about the model that rules need, by `facts_key`."""
    costs: Mapping[str, StepCosts] = field(default_factory=dict)
    """Costs of steps by the set of training parameters, in the form of `trains`."""

    @property
    def quality(self) -> Quality:
        return quality_in(self.run)

    @property
    def dense(self) -> TraceStage:
        return self.stages[0]

    def config_of(self, values: Mapping[str, Any]) -> TrialConfig:
        """Return a configuration of this run on the CPU, with fields that say what the method does."""
        return TrialConfig(
            workload=self.run["workload"],
            workload_options=tuple(self.run.get("workload_options", ())),
            epochs=self.run["epochs"],
            seed=self.run["seed"],
            threads=self.run["threads"],
            **values,
        )

    @property
    def from_start(self) -> dict[str, Any]:
        """Return the settings that act from its first step on; see `acts_from_start`."""
        return {name: self.run[name] for name in FROM_START if name in self.run}

    def begins(self, config: TrialConfig) -> bool:
        """Return whether the configuration's run is the recorded one until its method acts."""
        return acts_from_start(config) == self.from_start

    def dense_only(self) -> RunTrace:
        """Return the trace with the dense run as its only stage; the other stages grow during a search."""
        return replace(self, stages=(replace(self.dense, children={}),))

    @property
    def variances(self) -> list[str]:
        return [name for name in self.dense.recorded.names if name.startswith("variance:")]

    def blueprint(self, config: TrialConfig) -> Blueprint:
        """Return the facts about the model that the configuration's rule needs; UserError if they were not recorded."""
        facts = self.facts.get(facts_key(config))
        if facts is None:
            settings = config.gradskip_settings()
            rule = "the variance rule" if settings.mode == "auto" else "another rule than variance"
            way_out = "the command replay looks at the model itself, or run one trial with these"
            if self.run.get(OF_SCRIPT):
                way_out = f"search the script anew with --set CAC_WATCH={','.join(settings.watch)}"
            raise UserError(
                f"the study has not recorded which layers {rule} stops with CAC_WATCH={','.join(settings.watch)} "
                f"CAC_WHOLE_UNITS={int(settings.whole_units)}: {way_out}"
            )
        return facts

    @property
    def recorded_watch(self) -> tuple[str, ...]:
        """Return the kinds of layers (``CAC_WATCH``) whose order a script's run has recorded."""
        return tuple(json.loads(next(iter(self.facts)))[2])

    def costs_of(self, trains: str) -> StepCosts:
        """Return the costs of steps with these parameters training; UserError if they were never counted."""
        if trains not in self.costs:
            stopped = [name for name, at_first, now in zip(self.layer_names, self.trains, trains, strict=False)
                       if at_first != now]  # fmt: skip
            way_out = "the command replay counts it, or run one trial that stops there"
            if self.run.get(OF_SCRIPT):
                way_out = "of a script only stops at layers of CAC_WATCH are known, so train it with these settings"
            if len(stopped) > 4:
                stopped = [*stopped[:2], f"... {len(stopped) - 3} more", stopped[-1]]
            raise UserError(
                f"the study has not counted what a step costs with {', '.join(stopped) or 'nothing'} stopped: {way_out}"
            )
        return self.costs[trains]


def facts_key(config: TrialConfig) -> str:
    """Return a key; configurations of one run with equal keys have equal blueprints."""
    return json.dumps(blueprint_key(config))


def load_trace(path: str | Path, *, root: str | None = None, epochs: int | None = None) -> RunTrace:
    """Read the recorded training of a study, in the folder that a search wrote, for `replay`.

    Args:
        path: the folder.
        root: id of one of the study's roots, or a prefix of it; None for the longest run with the most recorded steps,
            if possible the baseline's. A study has one root for each number of epochs, more for
            ``CAC_NORM_STATISTICS=hold_all`` and ``CAC_LR_FACTOR``, and more after a change of code, data or machine.
        epochs: of the run; None for any.

    UserError: there is no study, no recorded training or no matching root, or the dense run is not complete.
    """
    layout = Layout(Path(path))
    layout.read_info()
    tree = layout.shared_tree
    found = roots(tree)
    if not found:
        raise UserError(
            f"{layout.root} has no recorded training ({layout.tree.name}/): search with sharing records it, as in "
            f"python -m tune_cac search --name {layout.root.name} (without --no-sharing)"
        )
    matching = [name for name in found if root is None or name.startswith(root)]
    if not matching:
        raise UserError(f"{layout.root} has no root {root!r}: give one of {', '.join(found)}, or its beginning")
    every = [read_trace(StageStore(tree, name)) for name in matching]
    traces = [trace for trace in every if epochs is None or trace.run.get("epochs") == epochs]
    if not traces:
        raise UserError(f"{layout.root} has no recorded run of {epochs} epochs")

    def rank(trace: RunTrace) -> tuple[int, bool, int]:
        steps = sum(stage.known_until - stage.start for stage in trace.stages)
        return trace.run.get("epochs", 0), not trace.from_start, steps

    trace = max(traces, key=rank)
    return complete(trace, layout.root)


def complete(trace: RunTrace, study: Path | str) -> RunTrace:
    """Return a trace whose dense run is complete; raise UserError, with the study's name, for another one."""
    if trace.dense.known_until < trace.total_steps:
        raise UserError(
            f"the run without a method is recorded for {trace.dense.known_until} of {trace.total_steps} steps in "
            f"{study}, and replay needs all of it: finish the study's baseline with "
            f"python -m tune_cac search --resume {study}"
        )
    return trace


def read_trace(store: StageStore) -> RunTrace:
    """Read the trace of one root, complete or not."""
    values = store.read("root.json")
    if values is None:
        raise UserError(
            f"root.json of {store.root} in {store.tree} is missing or damaged: search on, which writes it anew"
        )
    facts, costs = {}, {}
    for found in store.read_all("facts-"):
        if "plan" in found["facts"]:
            facts[json.dumps(found["key"])] = found["facts"]  # of Gradient-Skip; those of compression have no plan
    for found in store.read_all("costs-"):
        costs[found["trains"]] = StepCosts.of_epoch(found["steps"], values["total_steps"])
    return assemble(values, store.root, list(store.stages()), facts=facts, costs=costs)


def assemble(
    values: Mapping[str, Any],
    root: str,
    stages: Iterable[tuple[Stage, tuple[str, Intervention] | None]],
    *,
    facts: Mapping[str, Mapping[str, Any]],
    costs: Mapping[str, StepCosts],
) -> RunTrace:
    """Assemble a trace from its parts; stages without a path from the root (a damaged file between) are left out.

    Those are the contents of ``root.json``, the id of the root and its first stage, stages, each with its parent's id
    and intervention, None for the first, blueprints in plain types, by `facts_key`, and costs as in `RunTrace`.
    """
    by_id: dict[str, Stage] = {}
    below: dict[str, list[tuple[Intervention, str]]] = {}
    for stage, link in stages:
        by_id[stage.id] = stage
        if link is not None:
            below.setdefault(link[0], []).append((link[1], stage.id))
    dense = by_id.get(root) or Stage(None, "", root, 0)
    placed = [TraceStage(recorded=dense, parent=None)]
    for number, parent in enumerate(placed):  # the list grows during the loop: parents before children
        for intervention, child in sorted(below.get(parent.id, ()), key=lambda c: (c[0].iteration, c[0].action)):
            parent.children.setdefault(intervention.iteration, {})[intervention.action] = len(placed)
            placed.append(TraceStage(recorded=by_id[child], parent=number))
    return RunTrace(
        root=root,
        run=dict(values),
        total_steps=int(values["total_steps"]),
        steps_per_epoch=int(values["steps_per_epoch"]),
        layer_names=tuple(values["layer_names"]),
        trains=values["trains"],
        stages=tuple(placed),
        facts={key: Blueprint.from_dict(values) for key, values in facts.items()},
        costs=dict(costs),
    )
