"""Model compression during training: schedules of pruning, regularization, quantization and distillation.

    import tune_cac as cac
    scheduler = cac.compression.CompressionScheduler.from_file(model, optimizer, "schedule.yaml")

Importing this package loads no torch; a name's home is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainables.lazy_names import lazy_names

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
    "CompressionScheduler", "PruningPolicy", "RegularizationPolicy", "QuantizationPolicy", "LRPolicy", "ThinningPolicy",
    "build_regularizer",
    "DistillationPolicy", "build_pruner", "build_quantizer", "read_schedule", "ScheduleError",
    "sensitivity_analysis",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "scheduler": ("CompressionScheduler",),
        "policies": ("PruningPolicy", "RegularizationPolicy", "QuantizationPolicy", "LRPolicy", "ThinningPolicy",
                     "DistillationPolicy"),
        "regularizers": ("build_regularizer",),
        "pruners": ("build_pruner",),
        "quantizers": ("build_quantizer",),
        "schedule": ("read_schedule", "ScheduleError"),
        "sensitivity": ("sensitivity_analysis",),
    },
)  # fmt: skip
