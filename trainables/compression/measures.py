"""Size, multiply-adds (MACs) and latency of a model, and the share of it that is zero.

A weight layer is a convolution or a linear layer with its own weight. The float weights are counted, also if a
quantizer computes with other values.

Shapes: a weight is (C_out, C_in / groups, *kernel), of a transposed convolution (C_in, C_out / groups, *kernel), of a
linear layer (C_out, C_in); n its number of elements, z the number of nonzero elements.
MACs: multiplications, each with an addition, of one sample: n for each place at which the weight is applied.
    dense       all of them
    effective   dense * z / n
What is multiplied outside of weight layers, such as queries with keys and whatever recurrent layers do, is counted as
`OTHERS`, dense whatever is zero; of `nn.MultiheadAttention` also the projections, whose modules are not called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from trainables.compression.model_copies import evaluating, float_tensor, hookless_copy
from trainables.compression.schedule.names import plain_name
from trainables.runtime.operator_flops import flop_counter
from trainables.savings import share_saved
from trainables.workloads.base import Batch
from trainables.workloads.batch_shapes import on_meta, to_meta

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHT_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED, nn.Linear)
#: Key of MACs that belong to no weight layer; no parameter's name.
OTHERS = ""
#: Runs a model on a batch, such as `Workload.loss`; the result is not used.
Forward = Callable[[nn.Module, Batch], object]


def layer_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a weight layer, None of other modules."""
    return float_tensor(module, "weight") if isinstance(module, WEIGHT_LAYERS) else None


def layer_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the weight layers by name, each once, in the model's order."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, module in model.named_modules():
        if (weight := layer_weight(module)) is not None:
            found.setdefault(id(weight), (plain_name(f"{name}.weight" if name else "weight"), weight))
    return dict(found.values())


def layer_macs(model: nn.Module, forward: Forward, batch: Batch) -> dict[str, int]:
    """Count the MACs of one sample of each weight layer, by weight name, and of the rest, if any, as `OTHERS`.

    They depend only on shapes and change only by thinning. A copy runs on the meta device, or on the CPU if it needs
    values; the model, its hooks and all generators are not changed. A weight that several layers share is counted under
    its first name, with the MACs of all these layers.
    """
    copied = hookless_copy(model)
    try:
        return _counted(on_meta(copied), forward, to_meta(batch))
    except Exception:  # noqa: BLE001  # it makes tensors of its own on the CPU, or looks at numbers: then it gets some
        return _counted(copied.to("cpu"), forward, tuple(torch.zeros(t.shape, dtype=t.dtype) for t in batch))


def _counted(model: nn.Module, forward: Forward, batch: Batch) -> dict[str, int]:
    names = {id(weight): name for name, weight in layer_weights(model).items()}
    counts = dict.fromkeys(names.values(), 0)

    def count(name: str, shape: torch.Size, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # The weight is applied at each place of the tensor whose channels are its dimension 0.
        places = (inputs[0] if isinstance(module, TRANSPOSED) else output).numel() // shape[0]
        counts[name] += places * shape.numel()

    for module in model.modules():
        # Found before the forward, because in a functional call other tensors stand for the weights.
        if (weight := layer_weight(module)) is not None:
            module.register_forward_hook(partial(count, names[id(weight)], weight.shape))
    with evaluating(model), flop_counter() as counter, torch.enable_grad():  # without gradients attention may be fused
        forward(model, batch)
    if (others := counter.get_total_flops() // 2 - sum(counts.values())) > 0:
        counts[OTHERS] = others
    return {name: round(macs / len(batch[0])) for name, macs in counts.items()}


def size_columns(model: nn.Module, macs: Mapping[str, int], reference_macs: int) -> dict[str, Any]:
    """Return the columns of a result row about the model's size, in plain types; docs/compression.md defines them.

    Zeros are counted in the current weights. ``macs`` are those of `layer_macs` for the model's structure, and their
    sum for the model before thinning.
    """
    weights = layer_weights(model)
    elements = alive = outside_zero_structures = 0
    effective = float(macs.get(OTHERS, 0))
    by_layer = {}
    for name, weight in weights.items():
        is_alive, n = weight != 0, weight.numel()
        nonzero = int(is_alive.sum())
        filters, channels = (int(is_alive.transpose(0, side).flatten(1).any(1).sum()) for side in (0, 1))
        elements += n
        alive += nonzero
        outside_zero_structures += filters * channels * (n // (weight.shape[0] * weight.shape[1]))
        effective += macs[name] * nonzero / n
        by_layer[name] = round(1 - nonzero / n, 6)
    dense = sum(macs.values())
    return {
        "sparsity": 1 - alive / elements if elements else 0.0,
        "structured_sparsity": 1 - outside_zero_structures / elements if elements else 0.0,
        "dense_macs": dense,
        "effective_macs": round(effective),
        "inference_saved": share_saved(dense, reference_macs),
        "sparse_inference_saved": share_saved(effective, reference_macs),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layer_sparsity": json.dumps(by_layer),
    }


def zero_share(model: nn.Module) -> float:
    """Return the share of the weight layers' elements that are zero."""
    weights = layer_weights(model).values()
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    return zeros / max(1, sum(weight.numel() for weight in weights))


def latency(model: nn.Module, forward: Forward, batch: Batch) -> float:
    """Return the median seconds of a forward pass of a batch's first sample, in eval mode without gradients.

    Zero weights take as much time as others; only removed structures (`thinning`) make a model faster. Modes, gradients
    and generators are restored afterwards.
    """
    names = {"forward": forward, "model": model, "single": tuple(tensor[:1] for tensor in batch)}
    with evaluating(model):
        timer = Timer("forward(model, single)", globals=names, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=0.1).median)  # after a warm-up
