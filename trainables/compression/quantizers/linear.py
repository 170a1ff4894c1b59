"""Linear quantization, in training (Jacob et al. 2018, section 3) or of a trained model.

Symbols: s_x, s_w steps of a layer's input and weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from trainables.compression.quantizers.activations import CalibratedRange, MovingRange
from trainables.compression.quantizers.base import ModelQuantizer
from trainables.compression.quantizers.functions import least_linear_bits
from trainables.compression.quantizers.plan import ACTIVATIONS, WEIGHT_LAYERS, Bits, make_bits
from trainables.compression.quantizers.quantized_module import INPUT, Frozen, Quantization, quantize_input
from trainables.compression.quantizers.weights import FrozenBias, FrozenWeight, LinearWeight, channel_axis
from trainables.compression.schedule import quantizer_configs as settings
from trainables.errors import UserError


class LinearTrainingQuantizer(ModelQuantizer):
    """Quantize weights and biases to their own range, outputs of activation modules to a moving average range.

    So is the model's first argument, where it is a floating-point tensor. Biases and embeddings have one range, even if
    ``per_channel_wts`` gives each filter its own.
    """

    activation_kinds = ACTIVATIONS

    def __init__(self, name: str, given: settings.QuantAwareTrainRangeLinearQuantizerConfig) -> None:
        default = make_bits(given.bits_weights, given.bits_bias, given.bits_activations)
        super().__init__(name, default, given.overrides)
        self.given = given

    def change_inputs(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        given = self.given
        wanted = given.bits_activations if given.num_bits_inputs is None else given.num_bits_inputs
        bits = make_bits(None, None, wanted if given.quantize_inputs else None).activations
        if bits is not None:
            quantize_input(model, self.activation_quantization(bits, options))

    def least_bits(self, what: str) -> int:
        return least_linear_bits(self.given.mode)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return LinearWeight(bits, self.given.mode, channel_axis(layer, self.given.per_channel_wts))

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return LinearWeight(bits, self.given.mode, None)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return MovingRange(bits, self.given.mode, self.given.ema_decay, options)


class PostTrainingQuantizer(ModelQuantizer):
    """Quantize inputs, weights, biases and outputs of layers, and outputs of activation modules, of a trained model.

    The ranges are collected during one epoch: until `finish_epoch` the model computes as before, and every forward pass
    in training mode updates them; after it they are fixed. Of an embedding only the weight is quantized, since its
    output consists of weight rows.

    A layer's bias becomes signed integers of ``bits_accum`` bits times s_x s_w, the step of the sum it is added to; it
    is not quantized if input or weight are not.
    """

    activation_kinds = tuple(kind for kind in (*WEIGHT_LAYERS, *ACTIVATIONS) if kind is not nn.Embedding)

    def __init__(self, name: str, given: settings.PostTrainLinearQuantizerConfig) -> None:
        default = make_bits(given.bits_parameters, given.bits_accum, given.bits_activations)
        super().__init__(name, default, given.overrides)
        self.given = given

    def least_bits(self, what: str) -> int:
        return 2 if what == "bias" else least_linear_bits(self.given.mode)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        weight: Any = layer.weight
        return FrozenWeight(bits, self.given.mode, channel_axis(layer, self.given.per_channel_wts), weight)

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        bias: Any = layer.bias
        return FrozenBias(bits, bias, per_channel=self.given.per_channel_wts)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return CalibratedRange(bits, self.given.mode, self.given.clip_acts, self.given.clip_n_stds, options)

    def change(self, module: nn.Module, bits: Bits, options: Mapping[str, Any]) -> None:
        super().change(module, bits, options)
        is_layer = isinstance(module, WEIGHT_LAYERS) and isinstance(module, self.activation_kinds)
        if is_layer and bits.activations is not None:
            quantize_input(module, self.activation_quantization(bits.activations, options))

    def finish_epoch(self, model: nn.Module) -> None:
        """Freeze all ranges for good; later calls do nothing.

        Activations that no batch reached are not quantized, with a warning.

        Raises:
            UserError: there was no forward pass in training mode.
        """
        if any(module.frozen for module in model.modules() if isinstance(module, Frozen)):
            return
        ranges = {name: module for name, module in model.named_modules() if isinstance(module, CalibratedRange)}
        unseen = [name for name, module in ranges.items() if int(module.batches) == 0]
        if unseen and len(unseen) == len(ranges):
            raise UserError(
                f"quantizer {self.name} needs at least one forward pass in training mode in its first active epoch to "
                "see the activations' ranges, got none"
            )
        if unseen:
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in unseen))
            warnings.warn(f"not quantized, for no batch went through it: activations of {layers}", stacklevel=2)
        for name, seen in ranges.items():
            if name not in unseen:
                seen.freeze()
        for module in model.modules():
            if isinstance(module, WEIGHT_LAYERS):
                _freeze_parameters(module)


def _freeze_parameters(layer: nn.Module) -> None:
    weight = _quantization_of(layer, "weight")
    if not isinstance(weight, FrozenWeight):
        return
    # Not frozen yet, it returns its input unchanged, so this is the weight without quantization.
    current: Any = layer.weight
    weight.freeze_at(current)
    bias, seen = _quantization_of(layer, "bias"), layer._modules.get(INPUT)
    if isinstance(bias, FrozenBias) and isinstance(seen, CalibratedRange) and seen.frozen:
        bias.freeze_at(seen.grid().step, weight.grid().step)


def _quantization_of(layer: nn.Module, name: str) -> nn.Module | None:
    """Return the last parametrization of a parameter, or None."""
    if not parametrize.is_parametrized(layer, name):
        return None
    parametrizations: Any = layer.parametrizations
    last: nn.Module = parametrizations[name][-1]
    return last
