"""Total cost of an optimizer's steps, from a few measured steps of each stretch with one set of stopped layers. Pure.

Steps of one stretch are assumed to be alike: the median of the measured ones is used for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

#: Steps that are measured for each set of stopped layers: one of them may be an epoch's last, smaller one, or include
#: an evaluation without `torch.no_grad()`.
LOOKS = 3


@dataclass(kw_only=True)
class Stretch:
    """Steps of one optimizer with one set of stopped layers in the process."""

    steps: int = 0
    dense: bool = True
    """True where nothing was stopped anywhere."""
    forward_flops: list[int] = field(default_factory=list)
    backward_flops: list[int] = field(default_factory=list)
    gradient_bytes: int = 0
    optimizer_bytes: int = 0


@dataclass(kw_only=True)
class StepTotals:
    """Total cost of the steps of one optimizer, in FLOPs and bytes."""

    steps: int
    forward_flops: int
    backward_flops: int
    dense_flops: int
    """FLOPs of the same number of steps with nothing stopped, forward and backward."""
    dense_backward_flops: int
    gradient_bytes: int
    optimizer_bytes: int


def totals_of(stretches: Sequence[Stretch]) -> StepTotals:
    """Return the total cost of the steps of one optimizer."""
    # Stops do not change the forward pass.
    forward_step = _median([flops for stretch in stretches for flops in stretch.forward_flops][:LOOKS])
    seen = next((s for s in stretches if s.dense and s.backward_flops), None)
    seen = seen or next((s for s in stretches if s.backward_flops), stretches[0])
    dense_step = _median(seen.backward_flops)
    steps, backward, sent, visited = 0, 0, 0, 0
    for stretch in stretches:
        if stretch.backward_flops:  # one too short to be measured has the cost of the one before it
            seen = stretch
        steps += stretch.steps
        backward += stretch.steps * _median(seen.backward_flops)
        sent += stretch.steps * seen.gradient_bytes
        visited += stretch.steps * seen.optimizer_bytes
    return StepTotals(
        steps=steps,
        forward_flops=steps * forward_step,
        backward_flops=backward,
        dense_flops=steps * (forward_step + dense_step),
        dense_backward_flops=steps * dense_step,
        gradient_bytes=sent,
        optimizer_bytes=visited,
    )


def _median(flops: Sequence[int]) -> int:
    return median_low(flops) if flops else 0
