"""Inputs and output gradients of linear and convolution layers in one backward pass: all that their gradients are of.

Shapes: B samples; T places of a sample at which a layer applies its weights (1 for vectors, H_out W_out for images, the
length of a sequence); I inputs of a place (a convolution's patch, C_in times the kernel), O outputs. The gradient of
the layer's weight, as (O, I), is the sum over samples and places of output gradient times input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.errors import UserError


def treatable_layers(model: nn.Module, needed_by: str | None = None) -> dict[str, nn.Module]:
    """Return the linear and convolution layers that can be watched, by name, in the model's order.

    A layer whose weight or bias another module holds, too (tied embeddings), is none of them, nor is one that takes its
    weight from a parametrization. UserError: there is none, and a method is named that needs one.
    """
    owners = Counter(id(own) for module in model.modules() for own in module._parameters.values() if own is not None)
    found: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))
        and getattr(module, "groups", 1) == 1
        and type(module).__name__ != "NonDynamicallyQuantizableLinear"  # attention uses its weight without calling it
        and isinstance(weight := module._parameters.get("weight"), nn.Parameter)
        and weight.requires_grad
        and all(owners[id(own)] == 1 for own in module._parameters.values() if own is not None)
    }
    if needed_by is not None and not found:
        kinds = ", ".join(sorted({type(m).__name__ for m in model.modules() if list(m.parameters(recurse=False))}))
        raise UserError(
            f"{needed_by} needs linear or ungrouped convolution layers (Conv1d, Conv2d) with weights of their own, got "
            f"a model of {kinds or 'no layers'}: use another method"
        )
    return found


class LayerSignals:
    """Record `treatable_layers` in the forward and backward passes inside the block; this does not change them."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = layers
        self._calls: dict[str, list[list[Tensor]]] = {name: [] for name in layers}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.edges: list[torch.autograd.graph.GradientEdge] = []
        """The layers' outputs as `torch.autograd.grad` takes them, for a backward pass without weights' gradients."""

    def __enter__(self) -> LayerSignals:
        self._handles += [layer.register_forward_hook(self._seen(name)) for name, layer in self._layers.items()]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.edges.clear()  # they hold the graph

    def _seen(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]:
        def hook(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not output.requires_grad:
                return None
            # Of sequences the output is a view: changed in place, it would never have a gradient of its own.
            seen = torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output
            call = [arguments[0].detach()]
            self._calls[name].append(call)
            seen.register_hook(lambda gradient: call.append(gradient.detach()))
            # An activation that changes the output in place takes the tensor away from this node.
            self.edges.append(torch.autograd.graph.get_gradient_edge(seen))
            return None if seen is output else seen

        return hook

    def calls(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """Return the inputs and output gradients, in the layer's own shapes, of a layer's calls that were passed."""
        return [(call[0], call[-1]) for call in self._calls[name] if len(call) > 1]


def rows_of_inputs(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return a layer's input as (B, T, I): patches of a convolution."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    padded, padding = inputs, layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * len(layer.kernel_size)
    sizes = (layer.kernel_size, layer.dilation, padding, layer.stride)
    if inputs.dim() == 3:  # an image of height 1
        padded = padded.unsqueeze(2)
        sizes = tuple((fill, size[0]) for fill, size in zip((1, 1, 0, 1), sizes, strict=True))  # type: ignore[assignment]
    kernel, dilation, padding, stride = sizes
    return F.unfold(padded, kernel, dilation=dilation, padding=padding, stride=stride).transpose(1, 2)


def rows_of_outputs(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Return a layer's output, or its gradient, as (B, T, O)."""
    if isinstance(layer, nn.Linear):
        return outputs.reshape(outputs.shape[0], -1, outputs.shape[-1])
    return outputs.flatten(2).transpose(1, 2)
