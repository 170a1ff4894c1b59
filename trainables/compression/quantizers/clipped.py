"""DoReFa-Net, WRPN and PACT: quantizers that clip to a fixed or learned range, used from the first step on."""

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
    """Weights (and biases) by `dorefa_weight`, what rectifiers return by `unit_activation`."""

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
    """Weights (and biases) by `wrpn_weight`, what rectifiers return by `unit_activation`."""

    def least_bits(self, what: str) -> int:
        return 1 if what == "activations" else 2

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return WrpnWeight(bits)


class PactQuantizer(DorefaQuantizer):
    """Weights as DoReFa-Net's, what rectifiers return by `pact_activation`, each with an alpha of its own."""

    def __init__(self, name: str, given: settings.PACTQuantizerConfig) -> None:
        super().__init__(name, given)
        self.act_clip_init_val = given.act_clip_init_val

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return LearnedClipActivation(bits, self.act_clip_init_val, options)
