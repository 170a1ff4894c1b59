"""Result of one recorded forward pass: execution order of the layers, and the parameters upstream of each.

Sets of parameters are bit masks: bit n stands for parameter n.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """Execution order and upstream parameters, by parameter number, as recorded in one forward pass."""

    ranks: tuple[int, ...]
    """Rank of the first call of the module that owns the parameter, from 0; ascending in execution order."""
    upstream: tuple[int, ...]
    """Mask of the parameters that the owner's input depends on: their gradients pass through the owner. If a parameter
    is used several times, only the first use counts: parameters that only a later use depends on do not affect its
    stop."""
    before: Mapping[str, int] = field(default_factory=dict)
    """Mask of a module's input by its name, over all its calls; modules in the order in which they were called."""

    def state_dict(self) -> dict[str, Any]:
        """Return the trace in plain types.

        A mask is stored as its difference to an earlier one, so the size is proportional to the model's.
        """
        return {
            "ranks": list(self.ranks),
            "upstream": _differences(self.upstream[number] for number in self._by_rank(self.ranks)),
            "before": _differences(self.before.values()),
            "modules": list(self.before),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ModelTrace:
        """Return the trace that `state_dict` gave."""
        ranks = tuple(state["ranks"])
        upstream = dict(zip(cls._by_rank(ranks), _sums(state["upstream"]), strict=True))
        return cls(
            ranks=ranks,
            upstream=tuple(upstream[number] for number in range(len(ranks))),
            before=dict(zip(state["modules"], _sums(state["before"]), strict=True)),
        )

    @property
    def order(self) -> tuple[int, ...]:
        """Return the parameters' numbers in execution order."""
        return tuple(self._by_rank(self.ranks))

    @staticmethod
    def _by_rank(ranks: Sequence[int]) -> list[int]:
        return sorted(range(len(ranks)), key=lambda number: (ranks[number], number))

    def renumbered(self, numbers: Sequence[int]) -> ModelTrace:
        """Return the same trace for some of the parameters, or in another order.

        Args:
            numbers: for each new number the parameter's number in this trace.
        """
        if tuple(numbers) == tuple(range(len(self.ranks))):
            return self
        new_of = {old: new for new, old in enumerate(numbers)}
        state = self.state_dict()
        kept = [[back, *(new_of[n] for n in changed if n in new_of)] for back, *changed in state["upstream"]]
        upstream = dict(zip(self._by_rank(self.ranks), _sums(kept), strict=True))
        kept = [[back, *(new_of[n] for n in changed if n in new_of)] for back, *changed in state["before"]]
        return ModelTrace(
            ranks=tuple(self.ranks[old] for old in numbers),
            upstream=tuple(upstream[old] for old in numbers),
            before=dict(zip(state["modules"], _sums(kept), strict=True)),
        )

    def with_unknown(self, count: int) -> ModelTrace:
        """Return the same trace with ``count`` more parameters at the end, which no module owns."""
        last = 1 + max(self.ranks, default=-1)
        return replace(self, ranks=(*self.ranks, *[last] * count), upstream=(*self.upstream, *[0] * count))

    def left_upstream(self, stopped: Collection[int]) -> set[int]:
        """Return the numbers of parameters outside ``stopped`` whose gradients pass through a stopped layer."""
        mask = 0
        for number in stopped:
            mask |= self.upstream[number]
        return numbers_of(mask & ~mask_of(stopped))


def numbers_of(mask: int) -> set[int]:
    """Return the numbers in a mask.

    >>> sorted(numbers_of(0b1010))
    [1, 3]
    """
    digits = bin(mask)[:1:-1]
    return {n for n, digit in enumerate(digits) if digit == "1"}


def mask_of(numbers: Iterable[int]) -> int:
    """Return the mask with these numbers.

    >>> bin(mask_of([1, 3]))
    '0b1010'
    """
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


#: Number of latest masks among which the one nearest to the next mask is searched: this many branches may alternate.
_BRANCHES = 32


def _differences(masks: Iterable[int]) -> list[list[int]]:
    """Return each mask as [distance back to the nearest earlier mask (0: the empty mask), numbers that differ...]."""
    found: list[list[int]] = []
    last: list[int] = []  # the latest last
    for mask in masks:
        candidates = [0, *reversed(last)]
        back = min(range(len(candidates)), key=lambda n: ((mask ^ candidates[n]).bit_count(), n))
        found.append([back, *sorted(numbers_of(mask ^ candidates[back]))])
        last = [*last, mask][-_BRANCHES:]
    return found


def _sums(differences: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield the masks that `_differences` encoded."""
    last: list[int] = []
    for back, *changed in differences:
        mask = mask_of(changed) ^ (last[-back] if back else 0)
        last = [*last, mask][-_BRANCHES:]
        yield mask
