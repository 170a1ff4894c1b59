"""Recorded runs for tests of replay: really trained ones, written as trials write them, and invented ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from analysis.io.study_files import Layout, StudyInfo
from analysis.trace_replay.traces import RunTrace, StepCosts, assemble, facts_key
from trainables.config import TrialConfig
from trainables.gradskip.replay import Blueprint, GradskipReplay, LayerPlan, Unit, stop_action
from trainables.interventions import Intervention
from trainables.stage_tree.store import Chunk, Stage, StageStore

#: Columns that are not the stage's own.
OWN_COLUMNS = ("stopped_through", "stop_events", "stage", "search_flops", "wall_time_s")
ROOT = "r" * 24


# --- really trained -------------------------------------------------------------------------------------------------


def new_study(folder: Path, config: TrialConfig) -> StageStore:
    """An empty study folder with an empty tree."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = Layout(folder)
    layout.write_info(
        StudyInfo(
            space="auto_thresholds", workload=config.workload, epochs=config.epochs, seed=config.seed, trials=1,
            allowed_drop=0.005, versions={},
        )
    )  # fmt: skip
    return StageStore(layout.tree, ROOT)


def train_and_record(store: StageStore, config: TrialConfig) -> dict[str, Any]:
    """Train a configuration alone and publish its stages; the last row."""
    from trainables.gradskip.signals import variance
    from trainables.training.run import TrainingRun

    with TrainingRun(config) as run:
        parameters = list(run.model.parameters())
        weights = {f"variance:{n}": p for n, p in enumerate(parameters) if p.dim() >= 2}
        values, rows = [], {}
        while not run.finished:
            run.begin_epoch()
            while not run.epoch_is_trained:
                values.append([float(variance([w])) for w in weights.values()])
                run.train_step()
            rows[run.step] = row = run.end_epoch()
        _publish(store, _interventions(run, config), tuple(weights), np.array(values), rows)
        if store.read("root.json") is None:
            store.write("root.json", root_values(run))
        if config.method != "none":
            key = json.loads(facts_key(config))
            store.write(
                f"facts-{abs(hash(facts_key(config)))}.json", {"key": key, "facts": run.method.model_metadata()}
            )
    return row


def root_values(run: Any) -> dict[str, Any]:
    """What root.json says."""
    return {
        "workload": run.config.workload,
        "epochs": run.config.epochs,
        "seed": run.config.seed,
        "threads": 1,
        "device": "cpu",
        "steps_per_epoch": run.workload.steps_per_epoch,
        "total_steps": run.total_steps,
        "layer_names": [name for name, _ in run.model.named_parameters()],
        "trains": "1" * len(list(run.model.parameters())),
    }


def _interventions(run: Any, config: TrialConfig) -> list[Intervention]:
    if config.method == "none":
        return []
    gradskip = run.method.gradskip
    ends = {unit.number: unit.end for unit in gradskip.blueprint.plan.units}
    manual = config.gradskip_settings().mode == "manual"
    return [
        Intervention(
            iteration=event.iteration,
            action=stop_action(
                config,
                gradskip.blueprint,
                gradskip.blueprint.plan.position_of_stop(event.layer) if manual else ends[event.layer],
                gradskip.settings.braking_distance,
            ),
        )
        for event in gradskip.events
    ]


def _publish(
    store: StageStore,
    interventions: list[Intervention],
    names: tuple[str, ...],
    values: np.ndarray,
    rows: Mapping[int, dict[str, Any]],
) -> None:
    stage, link = store.first(), None
    for intervention in [*interventions, None]:
        begin = stage.start
        end = len(values) if intervention is None else intervention.iteration + 1
        own = {
            step: {name: value for name, value in row.items() if name not in OWN_COLUMNS}
            for step, row in rows.items()
            if begin <= step < end or (intervention is None and step == end)
        }
        chunk = Chunk(begin=begin, end=end, names=names, values=values[begin:end], rows=own)
        store.publish(stage, chunk, link)
        if intervention is not None:
            stage, link = store.child(stage, intervention), (stage, intervention)


def count_costs(store: StageStore, config: TrialConfig, masks: Iterable[str]) -> None:
    """Write what steps cost with these parameters training, counted on real batches."""
    from trainables.training.flops import CostTable
    from trainables.training.run import TrainingRun

    with TrainingRun(TrialConfig(workload=config.workload, epochs=1, method="none")) as run:
        batches = list(run.workload.train_batches(0, config.seed))
        for mask in masks:
            table = CostTable(run.workload, run.model)
            for parameter, digit in zip(run.model.parameters(), mask, strict=True):
                parameter.requires_grad_(digit == "1")
            costs = [table.step(mask, batch) for batch in batches]
            steps = [[1, cost.forward_flops, cost.backward_flops] for cost in costs]
            store.write(f"costs-{abs(hash(mask))}.json", {"trains": mask, "steps": steps})


# --- invented -------------------------------------------------------------------------------------------------------


def invented_blueprint(layers: int, *, single_precision: bool = True) -> Blueprint:
    """A chain of layers of three parameters each (weight, scale, shift) and a classifier of two."""
    return Blueprint(
        plan=LayerPlan(
            order=tuple(range(3 * layers + 2)),
            units=tuple(Unit(number=3 * n, watched=(3 * n,), end=3 * n) for n in range(layers)),
        ),
        stoppable=layers,
        names=tuple(f"p{n}" for n in range(3 * layers + 2)),
        single_precision=single_precision,
    )


def invented_costs(trains: str, steps_per_epoch: int, total_steps: int, *, scale: int = 1) -> StepCosts:
    """Every training parameter costs its own number; the last step of an epoch is smaller."""
    backward = scale * sum((number + 1) * 7 for number, digit in enumerate(trains) if digit == "1")
    steps = [(steps_per_epoch - 1, 100 * scale, backward), (1, 31 * scale, backward // 3)]
    return StepCosts.of_epoch([run for run in steps if run[0]], total_steps)


def wandering(rng: random.Random, count: int) -> list[float]:
    """Variances that rise and fall, repeat, are zero, infinite or NaN now and then."""
    value, found = rng.choice([0.0, 1.0, 1.0, 1.0]), []
    for _ in range(count):
        value = max(0.0, value * rng.choice([1.0, 1.01, 0.99, 0.97, 1.02, 0.995]) + rng.choice([0.0, 0.0, 0.001]))
        found.append(rng.choice([value] * 60 + [0.0, float("nan"), float("inf")]))
    return found


def invented_trace(
    rng: random.Random,
    *,
    layers: int,
    total_steps: int,
    steps_per_epoch: int,
    trained: Iterable[TrialConfig] = (),
    single_precision: bool = True,
    scale: int = 1,
) -> RunTrace:
    """A dense run, and the stages of the configurations that were trained: some of them whole, some in part."""
    blueprint = invented_blueprint(layers, single_precision=single_precision)
    names = tuple(f"variance:{3 * n}" for n in range(layers))

    def stage(name: str, start: int, end: int) -> Stage:
        made = Stage(None, "", name, start)
        values = np.array([wandering(rng, end - start) for _ in names]).T.reshape(end - start, len(names))
        accuracy = {"quality": rng.random(), "compute_saved": 0.123, "backward_saved": 0.321}
        made.add(Chunk(begin=start, end=end, names=names, values=values, rows={end: accuracy}))
        return made

    stages: dict[str, tuple[Stage, Any]] = {ROOT: (stage(ROOT, 0, total_steps), None)}
    for config in trained:
        here, replay = stages[ROOT][0], GradskipReplay(config, blueprint)
        while (intervention := replay.advance(here, here.known_until)) is not None:
            child = f"{here.id}/{intervention.iteration}{intervention.action}"
            if child not in stages:
                start = intervention.iteration + 1
                end = rng.choice([total_steps, total_steps, rng.randint(start, total_steps)])
                stages[child] = (stage(child, start, end), (here.id, intervention))
            here = stages[child][0]
    masks = {"1" * (3 * layers + 2)} | {
        "0" * (3 * n + 1) + "1" * (3 * (layers - n) + 1) for n in range(layers)
    }  # fmt: skip
    return assemble(
        {
            "total_steps": total_steps,
            "steps_per_epoch": steps_per_epoch,
            "layer_names": blueprint.names,
            "trains": "1" * (3 * layers + 2),
        },
        ROOT,
        stages.values(),
        facts={facts_key(config): blueprint.to_dict() for config in (TrialConfig(), _LINEAR)},
        costs={mask: invented_costs(mask, steps_per_epoch, total_steps, scale=scale) for mask in masks},
    )


_LINEAR = TrialConfig(CAC_RULE="linear", CAC_RULE_END_ITR=10)
