"""The forward cache of a run, where its configuration asks for one."""

from __future__ import annotations

from torch import nn

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.gradskip.forward_cache import ForwardCache
from trainables.workloads.base import Workload


def check_forward_cache(config: TrialConfig, workload: Workload) -> None:
    """Raise UserError if the config asks for a forward cache and the workload's inputs do not repeat."""
    if config.forward_cache_mb == 0:
        return
    if workload.train_samples is None or workload.train_sample_indices(0, config.seed) is None:
        raise UserError(
            f"forward_cache_mb must be 0 for workload {workload.name}, whose inputs do not repeat, "
            f"got {config.forward_cache_mb}"
        )


def open_forward_cache(config: TrialConfig, workload: Workload, model: nn.Module) -> ForwardCache | None:
    """Return the run's forward cache, not entered yet; None if the configuration asks for none.

    Raises:
        UserError: the workload's inputs do not repeat.
    """
    if config.forward_cache_mb == 0:
        return None
    check_forward_cache(config, workload)
    assert workload.train_samples is not None
    return ForwardCache(
        model,
        samples=workload.train_samples,
        budget_bytes=config.forward_cache_mb * 10**6,
        chain=workload.forward_chain(model),
    )
