"""Components of a schedule as calls: ``SensitivityPruner(model, sensitivities={"conv1.weight": 0.5})``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from trainables.compression.pruners import Pruner, build_pruner
from trainables.compression.quantizers import Quantizer, build_quantizer
from trainables.compression.regularizers import Regularizer, build_regularizer
from trainables.compression.schedule.configs import PRUNERS, QUANTIZERS, REGULARIZERS
from trainables.compression.schedule.document import Findings
from trainables.compression.schedule.reading import validated


def constructor(class_name: str) -> Callable[..., Pruner | Quantizer | Regularizer]:
    """Return what builds a component of a class: called with a model, ``name``, ``seed``, and the class's arguments.

    The result is for `CompressionScheduler.add_policy`. ScheduleError: an argument is unknown, missing or out of range.
    """

    def build(model: nn.Module, *, name: str = class_name, seed: int = 0, **arguments: Any) -> Any:
        findings = Findings(f"{class_name}()", {})
        settings = validated({**PRUNERS, **QUANTIZERS, **REGULARIZERS}[class_name], arguments, (), findings)
        findings.raise_or_warn()
        assert settings is not None
        if class_name in PRUNERS:
            return build_pruner(name, settings, model, seed=seed)
        if class_name in QUANTIZERS:
            return build_quantizer(name, settings, model)
        return build_regularizer(name, settings, model)

    build.__name__ = build.__qualname__ = class_name
    return build
