"""Pruning of the share of the structures that rank lowest.

Shapes and symbols: G structures of a weight, n elements each; s the share to prune; a map is G numbers, 0 removes a
structure.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from trainables.compression.component import Pruner
from trainables.compression.pruners.levels import Share
from trainables.compression.pruners.topk import kept_after, structure_count
from trainables.compression.schedule.timing import Moment
from trainables.compression.structures import Structures
from trainables.errors import UserError


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator whose numbers depend only on seed and name, the same in each process."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@dataclass(frozen=True, kw_only=True)
class StructuredWeights:
    """Weights whose structures are pruned."""

    names: tuple[str, ...]
    """Parameter names, at least one."""
    structures: Structures
    """The structures that are pruned."""
    has_leader: bool = False
    """True if all weights lose the same structures as the first one."""

    @property
    def ranked(self) -> tuple[str, ...]:
        """Return the names of the weights that are ranked: all, or only the leader."""
        return self.names[:1] if self.has_leader else self.names

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Check that weights of these shapes can be pruned this way.

        Raises:
            UserError: a weight does not have these structures, or not as many as the leader.
        """
        for name in self.names:
            self.structures.check(name, shapes[name])
        leader = self.names[0]
        wanted = self.structures.count(shapes[leader])
        for name in self.names[1:]:
            if self.has_leader and (count := self.structures.count(shapes[name])) != wanted:
                raise UserError(
                    f"group_dependency Leader needs weights with equally many {self.structures.kind}, got {wanted} in "
                    f"{leader} {tuple(shapes[leader])} and {count} in {name} {tuple(shapes[name])}"
                )


class StructuresPruner(Pruner):
    """Base of all pruners of structures: one map per weight, or the leader's map for all.

    Args:
        weights: the weights and their structures.
        share: s at a moment.
    """

    def __init__(self, weights: StructuredWeights, share: Share) -> None:
        self.targets = weights.names
        self.weights = weights
        self.structures = weights.structures
        self._share = share

    def masks(self, weights: Mapping[str, Tensor], current: Mapping[str, Tensor], moment: Moment) -> dict[str, Tensor]:
        # Thinning changes shapes after the pruner was built.
        self.weights.check({name: weights[name].shape for name in self.targets})
        maps = {}
        for name in self.weights.ranked:
            found = self.map(name, weights[name].detach(), self._share(moment))
            if found is not None:
                maps[name] = found
        if self.weights.has_leader and maps:
            maps = dict.fromkeys(self.targets, maps[self.targets[0]])
        return {name: self.structures.spread(found, weights[name]) for name, found in maps.items()}

    @abstractmethod
    def map(self, name: str, weight: Tensor, share: float) -> Tensor | None:
        """Return the map of one weight, shape (G,); None if it cannot be computed yet."""


class DrawingPruner(StructuresPruner):
    """Base of pruners with random numbers; the generator's state is the pruner's state.

    Args:
        weights, share: see `StructuresPruner`.
        generator: on the CPU; also draws any random share.
    """

    def __init__(self, weights: StructuredWeights, share: Share, *, generator: torch.Generator) -> None:
        super().__init__(weights, share)
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class NormRankedPruner(DrawingPruner):
    """Remove exactly k structures with the smallest norm: sum |w| (Li et al. 2017, section 3.1), or sqrt(sum w^2).

    All structures of a weight have n elements, so ranking by means would give the same order.

    Args:
        weights, share, generator: see `DrawingPruner`.
        order: of the norm.
        group_size: k is a multiple of it.
        noise: standard deviation of the normal factor (mean 1) on each norm, >= 0.
    """

    def __init__(
        self,
        weights: StructuredWeights,
        share: Share,
        *,
        order: Literal[1, 2],
        group_size: int = 1,
        noise: float = 0.0,
        generator: torch.Generator,
    ) -> None:
        super().__init__(weights, share, generator=generator)
        self._order = order
        self._group_size = group_size
        self._noise = noise

    def map(self, name: str, weight: Tensor, share: float) -> Tensor:
        norms = torch.linalg.vector_norm(self.structures.split(weight), self._order, dim=1)
        if self._noise:
            # Drawn on the CPU, so that the ranking is the same on every device.
            factors = torch.randn(len(norms), generator=self._generator, dtype=torch.float64)
            norms = norms * (1 + self._noise * factors).to(norms)
        return kept_after(norms, structure_count(share, len(norms), self._group_size))


def random_share(least: float, greatest: float, generator: torch.Generator) -> Share:
    """Return a share that is drawn uniformly at each call."""

    def draw(moment: Moment) -> float:
        return least + (greatest - least) * float(torch.rand((), generator=generator, dtype=torch.float64))

    return draw
