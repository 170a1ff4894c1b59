"""Proof that the rows of layers are the samples of a batch, for methods that read samples' gradients in layers.

A pass in which the loss of half of the samples counts nothing must leave their rows without a gradient in each layer.

Shapes: B samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from trainables.errors import UserError
from trainables.gradients.gradient_method import GradientMethod
from trainables.gradients.layer_signals import LayerSignals, rows_of_others
from trainables.gradients.output_rows import OutputRows
from trainables.workloads.batch_shapes import shapes_of

#: Iterations from one proof to the next: it costs a pass.
PROVE_EVERY = 1000


def layers_of_samples(method: GradientMethod, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers whose rows are the samples of the method's next draw, and warn of the others.

    Norms are looked at in evaluation mode, since in training they depend on the whole batch.

    Raises:
        UserError: there is no such layer.
    """
    draw = method.draw(method.generator())
    if draw.size < 2 or not layers:
        return dict(layers)
    weights = torch.arange(draw.size, device=method.device).remainder(2).to(torch.float32)
    modes = [(module, module.training) for module in method.model.modules()]
    method.model.eval()
    try:
        key = ("rows", shapes_of(draw.batch))
        with (
            method.pass_on(draw) as evaluate,
            OutputRows(method.model, draw.size, lambda _: weights),
            LayerSignals(layers) as recorded,
        ):
            with method.meter.forward(key):
                loss = evaluate({})
            with method.meter.backward(key):
                torch.autograd.grad(loss, recorded.edges, allow_unused=True)
            left_out = weights == 0
            others = {
                name
                for name in layers
                for _, gradient in recorded.calls(name)
                if len(gradient) == draw.size and bool(gradient[left_out].any())
            }
    finally:
        for module, mode in modes:
            module.training = mode
    if others == layers.keys():
        raise UserError(
            f"samples' gradients cannot be read in the layers: {rows_of_others(layers)}. Put the samples' dimension "
            "first (batch_first=True), or use another method"
        )
    if others:
        warnings.warn(f"{rows_of_others(sorted(others))}: they are not looked at", stacklevel=4)
    return {name: layer for name, layer in layers.items() if name not in others}
