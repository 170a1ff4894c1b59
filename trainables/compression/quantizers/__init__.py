"""Quantizers: the model computes with few bits while the optimizer trains its float weights.

`build_quantizer` builds any of `schedule.configs.QUANTIZERS`. Parameters stay the same objects; the layers compute with
quantized values (`torch.nn.utils.parametrize` on the instance), and an activation's child module ``quantized_output``
quantizes its output. 32 bits and null leave all values unchanged, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from trainables.compression.component import Quantizer
from trainables.compression.quantizers.linear import (
    DorefaQuantizer,
    LinearTrainingQuantizer,
    ModelQuantizer,
    PactQuantizer,
    PostTrainingQuantizer,
    WrpnQuantizer,
)
from trainables.compression.quantizers.quantized_module import is_quantized
from trainables.compression.schedule.configs import ComponentConfig
from trainables.errors import unknown_name

__all__ = ["build_quantizer", "is_quantized"]

_BUILDERS: dict[str, Callable[[str, Any], ModelQuantizer]] = {
    "DorefaQuantizer": DorefaQuantizer,
    "WRPNQuantizer": WrpnQuantizer,
    "PACTQuantizer": PactQuantizer,
    "QuantAwareTrainRangeLinearQuantizer": LinearTrainingQuantizer,
    "PostTrainLinearQuantizer": PostTrainingQuantizer,
}


def build_quantizer(name: str, settings: ComponentConfig, model: nn.Module | None = None) -> Quantizer:
    """Build the quantizer that a schedule describes; it changes no model before `prepare` is called.

    Args:
        name: of the instance in the schedule, for messages.
        settings: one of `trainables.compression.schedule.configs.QUANTIZERS`.
        model: as built; if given, overrides and bits are checked against it.

    Raises:
        UserError: the settings contradict each other or do not fit the model.
    """
    builder = _BUILDERS.get(settings.class_)
    if builder is None:
        raise unknown_name("quantizer", settings.class_, _BUILDERS)
    quantizer = builder(name, settings)
    if model is not None:
        quantizer.plan(model)
    return quantizer
