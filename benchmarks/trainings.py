"""Trainings of benchmarks: one to its end, and a search's answer on seeds that no search has seen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from trainables.config import TrialConfig
from trainables.storage import atomic_write
from trainables.training.run import TrainingRun

#: Loss that is allowed, the default of a search by accuracy.
ALLOWED = 0.005


def last_row(config: TrialConfig) -> dict[str, Any]:
    """Return the last row of a training."""
    with TrainingRun(config) as training:
        while not training.finished:
            row = training.train_epoch()
    return row


def fresh_seeds(seed: int, count: int) -> range:
    """Return seeds for the answer of one search, which no other search has, nor any as its further seeds.

    Args:
        seed: of the search, or the first one of several.
        count: at most 1000.
    """
    return range(100_000 + 1000 * seed, 100_000 + 1000 * seed + count)


def fresh_losses(
    answer: TrialConfig, epochs: int, seeds: Sequence[int], folder: Path, processes: int = 2
) -> list[tuple[float, float]]:
    """Return loss, mean of validation and test accuracy's, and saving of an answer on each seed.

    Args:
        answer: its configuration.
        epochs: of the full run.
        seeds: to train it and the run without a method on.
        folder: keeps the rows of what was trained before.
        processes: that train at the same time.
    """
    same = {"workload": answer.workload, "workload_options": answer.workload_options}
    dense = TrialConfig(method="none", epochs=epochs, **same)
    configs = [replace(config, seed=seed) for seed in seeds for config in (dense, answer)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(partial(_kept_row, folder), configs))
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [
        (
            fmean(full[name] - row[name] for name in ("quality", "test_quality")),
            1 - row["executed_flops"] / full["executed_flops"],
        )
        for full, row in pairs
    ]


def share_kept(losses: Sequence[float], allowed: float = ALLOWED) -> float:
    """Return the share of losses that are within the allowed one."""
    return fmean(loss <= allowed + 1e-9 for loss in losses)


def _kept_row(folder: Path, config: TrialConfig) -> Mapping[str, Any]:
    """Return accuracies and FLOPs of a training, from the folder if they are there."""
    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    file = folder / "fresh" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if not file.exists():
        row = last_row(config)
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: row[name] for name in ("quality", "test_quality", "executed_flops")}
        with atomic_write(file) as written:
            written.write(json.dumps(kept).encode())
    found: Mapping[str, Any] = json.loads(file.read_text())
    return found
