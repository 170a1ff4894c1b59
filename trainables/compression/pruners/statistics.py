"""Pruning of filters ranked by activations or gradients that are collected during training.

Shapes and symbols: F filters of a weight w, shape (F, ...); g the loss's gradient with respect to w; s the share to
prune. Each decision uses the data collected since the last decision and then discards it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainables.compression.masks import hook_gradient, parameters_as_built
from trainables.compression.pruners.activation_watch import ActivationWatch
from trainables.compression.pruners.levels import Share
from trainables.compression.pruners.ranked import StructuredWeights, StructuresPruner
from trainables.compression.pruners.topk import kept_after, structure_count


class _SeenPruner(StructuresPruner):
    """Remove exactly floor(s F) filters with the lowest scores; among equal scores the first is removed first.

    A weight without collected data keeps its current mask, so the first decision is delayed.

    Args: see `StructuresPruner`.
    """

    epochs_before = 1

    def map(self, name: str, weight: Tensor, share: float) -> Tensor | None:
        scores = self.scores(name)
        count = self.structures.count(weight.shape)
        # After thinning, the collected scores include removed filters.
        if scores is None or len(scores) != count:
            return None
        return kept_after(scores, structure_count(share, count))

    @abstractmethod
    def scores(self, name: str) -> Tensor | None:
        """Return the filters' scores, shape (F,), and discard the collected data; None without data."""


class ActivationPruner(_SeenPruner):
    """Remove filters whose activations are most often inactive (APoZ) or have the smallest mean.

    Activations <= 0 count as inactive, so that functions that never return exactly 0 are ranked too.

    Args:
        weights, share: see `StructuresPruner`.
        criterion: ``apoz`` (Hu et al. 2016, eq. 1) or ``mean`` (Molchanov et al. 2017, section 2.2).
    """

    def __init__(self, weights: StructuredWeights, share: Share, *, criterion: Literal["apoz", "mean"]) -> None:
        super().__init__(weights, share)
        self._criterion = criterion
        self._watch = ActivationWatch(self.weights.ranked)

    def start(self, model: nn.Module) -> None:
        self._watch.start(model)

    def stop(self) -> None:
        self._watch.stop()

    def scores(self, name: str) -> Tensor | None:
        sums = self._watch.sums.pop(name, None)
        if sums is None:
            return None
        return -sums.inactive_share if self._criterion == "apoz" else sums.mean

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(state["seen"])


class GradientPruner(_SeenPruner):
    """Remove filters with the smallest |sum g w|, summed over their elements and all backward passes.

    This is the first-order estimate of the loss change when the filter is removed (Molchanov et al. 2017, eq. 8),
    applied to weights instead of activations.
    Terms that are not finite (a step that mixed precision skips) count as 0.

    Args: see `StructuresPruner`.
    """

    def __init__(self, weights: StructuredWeights, share: Share) -> None:
        super().__init__(weights, share)
        self._sums: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def start(self, model: nn.Module) -> None:
        self.stop()
        parameters = parameters_as_built(model)
        for name in self.weights.ranked:
            self._handles.append(hook_gradient(parameters[name], self._adding(name, parameters[name])))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def scores(self, name: str) -> Tensor | None:
        total = self._sums.pop(name, None)
        return None if total is None else total.abs()

    def _adding(self, name: str, weight: Tensor) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            terms = (gradient.detach().double() * weight.detach()).flatten(1).sum(dim=1)
            terms = terms.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            before = self._sums.get(name)
            fits = before is not None and before.shape == terms.shape
            self._sums[name] = before.to(terms.device) + terms if fits and before is not None else terms

        return hook

    def state_dict(self) -> dict[str, Any]:
        return {"sums": {name: total.clone() for name, total in self._sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = dict(state["sums"])
