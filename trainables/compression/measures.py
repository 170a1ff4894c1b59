"""Size, multiply-adds (MACs) and latency of a model, and the share of it that is zero.

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
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.model_copies import evaluating, float_tensor, hookless_copy
from trainables.compression.schedule.names import plain_name
from trainables.errors import UserError
from trainables.savings import share_saved
from trainables.workloads.base import Batch
from trainables.workloads.batch_shapes import to_meta

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHT_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED, nn.Linear)
#: Passes that are not timed, since the first include the time in which libraries choose kernels; and those that are.
WARM_UP, REPEATS = 5, 30

#: Runs a model on a batch, such as `Workload.loss`; the result is not used.
Forward = Callable[[nn.Module, Batch], object]


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
    """Count the MACs of one sample of each weight layer, by weight name; 0 for layers that are not called.

    They depend only on shapes and change only by thinning. A copy runs on the meta device, or on the CPU if it needs
    values; the model, its hooks and all generators are not changed. A weight that several layers share is counted under
    its first name, with the MACs of all these layers.
    """
    try:
        return _counted(hookless_copy(model, meta=True), forward, to_meta(batch), len(batch[0]))
    except Exception:  # noqa: BLE001  # it makes tensors of its own on the CPU, or looks at numbers: then it gets some
        numbers = tuple(torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in batch)
        return _counted(hookless_copy(model).to("cpu"), forward, numbers, len(batch[0]))


def _counted(model: nn.Module, forward: Forward, batch: Batch, samples: int) -> dict[str, int]:
    layers = weight_layers(model)
    by_weight = {id(float_tensor(module, "weight")): name for name, module in layers.items()}
    counts = dict.fromkeys(layers, 0)

    def counting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def count(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            weight = float_tensor(module, "weight")
            assert weight is not None
            if isinstance(module, nn.Linear):
                places = output.numel() // module.out_features
            elif isinstance(module, TRANSPOSED):
                places = inputs[0].numel() // module.in_channels
            else:
                places = output.numel() // module.out_channels
            counts[name] += places * weight.numel()

        return count

    for module in model.modules():
        # Found before the forward, because in a functional call other tensors stand for the weights.
        name = by_weight.get(id(float_tensor(module, "weight"))) if isinstance(module, WEIGHT_LAYERS) else None
        if name is not None:
            module.register_forward_hook(counting(name))
    with evaluating(model):
        forward(model, batch)
    return {name: round(macs / samples) for name, macs in counts.items()}


def size_columns(model: nn.Module, macs: Mapping[str, int], reference_macs: int) -> dict[str, Any]:
    """Return the columns of a result row about the model's size, in plain types; docs/compression.md defines them.

    Zeros are counted in the current weights, with one synchronization with the device for the whole model. ``macs`` are
    those of `layer_macs` for the model's structure, and their sum for the model before thinning.
    """
    layers = weight_layers(model)
    weights = [weight for weight in (float_tensor(m, "weight") for m in layers.values()) if weight is not None]
    with torch.no_grad():
        counted = [_alive(weight) for weight in weights]
        numbers = torch.stack([row.to(counted[0].device) for row in counted]).tolist() if counted else []
    elements = alive = outside_zero_structures = 0
    effective = 0.0
    by_layer = {}
    for name, weight, (nonzero, filters, channels) in zip(layers, weights, numbers, strict=True):
        n = weight.numel()
        elements += n
        alive += nonzero
        outside_zero_structures += filters * channels * (n // (weight.shape[0] * weight.shape[1]))
        effective += macs[name] * nonzero / n
        by_layer[name] = round(1 - nonzero / n, 6)
    return {
        "sparsity": 1 - alive / elements if elements else 0.0,
        "structured_sparsity": 1 - outside_zero_structures / elements if elements else 0.0,
        "dense_macs": sum(macs[name] for name in layers),
        "effective_macs": round(effective),
        "inference_saved": share_saved(effective, reference_macs),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layer_sparsity": json.dumps(by_layer),
    }


def _alive(weight: Tensor) -> Tensor:
    """Count the elements, filters (dimension 0) and channels (dimension 1) that are not (entirely) zero: (3,)."""
    nonzero = weight != 0
    parts = (nonzero, nonzero.flatten(1).any(1), nonzero.transpose(0, 1).flatten(1).any(1))
    return torch.stack([part.sum() for part in parts])


def latency(model: nn.Module, example: Tensor | Sequence[Any]) -> float:
    """Return the median seconds of a forward pass of the first sample, in eval mode without gradients.

    Zero weights take as much time as others; only removed structures (`thinning`) make a model faster. Modes, gradients
    and generators are restored afterwards.

    Args:
        model: with its weights on one device.
        example: the model's input tensor or arguments; the first dimension of tensors is the sample.

    Raises:
        UserError: the example has no tensor.
    """
    arguments = (example,) if isinstance(example, Tensor) else tuple(example)
    device = next((a.device for a in arguments if isinstance(a, Tensor) and a.dim()), None)
    if device is None:
        raise UserError("a latency needs an example with at least one tensor of samples, got none")
    single = tuple(a[:1] if isinstance(a, Tensor) and a.dim() else a for a in arguments)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    times = []
    with evaluating(model):
        for _ in range(WARM_UP + REPEATS):
            begun = now()
            model(*single)
            times.append(now() - begun)
    return median(times[WARM_UP:])
