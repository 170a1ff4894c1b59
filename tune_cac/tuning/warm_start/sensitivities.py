"""Pruning sensitivities of the trained baseline's layers, each pruned alone, for the ranges of a search.

They come from the baseline's run: its state at the start of the last epoch, pruned layer by layer and evaluated on the
validation split. The result is kept in the root's folder, so that a resumed search has the same ranges.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.quality import Quality, allowed_amount
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.stage_tree.store import StageStore

#: Pruning levels to try, more of them for models with fewer layers, and the most evaluations.
LEVELS = ((0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), (0.0, 0.5, 0.8, 0.9))
MOST_EVALUATIONS = 250
#: Least drop of the analysis, of an accuracy and relative to the value of another metric: layers pruned together
#: tolerate less than each alone, so a range may begin from a larger drop than is allowed.
LEAST_DROP, LEAST_RELATIVE_DROP = 0.01, "2%"


def _at_least(allowed_drop: float | str, quality: Quality, unpruned: float) -> float:
    """Return the drop of the analysis in the metric's unit."""
    least = allowed_amount(LEAST_DROP if quality.is_fraction else LEAST_RELATIVE_DROP, unpruned)
    return float(max(allowed_amount(allowed_drop, unpruned), least))


def baseline_sensitivities(
    tree: Path | str, root: str, base: TrialConfig, weight_names: tuple[str, ...], allowed_drop: float | str
) -> dict[str, float]:
    """Return sensitivities by weight; empty if the baseline's state was not kept or the model has too many layers.

    Args:
        tree: the study's ``tree`` folder.
        root: of the baseline's run.
        base: its configuration.
        weight_names: weights to prune.
        allowed_drop: that may be lost of the metric (`trainables.quality`).
    """
    store = StageStore(tree, root)
    name = f"sensitivities-{allowed_drop}.json"
    known = store.read(name)
    if known is not None:
        return {str(key): float(value) for key, value in known.items()}
    levels = next((tried for tried in LEVELS if len(tried) * len(weight_names) <= MOST_EVALUATIONS), None)
    if levels is None:
        return {}
    found = _analysed(store, tree, base, weight_names, levels, allowed_drop)
    try:
        store.write(name, found)  # also an empty result: another trial may store a state later
    except OSError as error:
        warnings.warn(f"the baseline's sensitivities cannot be kept: {error}", stacklevel=2)
    return found


def _analysed(
    store: StageStore,
    tree: Path | str,
    base: TrialConfig,
    weight_names: tuple[str, ...],
    levels: tuple[float, ...],
    allowed_drop: float | str,
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
                lambda model: evaluate_workload(
                    run.workload, model, "validation", run.device, loss_batches=0, metric=base.quality.name
                ),
                layers=list(weight_names),
                levels=levels,
            )
            proposals = proposed_sensitivities(
                rows,
                parameters_as_built(run.model),
                _at_least(allowed_drop, base.quality, rows[0].top1),
                base.quality,
            )
        except UserError as error:
            warnings.warn(f"no sensitivity analysis of the baseline: {error}", stacklevel=2)
            return {}
    return {proposal.parameter: round(proposal.sensitivity, 4) for proposal in proposals}
