"""Knowledge distillation (Hinton et al. 2015): temperature, weight of the distillation loss, and first epoch.

The teacher is fixed: ``--set distill_teacher=resnet56 --set distill_checkpoint=teacher.pt``.
"""

from __future__ import annotations

from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests

#: Temperatures and weights, grids.
TEMPERATURES, TEMPERATURE_STEP = (1.0, 8.0), 1.0
WEIGHTS, WEIGHT_STEP = (0.1, 0.9), 0.1
#: Latest first epoch, as a share of the run, on a grid of a tenth.
LATEST_START, GRID = 0.5, 10


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for temperature, weight and first epoch."""
    step = max(1, context.epochs // GRID)
    latest = int(LATEST_START * context.epochs) // step * step
    return {
        "distill_temperature": trial.suggest_float("distill_temperature", *TEMPERATURES, step=TEMPERATURE_STEP),
        "distill_weight": round(trial.suggest_float("distill_weight", *WEIGHTS, step=WEIGHT_STEP), 6),
        "distill_start_epoch": trial.suggest_int("distill_start_epoch", 0, latest, step=step),
    }


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the original's defaults: temperature 1, equal weights of both losses, from the first epoch on."""
    return {"distill_temperature": 1.0, "distill_weight": 0.5, "distill_start_epoch": 0}


def notes(context: SpaceContext) -> list[str]:
    """Return a line on how to give the teacher."""
    return ["needs a teacher: search --set distill_teacher=NAME and --set distill_checkpoint=FILE, or the latter alone"]


SPACE = Space(
    name="distillation",
    method="compression",
    suggest=suggest,
    start=start,
    meanings={
        "distill_temperature": "temperature of the softmax of teacher and student",
        "distill_weight": "weight of the distillation loss; that of the labels is 1 less it",
        "distill_start_epoch": "first epoch with the teacher",
    },
    notes=notes,
)
