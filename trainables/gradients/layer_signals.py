"""Inputs and output gradients of linear and convolution layers in one backward pass: all that their gradients are of.

Shapes: B samples; T places of a sample at which a layer applies its weights (1 for vectors, H_out W_out for images, the
length of a sequence); I inputs of a place (a convolution's patch, C_in times the kernel), O outputs. The gradient of
the layer's weight, as (O, I), is the sum over samples and places of output gradient times input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainables.errors import UserError

#: Norms have few weights, which take their plain gradients everywhere.
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True, kw_only=True)
class LayerSignal:
    """Inputs and output gradients of a layer in one pass."""

    inputs: Tensor
    """(B, T, I)."""
    output_gradients: Tensor
    """(B, T, O), gradients of the loss."""

    @property
    def per_sample_flops(self) -> int:
        """Return the FLOPs of `sample_gradients` of the whole batch."""
        count, places, width = self.inputs.shape
        return 2 * count * places * width * self.output_gradients.shape[2]

    @property
    def squared_norms_flops(self) -> int:
        """Return the FLOPs of the products in `squared_norms`."""
        count, places, width = self.inputs.shape
        outputs = self.output_gradients.shape[2]
        if places == 1:
            return 0
        return 2 * count * places**2 * (width + outputs) if self._by_places else self.per_sample_flops

    @property
    def _by_places(self) -> bool:
        """Return whether products of places are smaller than gradients."""
        places, width = self.inputs.shape[1:]
        return places * places < width * self.output_gradients.shape[2]

    def sample_gradients(self, rows: slice = slice(None)) -> Tensor:
        """Return what each sample adds to the weight's gradient: (B, O, I)."""
        return torch.einsum("bto,bti->boi", self.output_gradients[rows], self.inputs[rows])

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each sample's part of the weight's gradient: (B,); memory B T (T + I + O)."""
        if self.inputs.shape[1] == 1:
            return self.inputs.square().sum((1, 2)) * self.output_gradients.square().sum((1, 2))
        count, _, width = self.inputs.shape
        if self._by_places:  # ||sum_t d_t a_t^T||^2 = sum_ts (d_t d_s) (a_t a_s)
            a = self.inputs @ self.inputs.transpose(1, 2)
            d = self.output_gradients @ self.output_gradients.transpose(1, 2)
            return (a * d).sum((1, 2))
        numbers = width * self.output_gradients.shape[2]
        return torch.cat([self.sample_gradients(rows).square().sum((1, 2)) for rows in chunks(count, numbers)])


#: Numbers that per-sample gradients of one layer may take at a time.
CHUNK_NUMBERS = 1 << 22


def chunks(count: int, numbers_each: int) -> Iterator[slice]:
    """Yield slices of samples whose per-sample gradients stay within the memory bound `CHUNK_NUMBERS`."""
    size = max(1, CHUNK_NUMBERS // max(1, numbers_each))
    for start in range(0, count, size):
        yield slice(start, start + size)


def treatable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear and convolution layers that can be watched, by name, in the model's order.

    A layer whose weight or bias another module holds, too (tied embeddings), is none of them, nor is one that takes its
    weight from a parametrization.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if _is_treatable(module)
        and module.weight.requires_grad
        and all(owners[id(own)] == 1 for own in module._parameters.values() if own is not None)
    }


def _is_treatable(module: nn.Module) -> bool:
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":  # attention uses its weight without calling it
        return False
    if isinstance(module, nn.Linear):
        return isinstance(module._parameters.get("weight"), nn.Parameter)
    if not isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return False
    return module.groups == 1 and isinstance(module._parameters.get("weight"), nn.Parameter)


def untreated_parameters(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of parameters that belong neither to these layers nor to norms."""
    treated = {id(layer._parameters.get(kind)) for layer in layers.values() for kind in ("weight", "bias")}
    treated |= {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in treated]


class LayerSignals:
    """Record layers in the forward and backward passes inside the block.

    Args:
        layers: of `treatable_layers`, by name.

    After the backward pass, `signals` has a `LayerSignal` of each layer that was called; a layer that was called
    several times has its places one after the other. Recording does not change the pass.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = layers
        self._inputs: dict[str, list[Tensor]] = {}
        self._outputs: dict[str, list[Tensor | None]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.edges: list[torch.autograd.graph.GradientEdge] = []
        """The layers' outputs as `torch.autograd.grad` takes them, for a backward pass without weights' gradients."""

    def __enter__(self) -> LayerSignals:
        for name, layer in self._layers.items():
            self._handles.append(layer.register_forward_hook(self._seen(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.edges.clear()  # they hold the graph

    def _seen(self, name: str):  # type: ignore[no-untyped-def]
        def hook(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not output.requires_grad:
                return None
            # Of sequences the output is a view: changed in place, it would never have a gradient of its own.
            seen = torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output
            calls = self._outputs.setdefault(name, [])
            self._inputs.setdefault(name, []).append(arguments[0].detach())
            place = len(calls)
            calls.append(None)

            def keep(gradient: Tensor) -> None:
                calls[place] = gradient.detach()

            seen.register_hook(keep)
            # An activation that changes the output in place takes the tensor away from this node.
            self.edges.append(torch.autograd.graph.get_gradient_edge(seen))
            return None if seen is output else seen

        return hook

    def calls(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """Return the inputs and output gradients, in the layer's own shapes, of a layer's calls that were passed."""
        pairs = zip(self._inputs.get(name, ()), self._outputs.get(name, ()), strict=True)
        return [(inputs, gradient) for inputs, gradient in pairs if gradient is not None]

    def parts(self, samples: int | None = None) -> Iterator[tuple[str, slice, LayerSignal]]:
        """Yield each layer's signal, a few samples at a time, so that patches stay within `CHUNK_NUMBERS`.

        Args:
            samples: B, which the first dimension of every layer's input must be; None: it is not checked.

        Raises:
            UserError: it is not.
        """
        for name, layer in self._layers.items():
            calls = [_of_one_type(call) for call in self.calls(name)]
            if not calls:
                continue
            assert isinstance(layer.weight, Tensor)
            outputs, width = layer.weight.flatten(1).shape
            count = len(calls[0][0])
            if samples is not None and count != samples:
                raise samples_not_first(name, count, samples)
            places = sum(gradient.numel() for _, gradient in calls) // (count * outputs)
            for rows in chunks(count, places * (width + outputs + places)):
                inputs = [rows_of_inputs(layer, seen[rows]) for seen, _ in calls]
                gradients = [rows_of_outputs(layer, gradient[rows]) for _, gradient in calls]
                yield name, rows, LayerSignal(inputs=torch.cat(inputs, 1), output_gradients=torch.cat(gradients, 1))

    @property
    def signals(self) -> dict[str, LayerSignal]:
        """Return the signals of the layers that a backward pass went through."""
        found: dict[str, list[LayerSignal]] = {}
        for name, _, signal in self.parts():
            found.setdefault(name, []).append(signal)
        return {
            name: LayerSignal(
                inputs=torch.cat([part.inputs for part in parts]),
                output_gradients=torch.cat([part.output_gradients for part in parts]),
            )
            for name, parts in found.items()
        }


def samples_not_first(layer: str, rows: int, samples: int) -> UserError:
    """Return the error for a layer whose input has another number of rows than there are samples."""
    return UserError(
        f"per-sample gradients need layers with the samples' dimension first, got {rows} rows in layer {layer} for a "
        f"batch of {samples}: set batch_first=True, or use another method"
    )


def _of_one_type(call: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a call in the larger of its types: autocast gives gradients in another than inputs."""
    dtype = torch.promote_types(call[0].dtype, call[1].dtype)
    return call[0].to(dtype), call[1].to(dtype)


def rows_of_inputs(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return a layer's input as (B, T, I): patches of a convolution."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    if layer.padding_mode != "zeros":
        mode = layer.padding_mode
        padded = F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
        padding: tuple[int, ...] = (0,) * len(layer.kernel_size)
    elif isinstance(layer.padding, str):
        padded = F.pad(inputs, layer._reversed_padding_repeated_twice)
        padding = (0,) * len(layer.kernel_size)
    else:
        padded, padding = inputs, tuple(layer.padding)
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


def check_some(layers: Mapping[str, nn.Module], method: str, model: nn.Module) -> None:
    """Raise UserError if there is no layer that a method could treat."""
    if not layers:
        kinds = ", ".join(sorted({type(m).__name__ for m in model.modules() if list(m.parameters(recurse=False))}))
        raise UserError(
            f"{method} needs linear or ungrouped convolution layers (Conv1d, Conv2d) with weights of their own, got a "
            f"model of {kinds or 'no layers'}: use another method"
        )


def named(names: Iterable[str], most: int = 5) -> str:
    """Return names in a line, the first few.

    >>> named(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most} more" if len(known) > most else "")


def rows_of_others(names: Iterable[str]) -> str:
    """Return the words for layers whose rows are not the samples."""
    return f"the rows of {named(names)} are not those of the batch's samples, or depend on other samples"
