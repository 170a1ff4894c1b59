"""Weights as they are once the batch norm behind a convolution is folded into it.

Shapes and symbols: W a convolution's weight, (F, C, ...); gamma, running variance v and epsilon of the batch norm that
its output goes to, shape (F,). Inference computes with W gamma / sqrt(v + eps) (Krishnamoorthi 2018, eq. 20), so that
is what magnitude tells importance from (policy argument ``fold_batchnorm``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from trainables.compression.schedule.names import plain_name


def batchnorms_after(model: nn.Module, run: Callable[[], object]) -> dict[str, str]:
    """Which batch norm each convolution's output goes to directly.

    Found in a forward in evaluation mode and without gradients; modes and statistics are as before afterwards.

    Args:
        model: any.
        run: calls the model with an example batch.

    Returns:
        Module names of batch norms by those of convolutions; convolutions without one are missing.
    """
    outputs: dict[int, tuple[str, Tensor]] = {}
    found: dict[str, str] = {}
    handles: list[RemovableHandle] = []

    def remember(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            # The tensor is held so that no later one gets its identity.
            outputs[id(output)] = (name, output)

        return hook

    def look(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs and id(inputs[0]) in outputs:
                found[outputs[id(inputs[0])][0]] = name

        return hook

    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            handles.append(module.register_forward_hook(remember(plain_name(name))))
        elif isinstance(module, _BatchNorm):
            handles.append(module.register_forward_pre_hook(look(plain_name(name))))
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    return found


def folded(weights: Mapping[str, Tensor], model: nn.Module, batchnorms: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights times gamma / sqrt(v + eps) a filter; those that no batch norm follows as they are.

    Args:
        weights: by parameter name.
        model: with the batch norms.
        batchnorms: from `batchnorms_after`.

    Returns:
        New tensors where a batch norm follows. One that keeps no running statistics cannot be folded, as in inference.
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
