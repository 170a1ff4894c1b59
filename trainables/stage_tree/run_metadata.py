"""Facts about a run that replay needs besides its signals: layers, batch shapes of an epoch, FLOPs of its steps.

Files of a root (`store.StageStore.read`):
    root.json               {facts that the runs share, "layer_names": [...], "trains": one digit per parameter,
                            "weight_decays": those of weights, null where the optimizer has none}
    facts-<digest>.json     {"key": attachment.metadata_key, "facts": facts about the model that a method needs}
    shapes.json             run lengths over an epoch's steps: [[count, [[shape, dtype], ...]], ...]
    costs-<digest>.json     {"trains": one digit per parameter, "steps": [[count, forward_flops, backward_flops], ...]}
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from trainables.attachment import metadata_key
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.advice.never_fires import weight_decays
from trainables.stage_tree.store import StageStore
from trainables.training.cost import CostTable
from trainables.training.run import TrainingRun
from trainables.workloads.base import Batch
from trainables.workloads.batch_shapes import run_lengths


def facts_file(key: Hashable) -> str:
    """Return the name of the file with a method's facts, by `attachment.metadata_key`."""
    return f"facts-{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}.json"


def method_facts(
    store: StageStore, config: TrialConfig, write: Callable[[str, Any], None] | None = None
) -> Mapping[str, Any]:
    """Return the facts about the model that a configuration's method needs.

    They are read from the store, or taken from a run built for this and then written.

    Args:
        store: store of the root.
        config: any configuration with these facts.
        write: writes a file; None for the store's `write`, which raises OSError.
    """
    key = metadata_key(config)
    name = facts_file(key)
    stored = store.read(name)
    if stored is None:
        with TrainingRun(config) as run:
            stored = {"key": key, "facts": run.method.model_metadata()}
        (write or store.write)(name, stored)
    facts: Mapping[str, Any] = stored["facts"]
    return facts


def costs_file(trains: str) -> str:
    """Return the name of the file with the cost of steps in which these parameters train (one digit per parameter)."""
    return f"costs-{hashlib.sha256(trains.encode()).hexdigest()[:12]}.json"


def plain_shapes(epoch_shapes: Iterable[tuple[int, Batch]]) -> list[Any]:
    """Return run lengths of batch shapes in plain types."""
    return [
        [count, [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in batch]] for count, batch in epoch_shapes
    ]


def root_files(root: Mapping[str, Any], run: TrainingRun) -> dict[str, Any]:
    """Return the contents of the files that describe a root, by name.

    Args:
        root: its facts (`root.root_facts`).
        run: any of its runs; the data is read again only if the run has not trained an epoch.
    """
    shapes = run.epoch_shapes
    if shapes is None:
        shapes = run_lengths(run.workload.train_batches(0, run.config.seed))
    described = {
        **root,
        "layer_names": [name for name, _ in run.model.named_parameters()],
        "trains": "".join("1" if trains else "0" for trains in run.trains_at_first),
        "weight_decays": weight_decays(run.optimizer),
    }
    return {"shapes.json": plain_shapes(shapes), "root.json": described}


def meta_batch(plain: Iterable[Any]) -> Batch:
    """Return a batch of these shapes on the meta device."""
    return tuple(torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in plain)


def ensure_costs(store: StageStore, config: TrialConfig, masks: Iterable[str]) -> None:
    """Count and write the costs of steps in which these parameters train, where they are not known.

    Args:
        store: store of a root that was trained for at least one epoch.
        config: any configuration of the root.
        masks: one digit per parameter, by number: 1 where it trains.

    Raises:
        OSError: they cannot be written.
        UserError: the workload's loss raised on a partly stopped model.
    """
    missing = [mask for mask in dict.fromkeys(masks) if store.read(costs_file(mask)) is None]
    shapes = store.read("shapes.json")
    if not missing or shapes is None:
        return
    with TrainingRun(config) as run:
        table = CostTable(run.workload, run.model)
        for mask in missing:
            for parameter, digit in zip(run.model.parameters(), mask, strict=True):
                parameter.requires_grad_(digit == "1")
            steps = []
            for count, plain in shapes:
                try:
                    cost = table.step(mask, meta_batch(plain))
                except Exception as error:
                    raise UserError(
                        f"the cost of steps with stopped layers cannot be counted: the loss of workload "
                        f"{config.workload} raised {type(error).__name__}: {error}".splitlines()[0]
                    ) from error
                steps.append([count, cost.forward_flops, cost.backward_flops])
            store.write(costs_file(mask), {"trains": mask, "steps": steps})
