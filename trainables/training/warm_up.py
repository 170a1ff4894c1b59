"""Training steps on a throw-away copy, once per process, workload and device.

In the first steps of a process libraries choose kernels and allocators grow. The first trial is the baseline, to which
times are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable

import torch
from torch import nn

from trainables.runtime.generators import kept_generators
from trainables.workloads.base import Workload

_WARM: set[Hashable] = set()


def warm_up(workload: Workload, model: nn.Module, device: torch.device, seed: int) -> None:
    """Run forward and backward on a copy of the model; the run's weights, buffers and generators stay as they are."""
    if (workload.key, str(device)) in _WARM:
        return
    _WARM.add((workload.key, str(device)))
    with kept_generators([device]):
        rehearsal = copy.deepcopy(model).train()
        for batch, _ in zip(workload.train_batches(0, seed), range(2), strict=False):
            loss = workload.loss(rehearsal, tuple(t.to(device) for t in batch))
            if loss.requires_grad:
                loss.backward()
