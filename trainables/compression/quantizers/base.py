"""Base of all quantizers: plans and checks the bits, then changes the model."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from trainables.compression.component import Quantizer
from trainables.compression.quantizers.plan import WEIGHT_LAYERS, Bits, plan_bits
from trainables.compression.quantizers.quantized_module import (
    Quantization,
    can_be_quantized,
    is_quantized,
    model_options,
    quantize_output,
    quantize_parameter,
)
from trainables.compression.schedule.quantizer_configs import OverridesConfig
from trainables.errors import UserError


class ModelQuantizer(Quantizer):
    """A quantizer whose complete state is in the model's state dict.

    Args:
        name: of the instance in the schedule, for messages.
        default: bits if no override matches.
        overrides: by module name or pattern.
    """

    activation_kinds: ClassVar[tuple[type[nn.Module], ...]]
    """Modules whose output is quantized."""

    def __init__(self, name: str, default: Bits, overrides: Mapping[str, OverridesConfig]) -> None:
        self.name = name
        self.default = default
        self.overrides = dict(overrides)

    def least_bits(self, what: str) -> int:
        """Return the fewest bits allowed for ``weights``, ``bias`` or ``activations``: 2 if one is a sign bit."""
        return 1

    @abstractmethod
    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        """Build the module that quantizes the layer's weight."""

    @abstractmethod
    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        """Build the module that quantizes the layer's bias."""

    @abstractmethod
    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        """Build a module that quantizes activations; ``options`` are device and dtype of its parameters and buffers."""

    def plan(self, model: nn.Module) -> dict[nn.Module, Bits]:
        """Return the bits by module, after checking them.

        Raises:
            UserError: overrides do not fit the model, or bits are too few.
        """
        plan = plan_bits(model, self.default, self.overrides)
        names = {module: name for name, module in model.named_modules()}
        for module, bits in plan.items():
            for what, number in self._used(module, bits).items():
                if number is not None:
                    self._check(names[module] or "the model", module, what, number)
        return plan

    def _check(self, name: str, module: nn.Module, what: str, bits: int) -> None:
        if bits < self.least_bits(what):
            raise UserError(
                f"bits of {what} of quantizer {self.name} must be at least {self.least_bits(what)} "
                f"(one is the sign's), got {bits} for {name}"
            )
        parameter = {"weights": "weight", "bias": "bias"}.get(what)
        if parameter is not None and not can_be_quantized(module, parameter):
            raise UserError(
                f"{parameter} of {name} must be a parameter to be quantized, got one that a hook computes: use "
                "torch.nn.utils.parametrizations instead of torch.nn.utils.weight_norm or spectral_norm"
            )

    def _used(self, module: nn.Module, bits: Bits) -> dict[str, int | None]:
        """Return the bits that apply to the module: weights, bias and activations that it has."""
        used: dict[str, int | None] = {}
        if isinstance(module, WEIGHT_LAYERS):
            used["weights"] = bits.weights
            if getattr(module, "bias", None) is not None:
                used["bias"] = bits.bias
        if isinstance(module, self.activation_kinds):
            used["activations"] = bits.activations
        return used

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Change the model's modules in place and add learned parameters to the optimizer, if given.

        Parameters stay the same objects, but their names and their order in the model change: an optimizer whose state
        is to be loaded must have been built before `prepare`, like the one that was saved.

        Raises:
            UserError: the model is quantized already; overrides or bits do not fit it; a hook computes a weight. The
                model is then unchanged.
        """
        if is_quantized(model):
            raise UserError(f"a model must be quantized once, got a quantized one for quantizer {self.name}")
        plan = self.plan(model)
        known = {id(p) for p in model.parameters()}
        options = model_options(model)
        for module, bits in plan.items():
            self.change(module, bits, options)
        self.change_inputs(model, options)
        self._warn_of_nothing(model, plan)
        learned = [(name, p) for name, p in model.named_parameters() if id(p) not in known]
        if optimizer is not None and learned:
            join_optimizer(optimizer, learned)

    def change_inputs(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Quantize the model's input, if the quantizer does that."""

    def change(self, module: nn.Module, bits: Bits, options: Mapping[str, Any]) -> None:
        """Quantize a module's weight, bias and output, where present and given bits."""
        used = self._used(module, bits)
        if (number := used.get("weights")) is not None:
            quantize_parameter(module, "weight", self.weight_quantization(module, number))
        if (number := used.get("bias")) is not None:
            quantize_parameter(module, "bias", self.bias_quantization(module, number))
        if (number := used.get("activations")) is not None:
            quantize_output(module, self.activation_quantization(number, options))

    def _warn_of_nothing(self, model: nn.Module, plan: Mapping[nn.Module, Bits]) -> None:
        wants_activations = any(bits.activations is not None for bits in plan.values())
        if wants_activations and not any(isinstance(module, self.activation_kinds) for module in plan):
            kinds = ", ".join(kind.__name__ for kind in self.activation_kinds)
            warnings.warn(
                f"quantizer {self.name} quantizes no activations, for no module is one of {kinds}; functions such as "
                "F.relu cannot be seen: use modules in their place",
                stacklevel=3,
            )
        elif not is_quantized(model):
            warnings.warn(
                f"quantizer {self.name} quantizes nothing: every number of bits is 32 or null, or for what the model "
                "does not have",
                stacklevel=3,
            )


def join_optimizer(optimizer: Optimizer, learned: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Add parameters as a separate group with the options of the first group."""
    first = optimizer.param_groups[0]
    named = "param_names" in first
    options = {key: copy.deepcopy(v) for key, v in first.items() if key not in ("params", "param_names")}
    optimizer.add_param_group({**options, "params": list(learned) if named else [p for _, p in learned]})
