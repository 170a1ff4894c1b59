"""Model compression during training: schedules of pruning, regularization, quantization and distillation.

    import tune_cac as cac
    scheduler = cac.compression.CompressionScheduler.from_file(model, optimizer, "schedule.yaml")

Importing this package loads no torch; a name's home is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainables.compression.policies import (
        DistillationPolicy,
        LRPolicy,
        PruningPolicy,
        QuantizationPolicy,
        RegularizationPolicy,
        ThinningPolicy,
    )
    from trainables.compression.pruners import build_pruner
    from trainables.compression.quantizers import build_quantizer
    from trainables.compression.regularizers import build_regularizer
    from trainables.compression.schedule import ScheduleError, read_schedule
    from trainables.compression.scheduler import CompressionScheduler
    from trainables.compression.sensitivity import sensitivity_analysis

__all__ = [
    "CompressionScheduler",
    "PruningPolicy",
    "RegularizationPolicy",
    "QuantizationPolicy",
    "LRPolicy",
    "ThinningPolicy",
    "DistillationPolicy",
    "build_pruner",
    "build_quantizer",
    "build_regularizer",
    "read_schedule",
    "ScheduleError",
    "sensitivity_analysis",
]

_HOMES = {
    "CompressionScheduler": "scheduler",
    **{name: "policies" for name in __all__ if name.endswith("Policy")},
    "build_pruner": "pruners",
    "build_quantizer": "quantizers",
    "build_regularizer": "regularizers",
    "read_schedule": "schedule",
    "ScheduleError": "schedule",
    "sensitivity_analysis": "sensitivity",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
