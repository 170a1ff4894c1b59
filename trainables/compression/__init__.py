"""Model compression during training: schedules of pruning, regularization, quantization and distillation.

    import tune_cac as cac
    scheduler = cac.compression.CompressionScheduler(model, "schedule.yaml", optimizer)

Classes of pruners, regularizers and quantizers are called by their names in a schedule (`policies.constructor`).
Importing this package loads no torch; a name's home is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    from trainables.compression.pruners import Pruner, build_pruner
    from trainables.compression.quantizers import Quantizer, build_quantizer
    from trainables.compression.regularizers import Regularizer, build_regularizer
    from trainables.compression.schedule import ScheduleError, read_schedule
    from trainables.compression.scheduler import CompressionScheduler
    from trainables.compression.sensitivity import sensitivity_analysis

__all__ = [
    "CompressionScheduler", "PruningPolicy", "RegularizationPolicy", "QuantizationPolicy", "LRPolicy", "ThinningPolicy",
    "DistillationPolicy", "Pruner", "Quantizer", "Regularizer", "build_pruner", "build_quantizer", "build_regularizer",
    "read_schedule", "ScheduleError", "sensitivity_analysis",
]  # fmt: skip

_named, __dir__ = lazy_names(
    __name__,
    {
        "scheduler": ("CompressionScheduler",),
        "policies": ("PruningPolicy", "RegularizationPolicy", "QuantizationPolicy", "LRPolicy", "ThinningPolicy",
                     "DistillationPolicy"),
        "regularizers": ("build_regularizer", "Regularizer"),
        "pruners": ("build_pruner", "Pruner"),
        "quantizers": ("build_quantizer", "Quantizer"),
        "schedule": ("read_schedule", "ScheduleError"),
        "sensitivity": ("sensitivity_analysis",),
    },
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name[:1].isupper() and name not in __all__:
        from trainables.compression.schedule.configs import PRUNERS, QUANTIZERS, REGULARIZERS

        if name in {**PRUNERS, **QUANTIZERS, **REGULARIZERS}:
            from trainables.compression.policies import constructor

            return constructor(name)
    return _named(name)
