"""What replay needs to know of a run beside its signals: shapes of the batches of an epoch, and FLOPs of its steps.

Files of a root (`store.StageStore.read`):
    shapes.json             run lengths over an epoch's steps: [[count, [[shape, dtype], ...]], ...]
    costs-<digest>.json     {"trains": one digit a parameter, "steps": [[count, forward_flops, backward_flops], ...]}
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from typing import Any

import torch

from trainables.config import TrialConfig
from trainables.stage_tree.store import StageStore
from trainables.training.cost import CostTable
from trainables.training.run import TrainingRun
from trainables.workloads.base import Batch


def facts_file(key: Hashable) -> str:
    """Name of the file with a method's facts, by `Method.facts_key`."""
    return f"facts-{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}.json"


def costs_file(trains: str) -> str:
    """Name of the file with the cost of steps in which these parameters train (one digit a parameter)."""
    return f"costs-{hashlib.sha256(trains.encode()).hexdigest()[:12]}.json"


def plain_shapes(epoch_shapes: Iterable[tuple[int, Batch]]) -> list[Any]:
    """Run lengths of batches in plain types."""
    return [
        [count, [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in batch]] for count, batch in epoch_shapes
    ]


def run_lengths(batches: Iterable[Batch]) -> list[tuple[int, Batch]]:
    """Batches as run lengths of their shapes, on the meta device."""
    found: list[tuple[int, Batch]] = []
    for batch in batches:
        count, last = found[-1] if found else (0, ())
        if [(t.shape, t.dtype) for t in last] == [(t.shape, t.dtype) for t in batch]:
            found[-1] = (count + 1, last)
        else:
            found.append((1, tuple(t.to("meta") for t in batch)))
    return found


def meta_batch(plain: Iterable[Any]) -> Batch:
    """A batch of these shapes on the meta device."""
    return tuple(torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in plain)


def ensure_costs(store: StageStore, config: TrialConfig, masks: Iterable[str]) -> None:
    """Count and write the costs of steps with these parameters training, where they are not known.

    Args:
        store: of a root that was trained at least one epoch.
        config: any configuration of the root.
        masks: one digit a parameter, by number: 1 where it trains.

    Raises:
        OSError: they cannot be written.
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
                cost = table.step(mask, meta_batch(plain))
                steps.append([count, cost.forward_flops, cost.backward_flops])
            store.write(costs_file(mask), {"trains": mask, "steps": steps})
