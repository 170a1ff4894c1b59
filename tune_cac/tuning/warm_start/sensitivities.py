"""Sensitivities that the layers of the trained baseline bear alone, for the ranges of a search.

They are read off the baseline's run: its state at the begin of the last epoch, pruned layer by layer and evaluated on
the validation split. What was found is kept in the root's folder, so that a resumed search has the same ranges.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.store import StageStore

#: Levels that are tried, the more of them the fewer layers there are; at most so many evaluations.
LEVELS = ((0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), (0.0, 0.5, 0.8, 0.9))
MOST_EVALUATIONS = 250
#: Together the layers bear less than each alone, so that a range may begin from a larger drop than is allowed.
LEAST_DROP = 0.01


def seeded_sensitivities(
    tree: Path, root: str, base: TrialConfig, weight_names: tuple[str, ...], allowed_drop: float
) -> dict[str, float]:
    """Sensitivity by weight; empty where the baseline's state was not kept or the model has too many layers.

    Args:
        tree: the study's ``tree`` folder.
        root: of the baseline's run.
        base: its configuration.
        weight_names: weights to prune.
        allowed_drop: of accuracy, a fraction.
    """
    store = StageStore(tree, root)
    name = f"sensitivities-{allowed_drop:g}.json"
    known = store.read(name)
    if known is not None:
        return {str(key): float(value) for key, value in known.items()}
    levels = next((tried for tried in LEVELS if len(tried) * len(weight_names) <= MOST_EVALUATIONS), None)
    if levels is None:
        return {}
    found = _analysed(store, tree, base, weight_names, levels, max(allowed_drop, LEAST_DROP))
    try:
        store.write(name, found)  # nothing, too: another trial may leave such a state later
    except OSError as error:
        warnings.warn(f"the baseline's sensitivities cannot be kept: {error}", stacklevel=2)
    return found


def _analysed(
    store: StageStore,
    tree: Path,
    base: TrialConfig,
    weight_names: tuple[str, ...],
    levels: tuple[float, ...],
    allowed_drop: float,
) -> dict[str, float]:
    import torch

    from trainables.compression.masks import parameters_as_built
    from trainables.compression.sensitivity import evaluate_workload, proposed_sensitivities, sensitivity_analysis
    from trainables.stage_tree.packing import unpack
    from trainables.training.run import TrainingRun

    with TrainingRun(replace(base, device="cpu")) as run:
        last = run.total_steps - run.workload.steps_per_epoch
        data: Any = None
        checkpoints = Checkpoints(tree, 0)
        stage = store.first()
        for entry in checkpoints.entries(stage.id):
            if entry.step == last and data is None:
                data = checkpoints.read(stage.id, entry)
        if data is None:
            return {}
        state = unpack(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        run.model.load_state_dict(state["model"])
        try:
            rows = sensitivity_analysis(
                run.model,
                lambda model: evaluate_workload(run.workload, model, "validation", run.device, loss_batches=0),
                layers=list(weight_names),
                levels=levels,
            )
            proposals = proposed_sensitivities(rows, parameters_as_built(run.model), allowed_drop)
        except UserError as error:
            warnings.warn(f"no sensitivity analysis of the baseline: {error}", stacklevel=2)
            return {}
    return {proposal.parameter: round(proposal.sensitivity, 4) for proposal in proposals}
