"""Findings of the doctor, and the measurement of their costs: two variants in turns on one machine, as ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

#: Pairs of runs that a cost is measured from, after one pair that is not counted.
PAIRS = 7
#: Seconds that the pairs of one measurement may take together; three are run even if they exceed it.
BUDGET_S = 10.0
#: Widest range of savings, from below zero to above it, that is still an answer.
WIDEST = 0.5


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that makes a training slower than it has to be."""

    name: str
    """Short name, in words joined by hyphens."""
    what: str
    """The fault in words, and why it costs time or memory."""
    cost: str
    """Its cost here, as measured."""
    mend: tuple[str, ...]
    """Lines of code or words that mend it."""

    def __str__(self) -> str:
        return "\n    ".join((f"{self.name}: {self.what}", f"cost: {self.cost}", *self.mend))


@dataclass(frozen=True)
class Ratios:
    """Times of one variant over another, pair by pair."""

    values: tuple[float, ...]
    """Each pair's ratio."""

    @property
    def saved(self) -> float:
        """Return the share of the second variant's time that the first saves; the median pair's."""
        return 1 - median(self.values)

    def text(self, of: str) -> str:
        """Return the saving in words, with its spread."""
        low, high = 1 - max(self.values), 1 - min(self.values)
        if low <= 0 <= high and high - low > WIDEST:
            return f"cannot be told here: times of {of} vary too much ({len(self.values)} pairs)"
        if low <= 0 <= high:
            return f"none measurable here: {percent(low)} to {percent(high)} of {of} ({len(self.values)} pairs)"
        return f"{percent(self.saved)} of {of} ({percent(low)} to {percent(high)}, {len(self.values)} pairs)"


def percent(share: float) -> str:
    """Return a share as text.

    >>> percent(0.0312)
    '3.1 %'
    """
    return f"{100 * share:.1f} %"


def ratios(mended: Callable[[], object], plain: Callable[[], object], device: torch.device) -> Ratios:
    """Run two variants in turns and return the ratios of their times."""

    def seconds(run: Callable[[], object]) -> float:
        _wait(device)
        begun = time.perf_counter()
        run()
        _wait(device)
        return time.perf_counter() - begun

    first = seconds(mended) + seconds(plain)
    pairs = max(3, min(PAIRS, int(BUDGET_S / max(first, 1e-9))))
    return Ratios(tuple(seconds(mended) / seconds(plain) for _ in range(pairs)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report_text(findings: Sequence[Finding]) -> str:
    """Return all findings as text; one line where there are none."""
    if not findings:
        return "recipe: nothing found that makes this training slower than it has to be (docs/recipe.md)"
    return "\n".join([f"recipe: {len(findings)} to mend (docs/recipe.md)", *map(str, findings)])
