"""DoReFa-Net, WRPN and PACT: quantizers that clip to a fixed or learned range and quantize from the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainables.compression.quantizers.activations import LearnedClipActivation, UnitActivation
from trainables.compression.quantizers.base import ModelQuantizer
from trainables.compression.quantizers.plan import RECTIFIERS, make_bits
from trainables.compression.quantizers.quantized_module import Quantization
from trainables.compression.quantizers.weights import DorefaWeight, WrpnWeight
from trainables.compression.schedule import quantizer_configs as settings


class DorefaQuantizer(ModelQuantizer):
    """Quantize weights and biases with `dorefa_weight`, outputs of rectifiers with `unit_activation`."""

    activation_kinds = RECTIFIERS

    def __init__(
        self,
        name: str,
        given: settings.DorefaQuantizerConfig | settings.WRPNQuantizerConfig | settings.PACTQuantizerConfig,
    ) -> None:
        default = make_bits(given.bits_weights, given.bits_bias, given.bits_activations)
        super().__init__(name, default, given.overrides)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return DorefaWeight(bits)

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return self.weight_quantization(layer, bits)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return UnitActivation(bits)


class WrpnQuantizer(DorefaQuantizer):
    """Quantize weights and biases with `wrpn_weight`, outputs of rectifiers with `unit_activation`."""

    def least_bits(self, what: str) -> int:
        return 1 if what == "activations" else 2

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return WrpnWeight(bits)


class PactQuantizer(DorefaQuantizer):
    """Quantize weights as DoReFa-Net, outputs of rectifiers with `pact_activation` and a separate alpha for each."""

    def __init__(self, name: str, given: settings.PACTQuantizerConfig) -> None:
        super().__init__(name, given)
        self.act_clip_init_val = given.act_clip_init_val

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return LearnedClipActivation(bits, self.act_clip_init_val, options)
