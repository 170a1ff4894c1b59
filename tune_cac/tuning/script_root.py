"""The root of a stage tree that a script's baseline leaves: signals, layers and costs, without checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from analysis.trace_replay.traces import OF_SCRIPT
from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.script_counting.trace_file import TRACE_FILE, from_bytes
from trainables.stage_tree.root import costs_file, facts_file, root_id
from trainables.stage_tree.store import Chunk, StageStore


def write_root(
    tree: Path | str, config: TrialConfig, row: Mapping[str, Any], told: Mapping[str, Any], content: bytes
) -> str:
    """Write the root and return its id.

    Args:
        tree: the study's ``tree`` folder, or its URI.
        config: of the baseline.
        row: its last one.
        told: its `RUN_FACTS`.
        content: of the file that its optimizer has written (`trace_file`).

    Raises:
        OSError: it cannot be written.
        UserError: the file is of another run than the reports.
        Exception: any error of a file of another kind or version.
    """
    facts, values = from_bytes(content)
    steps = len(values)
    if (steps, list(facts.layer_names)) != (told["total_steps"], told["layer_names"]):
        raise UserError(f"{TRACE_FILE} is of another run of {steps} steps than the reports")
    described = {
        "workload": config.workload,
        "workload_options": list(config.options),
        "epochs": config.epochs,
        "seed": config.seed,
        "threads": config.threads,
        "device": config.device,
        "steps_per_epoch": steps,  # all steps cost the same
        "total_steps": steps,
        **config.quality.fields(),
        "layer_names": list(facts.layer_names),
        "trains": facts.trains,
        "weight_decays": facts.weight_decays,
        OF_SCRIPT: True,
    }
    root = root_id({**described, "last": values[-1].tolist()})
    store = StageStore(tree, root)
    for layers, blueprint in facts.blueprints:
        key = ("gradskip", *layers)
        store.write(facts_file(key), {"key": key, "facts": blueprint})
    for mask, backward in facts.backward_flops.items():
        store.write(costs_file(mask), {"trains": mask, "steps": [[steps, facts.forward_flops, backward]]})
    store.write("root.json", described)
    chunk = Chunk(begin=0, end=steps, names=tuple(facts.signals), values=values.astype(np.float64), rows={steps: row})
    store.publish(store.first(), chunk, None)
    return root
