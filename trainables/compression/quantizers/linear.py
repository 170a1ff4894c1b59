"""Linear quantization-aware training (Jacob et al. 2018, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainables.compression.quantizers.activations import MovingRange
from trainables.compression.quantizers.base import ModelQuantizer
from trainables.compression.quantizers.functions import least_linear_bits
from trainables.compression.quantizers.plan import ACTIVATIONS, make_bits
from trainables.compression.quantizers.quantized_module import Quantization
from trainables.compression.quantizers.weights import LinearWeight, channel_axis
from trainables.compression.schedule import quantizer_configs as settings


class LinearTrainingQuantizer(ModelQuantizer):
    """Quantize weights and biases to their own range, outputs of activation modules to a moving average range.

    Biases and embeddings have one range, even if ``per_channel_wts`` gives each filter its own.
    """

    activation_kinds = ACTIVATIONS

    def __init__(self, name: str, given: settings.QuantAwareTrainRangeLinearQuantizerConfig) -> None:
        default = make_bits(given.bits_weights, given.bits_bias, given.bits_activations)
        super().__init__(name, default, given.overrides)
        self.given = given

    def least_bits(self, what: str) -> int:
        return least_linear_bits(self.given.mode)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return LinearWeight(bits, self.given.mode, channel_axis(layer, self.given.per_channel_wts))

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return LinearWeight(bits, self.given.mode, None)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return MovingRange(bits, self.given.mode, self.given.ema_decay, options)
