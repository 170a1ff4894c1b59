"""Texts of schedules, and what they are refused with."""

from __future__ import annotations

from typing import Any

import pytest

from trainables.compression.schedule import (
    ScheduleError,
    read_schedule,
)

GOOD = """
version: 1
pruners:
  p:
    class: SparsityLevelParameterPruner
    levels: {conv.weight: 0.5}
regularizers:
  r:
    class: L1Regularizer
    reg_regims:
      conv.weight: 1e-4
lr_schedulers:
  lr:
    class: StepLR
    step_size: 3
policies:
  - pruner:
      instance_name: p
      args: {keep_mask: true, levels: 0.25}
    epochs: [1, 4]
  - regularizer:
      instance_name: r
      args:
        keep_mask: true
    starting_epoch: 2
    ending_epoch: 9
    frequency: 3
  - lr_scheduler: {instance_name: lr}
    starting_epoch: 0
    ending_epoch: 5
"""


def errors(text: str, **options: Any) -> list[str]:
    """What a text is refused with, without the name of the source."""
    with pytest.raises(ScheduleError) as raised:
        read_schedule(text, **options)
    return [error.removeprefix("<schedule>:") for error in raised.value.errors]


def with_pruner(arguments: str, policy: str = "epochs: [1, 2]") -> str:
    """A schedule whose pruner has its arguments from line 4 on."""
    indented = "".join(f"\n    {line}" for line in arguments.splitlines())
    return f"version: 1\npruners:\n  p:{indented}\npolicies:\n  - pruner: {{instance_name: p}}\n    {policy}\n"


#: Prunes and regularizes within four epochs.
PRUNING = """
version: 1
pruners:
  by_sensitivity: {class: SensitivityPruner, sensitivities: {"*weight": 0.4}}
regularizers:
  small: {class: L1Regularizer, reg_regims: {"*weight": 1.0e-5}}
policies:
- {pruner: {instance_name: by_sensitivity}, starting_epoch: 1, ending_epoch: 4, frequency: 2}
- {regularizer: {instance_name: small}, epochs: [0, 2]}
"""
