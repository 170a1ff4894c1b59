"""What all modules that a quantizer puts into a model have in common, and how they are put there.

Everything is done to instances: parametrizations, child modules and hooks. A copy of the model has them too, for the
hooks find the child at the module that they are called with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

OUTPUT = "quantized_output"
INPUT = "quantized_input"


class Quantization(nn.Module):
    """A map from a tensor to one of the same shape and dtype with few values.

    Args:
        bits: k; at most 2^k values a tensor or, where there is a grid a channel, a channel.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


def is_quantized(model: nn.Module) -> bool:
    """Whether a quantizer has changed the model."""
    return any(isinstance(module, Quantization) for module in model.modules())


def can_be_quantized(layer: nn.Module, name: str) -> bool:
    """Whether a parameter is one, or parametrized; not what an old-style hook (`torch.nn.utils.weight_norm`) sets."""
    return name in layer._parameters or parametrize.is_parametrized(layer, name)


def quantize_parameter(layer: nn.Module, name: str, quantization: Quantization) -> None:
    """Compute with a quantized parameter; the parameter itself stays the same object, under ``parametrizations``."""
    # Shape and dtype stay, so the check with a forward pass of torch's is not needed.
    parametrize.register_parametrization(layer, name, quantization, unsafe=True)


def quantize_output(layer: nn.Module, quantization: Quantization) -> None:
    """Quantize what a layer returns.

    A hook, not another module in the layer's place: the layer's class, name and hooks stay, other hooks see what the
    next layer sees, and torch's fused transformer layers, which would leave a replacement out, step back for it.
    """
    quantization.train(layer.training)
    layer.add_module(OUTPUT, quantization)
    layer.register_forward_hook(_output_quantized, prepend=True)


def quantize_input(layer: nn.Module, quantization: Quantization) -> None:
    """Quantize the first argument of a layer."""
    quantization.train(layer.training)
    layer.add_module(INPUT, quantization)
    layer.register_forward_pre_hook(_input_quantized, with_kwargs=True)


def _output_quantized(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    quantized: Tensor = layer._modules[OUTPUT](output)  # type: ignore[misc]
    return quantized


def _input_quantized(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    quantization: Any = layer._modules[INPUT]
    if args:
        return (quantization(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input": quantization(kwargs["input"])}


def model_options(model: nn.Module) -> dict[str, Any]:
    """Device of the model, and dtype for numbers kept beside it: double if the model is, else single."""
    for tensor in model.parameters():
        if tensor.is_floating_point():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            return {"device": tensor.device, "dtype": wide}
    return {"device": torch.device("cpu"), "dtype": torch.float32}
