"""Automated gradual pruning of all weights of convolutions and linear layers (Zhu & Gupta 2017): how much, and when."""

from __future__ import annotations

import math
from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests
from trainables.savings import SPARSE

#: Final sparsities, a grid.
SPARSITIES, STEP = (0.3, 0.95), 0.05
#: Latest start and earliest end of pruning, as shares of the run's epochs, on a grid of a tenth.
LATEST_START, EARLIEST_END, GRID = 0.4, 0.5, 10
#: From this many epochs on, pruning every other epoch is tried, too.
LONG_RUN = 20


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for final sparsity, first and last epoch, and frequency."""
    start, end, step = _epochs(context)
    frequency = 2 if context.epochs >= LONG_RUN else 1
    return {
        "agp_weights": context.weight_names,
        "agp_initial_sparsity": 0.0,
        "agp_final_sparsity": round(trial.suggest_float("agp_final_sparsity", *SPARSITIES, step=STEP), 6),
        "pruning_start_epoch": trial.suggest_int("pruning_start_epoch", *start, step=step),
        "pruning_end_epoch": trial.suggest_int("pruning_end_epoch", *end, step=step),
        "pruning_frequency": trial.suggest_int("pruning_frequency", 1, frequency),
    }


def _epochs(context: SpaceContext) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Return the ranges of the first epoch and of the epoch after the last, and the step of their grid."""
    step = max(1, context.epochs // GRID)
    latest = int(LATEST_START * context.epochs) // step * step
    # Between the latest start and the earliest end two epochs prune, also if only every other epoch does.
    least = 3 if context.epochs >= LONG_RUN else 2
    earliest = min(context.epochs, max(latest + least, math.ceil(EARLIEST_END * context.epochs)))
    return (0, latest), (earliest, earliest + (context.epochs - earliest) // step * step), step


def start(context: SpaceContext) -> dict[str, Any]:
    """Return four fifths pruned, from the earliest start to the latest end."""
    (first, _), (_, last), _ = _epochs(context)
    return {
        "agp_final_sparsity": 0.8, "pruning_start_epoch": first, "pruning_end_epoch": last, "pruning_frequency": 1,
    }  # fmt: skip


SPACE = Space(
    name="agp",
    method="compression",
    suggest=suggest,
    start=start,
    start_is_published=False,
    meanings={
        "agp_final_sparsity": "share of each weight that is pruned in the end",
        "pruning_start_epoch": "first epoch that prunes",
        "pruning_end_epoch": "the epoch after the last that prunes",
        "pruning_frequency": "every how many epochs between them",
    },
    saving=SPARSE,
)
