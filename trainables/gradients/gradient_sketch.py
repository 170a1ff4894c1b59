"""Sketches of per-sample gradients: a few numbers a layer that keep distances between gradients, about.

Symbols: g_i gradient of sample i's own loss with respect to the weights of the treated layers; of a layer it is
G_i = sum_t d_t a_t^T, d_t the output gradient and a_t the input at place t. Its sketch is P^T G_i Q with fixed random
matrices P, Q of independent normal numbers of variance 1 / p, so that the expected squared distance of two sketches is
that of the gradients, and equal gradients have equal sketches. It is computed as sum_t (P^T d_t) (Q^T a_t)^T: no
per-sample gradient is ever built. A side of a layer of at most p numbers is taken as it is. Biases are left out.

Shapes: B samples of a batch; T places, I inputs, O outputs of a layer (`layer_signals`); S numbers of a sketch, at most
p^2 a layer; sketches (B, S).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainables.gradients.layer_signals import LayerSignals, rows_of_inputs, rows_of_outputs, samples_not_first

#: p, the numbers that a side of a layer is reduced to.
SIDE = 8


class GradientSketch:
    """Fixed random projections of the layers' gradients.

    Args:
        layers: of `layer_signals.treatable_layers`.
        device: of the model.
        seed: of the projections.
        side: p, >= 1.
    """

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device, seed: int, side: int = SIDE) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._layers = layers
        self._sides: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._places: dict[str, slice] = {}
        end = 0
        for name, layer in layers.items():
            assert isinstance(layer.weight, Tensor)
            outputs, inputs = layer.weight.flatten(1).shape
            found = [
                torch.randn(size, side, generator=generator).div_(side**0.5).to(device) if size > side else None
                for size in (outputs, inputs)
            ]
            self._sides[name] = (found[0], found[1])
            start, end = end, end + min(outputs, side) * min(inputs, side)
            self._places[name] = slice(start, end)
        self.width = end
        """S."""

    def of(self, recorded: LayerSignals, samples: int, scale: Tensor | float) -> tuple[Tensor, int]:
        """Return the sketches of a batch's gradients (B, S), and the FLOPs that they took.

        Args:
            recorded: the layers in one backward pass.
            samples: B.
            scale: factor that makes a row's gradient that of the sample's own loss; a number or (B,).

        Raises:
            UserError: a layer whose first dimension is not the samples'.
        """
        found: Tensor | None = None
        flops = 0
        for name, layer in self._layers.items():
            for seen, gradient in recorded.calls(name):
                if len(seen) != samples:
                    raise samples_not_first(name, len(seen), samples)
                outputs, inputs = self._sides[name]
                d = rows_of_outputs(layer, gradient).float()
                a = _projected(layer, seen.float(), inputs)
                if outputs is not None:
                    flops += 2 * d.numel() * outputs.shape[1]
                    d = d @ outputs
                if inputs is not None:
                    flops += 2 * a.numel() * len(inputs)
                flops += 2 * d.numel() * a.shape[2]
                if found is None:
                    found = torch.zeros(samples, self.width, device=a.device)
                found[:, self._places[name]] += (d.transpose(1, 2) @ a).flatten(1)
        assert found is not None, "a backward pass through none of the layers"
        return found * (scale if isinstance(scale, float) else scale.view(-1, 1)), flops


def _projected(layer: nn.Module, seen: Tensor, sides: Tensor | None) -> Tensor:
    """Return Q^T a_t of a layer's input: (B, T, p); of a convolution by one with Q as its kernels, without patches."""
    if sides is None:
        return rows_of_inputs(layer, seen)
    if isinstance(layer, nn.Linear):
        return rows_of_inputs(layer, seen) @ sides
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    kernels = sides.T.reshape(-1, *layer.weight.shape[1:])
    return layer._conv_forward(seen, kernels, None).flatten(2).transpose(1, 2)
