"""Base of the methods that choose samples by what they see of their gradients in the model's layers.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainables.errors import UserError
from trainables.gradients.gradient_method import Draw, GradientMethod
from trainables.gradients.layer_signals import LayerSignals, rows_of_others
from trainables.gradients.output_rows import OutputRows
from trainables.workloads.batch_shapes import shapes_of

#: Iterations from one proof that a layer's rows are the samples to the next: it costs a pass.
PROVE_EVERY = 1000


class WatchedRows(OutputRows):
    """Weigh a draw's rows, and record layers in the same pass; what the model returned is kept."""

    def __init__(self, model: nn.Module, draw: Draw, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(model, draw.size, lambda gradient: draw.weights, keeps_whole=True)
        self.layers = LayerSignals(layers)
        """The layers, of the weighted mean of the samples' losses."""

    def __enter__(self) -> WatchedRows:
        super().__enter__()
        self.layers.__enter__()
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        self.layers.__exit__()
        super().__exit__(kind, *error)


class LayerSampling(GradientMethod):
    """A method that draws samples by what it knows of them; its layers prove that their rows are the samples."""

    chooses_samples = True

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.layers: dict[str, Any] = {}
        """The layers that are looked at, by name."""
        self._since_update = 0
        self._prove_at = 0

    def trained_layers(self) -> dict[str, Any]:
        """Return the layers that have not stopped."""
        return {name: layer for name, layer in self.layers.items() if layer.weight.requires_grad}

    def refresh(self) -> None:
        trained = self.trained_layers()
        if trained and self.iteration >= self._prove_at:
            others = layers_of_others(self, trained)
            self.layers = {name: layer for name, layer in self.layers.items() if name not in others}
            self._prove_at = self.iteration + PROVE_EVERY
        if self.is_due:
            self.update()
        self._since_update += 1

    @property
    def is_due(self) -> bool:
        """Return whether `update` is due before this iteration."""
        raise NotImplementedError

    def update(self) -> None:
        """Follow what was seen of the samples."""
        raise NotImplementedError

    def extra_state(self) -> dict[str, Any]:
        return {"since_update": self._since_update, "layers": list(self.layers), "prove_at": self._prove_at}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._since_update = int(state["since_update"])
        self.layers = {name: layer for name, layer in self.layers.items() if name in state.get("layers", self.layers)}
        self._prove_at = int(state.get("prove_at", 0))


def layers_of_others(method: GradientMethod, layers: Mapping[str, nn.Module]) -> set[str]:
    """Return the layers whose rows are not the samples of the method's next draw, and warn of them.

    A pass in which the loss of half of the samples counts nothing must leave their rows without a gradient in each
    layer. Norms are looked at in evaluation mode, since in training they depend on the whole batch.

    Raises:
        UserError: all layers are so.
    """
    draw = method.draw(method.generator())
    if draw.size < 2:
        return set()
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
    finally:
        for module, mode in modes:
            module.training = mode
    others = {
        name
        for name in layers
        for _, gradient in recorded.calls(name)
        if len(gradient) == draw.size and bool(gradient[weights == 0].any())
    }
    if others == layers.keys():
        raise UserError(
            f"samples' gradients cannot be read in the layers: {rows_of_others(layers)}. Put the samples' dimension "
            "first (batch_first=True), or use another method"
        )
    if others:
        warnings.warn(f"{rows_of_others(sorted(others))}: they are not looked at", stacklevel=4)
    return others
