"""A pass on a draw in which samples are weighted and layers recorded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from trainables.gradients.gradient_method import Draw
from trainables.gradients.layer_signals import LayerSignals
from trainables.gradients.output_rows import OutputRows


class WatchedRows(OutputRows):
    """Weigh a draw's rows, and record layers in the same pass; what the model returned is kept.

    Args:
        model: whose output is meant.
        draw: the samples, with their weights.
        layers: of `layer_signals.treatable_layers`; may be none.
    """

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
