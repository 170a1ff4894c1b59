"""Does training repeat bit for bit here? A forked run equals the run alone where it does."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from torch import Tensor

from trainables.config import TrialConfig
from trainables.training.run import TrainingRun


def differing_tensors(config: TrialConfig, steps: int = 8) -> list[str]:
    """Train a few steps at once, and again with a checkpoint in the middle; names of the weights that differ.

    Args:
        config: what to train; its device counts.
        steps: optimizer steps, >= 2, at most an epoch's.
    """
    with TrainingRun(config) as run:
        steps = min(steps, run.workload.steps_per_epoch)
        _train(run, steps)
        straight = _weights(run)
    with TrainingRun(config) as run:
        _train(run, steps // 2)
        file = io.BytesIO()
        torch.save(run.state_dict(), file)
    with TrainingRun(config) as run:
        file.seek(0)
        run.load_state_dict(torch.load(file, weights_only=True, map_location=run.device))
        _train(run, steps - steps // 2)
        forked = _weights(run)
    return [name for name, value in straight.items() if not torch.equal(value, forked[name])]


def _train(run: TrainingRun, steps: int) -> None:
    run.begin_epoch()
    for _ in range(steps):
        run.train_step()
    run.pause()


def _weights(run: TrainingRun) -> Mapping[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in run.model.state_dict().items()}
