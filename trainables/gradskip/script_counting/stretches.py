"""Total cost of an optimizer's steps, from some measured steps of each stretch with one set of stopped layers. Pure.

Steps of one stretch whose inputs are of one size are alike: the median of the measured ones stands for all of them.
What others cost is fitted to their sizes (`input_sizes.fitted`). Stops do not change the forward pass, and the backward
pass of all sizes by one share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from trainables.gradskip.script_counting.input_sizes import Size, fitted, from_text

#: Steps that are measured for each set of stopped layers and size of inputs: one of them may include an evaluation
#: without `torch.no_grad()`.
LOOKS = 3
#: Most sizes that are measured with nothing stopped, and with a set of layers stopped.
SIZES_DENSE, SIZES_STOPPED = 40, 8


@dataclass(kw_only=True)
class Stretch:
    """Steps of one optimizer with one set of stopped layers in the process."""

    steps: int = 0
    dense: bool = True
    """True where nothing was stopped anywhere."""
    forward_flops: list[int] = field(default_factory=list)
    """Of each measured step."""
    backward_flops: list[int] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    """Size of each measured step's inputs (`input_sizes.as_text`); empty texts where the model's calls are not seen."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of steps of each size."""
    gradient_bytes: int = 0
    optimizer_bytes: int = 0


@dataclass(kw_only=True)
class StepTotals:
    """Total cost of the steps of one optimizer, in FLOPs and bytes."""

    steps: int
    measured_steps: int
    """Steps whose FLOPs were counted; those of the others follow from them."""
    forward_flops: int
    backward_flops: int
    dense_flops: int
    """FLOPs of the same number of steps with nothing stopped, forward and backward."""
    dense_backward_flops: int
    gradient_bytes: int
    optimizer_bytes: int


def totals_of(stretches: Sequence[Stretch]) -> StepTotals:
    """Return the total cost of the steps of one optimizer."""
    forward = _medians((s.sizes, s.forward_flops) for s in stretches)
    measured = [s for s in stretches if s.backward_flops]
    seen = next((s for s in measured if s.dense), measured[0] if measured else stretches[0])
    dense = _medians((s.sizes, s.backward_flops) for s in measured if s.dense == seen.dense and (s.dense or s is seen))
    steps, totals = 0, dict.fromkeys(("forward", "backward", "dense_backward", "sent", "visited"), 0.0)
    for stretch in stretches:
        if stretch.backward_flops:  # one too short to be measured has the cost of the one before it
            seen = stretch
        own = _medians([(seen.sizes, seen.backward_flops)])
        whole = sum(fitted(dense, size) for size in own)
        share = sum(own.values()) / whole if whole else 0.0
        steps += stretch.steps
        for size, count in _counts(stretch).items():
            full = fitted(dense, size)
            totals["forward"] += count * fitted(forward, size)
            totals["dense_backward"] += count * full
            totals["backward"] += count * (own[size] if size in own else share * full)
        totals["sent"] += stretch.steps * seen.gradient_bytes
        totals["visited"] += stretch.steps * seen.optimizer_bytes
    flops = {name: round(value) for name, value in totals.items()}
    return StepTotals(
        steps=steps,
        measured_steps=sum(len(stretch.sizes) for stretch in stretches),
        forward_flops=flops["forward"],
        backward_flops=flops["backward"],
        dense_flops=flops["forward"] + flops["dense_backward"],
        dense_backward_flops=flops["dense_backward"],
        gradient_bytes=flops["sent"],
        optimizer_bytes=flops["visited"],
    )


def _medians(measured: Iterable[tuple[Sequence[str], Sequence[int]]]) -> dict[Size, float]:
    """Return the median cost of the first measured steps of each size."""
    found: dict[Size, list[int]] = {}
    for sizes, flops in measured:
        for text, one in zip(sizes, flops, strict=True):
            found.setdefault(from_text(text), []).append(one)
    return {size: float(median_low(values[:LOOKS])) for size, values in found.items()}


def _counts(stretch: Stretch) -> dict[Size, int]:
    """Return the number of steps by size."""
    return {from_text(text): count for text, count in stretch.counts.items()}
