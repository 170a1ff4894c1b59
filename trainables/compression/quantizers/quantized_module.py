"""Base classes of the modules that quantizers add to a model, and functions that add them.

Only instances are changed, by parametrizations, child modules and hooks. A copy of the model has them too, because the
hooks look up the child module on the module that they are called with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

OUTPUT = "quantized_output"
INPUT = "quantized_input"


class Quantization(nn.Module):
    """A map from a tensor to one of the same shape and dtype with few distinct values.

    Args:
        bits: k; at most 2^k values per tensor or, with one grid per channel, per channel.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


class Frozen(Quantization):
    """Return its input unchanged until it is frozen, in post-training quantization.

    The frozen state is stored twice: as a Python flag, so that the forward pass does not synchronize with the device,
    and as a buffer in the model's state dict. Loading a state sets the flag from the buffer.

    Args:
        bits: k.
        device: of the buffer.
    """

    is_frozen: Tensor

    def __init__(self, bits: int, device: torch.device) -> None:
        super().__init__(bits)
        self.frozen = False
        self.register_buffer("is_frozen", torch.zeros((), dtype=torch.bool, device=device))
        self.register_load_state_dict_post_hook(_follow_buffer)

    def freeze(self) -> None:
        """Quantize from now on."""
        self.frozen = True
        self.is_frozen.fill_(True)


def _follow_buffer(module: nn.Module, incompatible_keys: Any) -> None:
    assert isinstance(module, Frozen)
    if not module.is_frozen.is_meta:
        module.frozen = bool(module.is_frozen)


def is_quantized(model: nn.Module) -> bool:
    """Return whether a quantizer has changed the model."""
    return any(isinstance(module, Quantization) for module in model.modules())


def can_be_quantized(layer: nn.Module, name: str) -> bool:
    """Return whether a tensor is a real or parametrized parameter, not set by a hook (`torch.nn.utils.weight_norm`)."""
    return name in layer._parameters or parametrize.is_parametrized(layer, name)


def quantize_parameter(layer: nn.Module, name: str, quantization: Quantization) -> None:
    """Register a quantization as parametrization; the parameter stays the same object, under ``parametrizations``."""
    # Shape and dtype do not change, so torch's check with a forward pass is not needed.
    parametrize.register_parametrization(layer, name, quantization, unsafe=True)


def quantize_output(layer: nn.Module, quantization: Quantization) -> None:
    """Quantize a layer's output.

    Uses a hook instead of replacing the layer: the layer keeps its class, name and hooks; other hooks see what the next
    layer sees; and torch's fused transformer layers, which would skip a replacement, are disabled by the hook.
    """
    quantization.train(layer.training)
    layer.add_module(OUTPUT, quantization)
    layer.register_forward_hook(_output_quantized, prepend=True)


def quantize_input(layer: nn.Module, quantization: Quantization) -> None:
    """Quantize the first argument of a layer or model, where it is a floating-point tensor."""
    quantization.train(layer.training)
    layer.add_module(INPUT, quantization)
    layer.register_forward_pre_hook(_input_quantized, with_kwargs=True)


def _output_quantized(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    quantized: Tensor = layer._modules[OUTPUT](output)  # type: ignore[misc]
    return quantized


def _input_quantized(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    quantization: Any = layer._modules[INPUT]
    first = args[0] if args else kwargs.get("input")
    if not (isinstance(first, Tensor) and first.is_floating_point()):
        return args, kwargs
    if args:
        return (quantization(first), *args[1:]), kwargs
    return args, {**kwargs, "input": quantization(first)}


def model_options(model: nn.Module) -> dict[str, Any]:
    """Return the model's device, and the dtype for added tensors: double if the model is double, else single."""
    for tensor in model.parameters():
        if tensor.is_floating_point():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            return {"device": tensor.device, "dtype": wide}
    return {"device": torch.device("cpu"), "dtype": torch.float32}
