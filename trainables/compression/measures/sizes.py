"""Size and multiply-adds (MACs) of a model, and the share that is zero.

A weight layer is a convolution or a linear layer with its own weight. The float weights are counted, also if a
quantizer computes with other values.

Shapes: a weight is (C_out, C_in / groups, *kernel), of a transposed convolution (C_in, C_out / groups, *kernel), of a
linear layer (C_out, C_in); n its number of elements, z the number of nonzero elements.
MACs: multiplications, each with an addition, of one sample: n for each place at which the weight is applied.
    dense       all of them
    effective   dense * z / n
Weights that are multiplied without a call of their module (the projections inside `nn.MultiheadAttention`) count as
0 MACs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.model_copies import evaluating, float_tensor, hookless_copy
from trainables.compression.schedule.names import plain_name
from trainables.savings import share_saved
from trainables.workloads.base import Batch
from trainables.workloads.batch_shapes import to_meta

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHT_LAYERS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)

#: Runs a model on a batch, such as `Workload.loss`; the result is not used.
Forward = Callable[[nn.Module, Batch], object]


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """One weight layer."""

    name: str
    """Name of its weight, such as ``conv1.weight``."""
    elements: int
    """Number of elements of the weight."""
    nonzero: int
    """Number of nonzero elements."""
    outside_zero_structures: int
    """Number of elements outside of filters (slices along dimension 0) and channels (dimension 1) that are entirely
    zero."""
    dense_macs: int
    """MACs of one sample."""

    @property
    def sparsity(self) -> float:
        """Return the share of the elements that is zero, in [0, 1]."""
        return 1 - self.nonzero / self.elements

    @property
    def effective_macs(self) -> float:
        """Return the MACs with nonzero elements."""
        return self.dense_macs * self.nonzero / self.elements


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model at one moment."""

    layers: tuple[LayerSize, ...]
    """Weight layers, in the model's order."""
    parameters: int
    """Number of elements of all parameters, including biases and norms."""
    reference_macs: int
    """MACs of one sample of the model before thinning."""

    def _sum(self, what: str) -> Any:
        return sum(getattr(layer, what) for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Return the share of the weight layers' elements that is zero; 0 without weight layers."""
        elements = self._sum("elements")
        return 1 - self._sum("nonzero") / elements if elements else 0.0

    @property
    def structured_sparsity(self) -> float:
        """Return the share of the weight layers' elements in zero filters or channels; 0 without weight layers."""
        elements = self._sum("elements")
        return 1 - self._sum("outside_zero_structures") / elements if elements else 0.0

    @property
    def dense_macs(self) -> int:
        """Return the MACs of one sample of the current model."""
        return int(self._sum("dense_macs"))

    @property
    def effective_macs(self) -> float:
        """Return the MACs of one sample with nonzero weights."""
        return float(self._sum("effective_macs"))

    @property
    def inference_saved(self) -> float:
        """Return the share of the reference MACs with weights that are zero or were removed."""
        return share_saved(self.effective_macs, self.reference_macs)

    def to_columns(self) -> dict[str, Any]:
        """Return columns of a result row, in plain types; ``layer_sparsity`` is JSON: shares by weight name."""
        return {
            "sparsity": self.sparsity,
            "structured_sparsity": self.structured_sparsity,
            "dense_macs": self.dense_macs,
            "effective_macs": round(self.effective_macs),
            "inference_saved": self.inference_saved,
            "parameters": self.parameters,
            "layer_sparsity": json.dumps({layer.name: round(layer.sparsity, 6) for layer in self.layers}),
        }


def weight_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the weight layers by the name of their weight, each weight once, in the model's order."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        weight = float_tensor(module, "weight") if isinstance(module, WEIGHT_LAYERS) else None
        if weight is not None and id(weight) not in seen:
            seen.add(id(weight))
            found[plain_name(f"{name}.weight" if name else "weight")] = module
    return found


def layer_macs(model: nn.Module, forward: Forward, batch: Batch) -> dict[str, int]:
    """Count the MACs of one sample of each weight layer; they depend only on shapes and change only by thinning.

    A copy runs on the meta device, or on the CPU if it needs values; the model, its hooks and all generators are not
    changed. A weight that several layers share is counted under its first name, with the MACs of all these layers.

    Args:
        model: any model.
        forward: see `Forward`.
        batch: tensors on any device, the first dimension the sample; their values are not used.

    Returns:
        MACs by weight name, for all weight layers; 0 for layers that are not called.
    """
    try:
        return _counted(hookless_copy(model, meta=True), forward, to_meta(batch), len(batch[0]))
    except Exception:  # noqa: BLE001  # it makes tensors of its own on the CPU, or looks at numbers: then it gets some
        numbers = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in batch)
        return _counted(hookless_copy(model).to("cpu"), forward, numbers, len(batch[0]))


def _counted(model: nn.Module, forward: Forward, batch: Batch, samples: int) -> dict[str, int]:
    layers = weight_layers(model)
    by_weight = {id(float_tensor(module, "weight")): name for name, module in layers.items()}
    # By module, because in a functional call other tensors stand for the weights.
    name_of: dict[nn.Module, str] = {
        module: by_weight[id(float_tensor(module, "weight"))]
        for module in model.modules()
        if isinstance(module, WEIGHT_LAYERS) and id(float_tensor(module, "weight")) in by_weight
    }
    counts = dict.fromkeys(layers, 0)

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = float_tensor(module, "weight")
        assert weight is not None
        counts[name_of[module]] += _places(module, inputs[0], output) * weight.numel()

    for module in name_of:
        module.register_forward_hook(count)
    with evaluating(model):
        forward(model, batch)
    return {name: round(macs / samples) for name, macs in counts.items()}


def _places(module: nn.Module, x: Tensor, y: Tensor) -> int:
    """Return the number of places of a batch at which the whole weight is applied."""
    if isinstance(module, nn.Linear):
        return y.numel() // module.out_features
    assert isinstance(module, (*CONVOLUTIONS, *TRANSPOSED))
    if isinstance(module, TRANSPOSED):
        return x.numel() // module.in_channels
    return y.numel() // module.out_channels


def sparsity_now(model: nn.Module, macs: Mapping[str, int], reference_macs: int) -> Sizes:
    """Count zeros in the current weights, with one synchronization with the device for the whole model.

    Args:
        model: with the same structure as when ``macs`` were counted; its weights may have changed.
        macs: of `layer_macs`.
        reference_macs: MACs of one sample of the model before thinning.
    """
    layers = weight_layers(model)
    weights = [weight for weight in (float_tensor(m, "weight") for m in layers.values()) if weight is not None]
    with torch.no_grad():
        counted = [torch.stack(_counts_of(weight)) for weight in weights]
        numbers = torch.stack([row.to(counted[0].device) for row in counted]).tolist() if counted else []
    found = [
        LayerSize(
            name=name,
            elements=weight.numel(),
            nonzero=nonzero,
            outside_zero_structures=filters * channels * (weight.numel() // (weight.shape[0] * weight.shape[1])),
            dense_macs=macs[name],
        )
        for (name, weight), (nonzero, filters, channels) in zip(zip(layers, weights, strict=True), numbers, strict=True)
    ]
    return Sizes(
        layers=tuple(found),
        parameters=sum(p.numel() for p in model.parameters()),
        reference_macs=reference_macs,
    )


def _counts_of(weight: Tensor) -> list[Tensor]:
    """Count elements, filters and channels that are not (entirely) zero, as scalars on the device."""
    nonzero = weight != 0
    filters = nonzero.flatten(1).any(1)
    channels = nonzero.transpose(0, 1).flatten(1).any(1)
    return [nonzero.sum(), filters.sum(), channels.sum()]
