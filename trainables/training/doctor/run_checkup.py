"""The doctor's findings on a run of one of our workloads, in our own loop."""

from __future__ import annotations

from trainables.config import TrialConfig
from trainables.runtime.isolation import kept_generators
from trainables.training.doctor.checks import (
    Finding,
    NetworkCalls,
    StepWatch,
    clipping,
    loading,
    of_model,
    slow_optimizer,
    waits,
)
from trainables.training.run import TrainingRun

#: Steps that are looked at, after two in which costs are counted.
STEPS = 2


def run_findings(config: TrialConfig, loader_share: float | None = None) -> list[Finding]:
    """Train a few steps of a run and return what makes it slower than it has to be.

    Args:
        config: of the run.
        loader_share: share of its steps that waits for batches, as `dry_run` measured it.
    """
    with TrainingRun(config) as run:
        run.begin_epoch()
        steps = min(run.workload.steps_per_epoch, 2 + STEPS)
        with NetworkCalls().recorded() as calls:
            for _ in range(min(2, steps)):
                run.train_step()
        with StepWatch(run.device) as watch:
            for _ in range(steps - 2):
                watch.begin_step()
                run.train_step()
        run.pause()
        with kept_generators([run.device]):
            # A loss that calls the model in parts gives it no arguments.
            findings, _ = of_model(run.model, calls.by_network.get(run.model), run.device)
        return [
            *waits(watch),
            *clipping(watch),
            *slow_optimizer(run.optimizer, run.device),
            *loading(None, loader_share),
            *findings,
        ]
