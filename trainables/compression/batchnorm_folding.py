"""Convolution weights with the following batch norm folded in.

Shapes and symbols: W a convolution's weight, (F, C, ...); gamma, running variance v and epsilon of the batch norm that
reads its output, shape (F,). Inference computes with W gamma / sqrt(v + eps) (Krishnamoorthi 2018, eq. 20), so
magnitude criteria rank these folded weights (policy argument ``fold_batchnorm``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.compression.model_copies import evaluating
from trainables.compression.schedule.names import plain_name


def batchnorms_after(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, str]:
    """Return the names of convolutions mapped to those of the batch norms that directly read their outputs.

    Runs one forward pass in evaluation mode without gradients; modes and statistics are left as they were.
    """
    names = {module: plain_name(name) for name, module in model.named_modules()}
    outputs: dict[int, tuple[str, Tensor]] = {}  # with the tensor, so that no later one gets the same id
    found: dict[str, str] = {}

    def convolved(module: nn.Module, inputs: object, output: Tensor) -> None:
        outputs[id(output)] = (names[module], output)

    def read(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and id(inputs[0]) in outputs:
            found[outputs[id(inputs[0])][0]] = names[module]

    handles = [
        *(m.register_forward_pre_hook(read) for m in names if isinstance(m, _BatchNorm)),
        *(m.register_forward_hook(convolved) for m in names if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))),
    ]
    try:
        with evaluating(model):
            run(model)
    finally:
        for handle in handles:
            handle.remove()
    return found


def folded(weights: Mapping[str, Tensor], model: nn.Module, batchnorms: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the weights with each filter multiplied by gamma / sqrt(v + eps) where a batch norm follows.

    Batch norms without running statistics cannot be folded in inference and are skipped.
    """
    modules = {plain_name(name): module for name, module in model.named_modules()}
    result = dict(weights)
    for convolution, batchnorm in batchnorms.items():
        weight = weights.get(f"{convolution}.weight")
        module = modules[batchnorm]
        assert isinstance(module, _BatchNorm)
        if weight is None or module.running_var is None:
            continue
        factor = (module.running_var + module.eps).rsqrt()
        if module.affine:
            factor = factor * module.weight.detach()
        result[f"{convolution}.weight"] = weight.detach() * factor.to(weight).reshape(-1, *[1] * (weight.dim() - 1))
    return result
