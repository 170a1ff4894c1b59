"""Total cost of an optimizer's steps, from some measured steps of each stretch with one set of stopped layers. Pure.

The median of the measured steps of a size of inputs stands for all of that size, or, where these differ (a penalty
every few steps), the mean of many in a row; what others cost is fitted (`input_sizes.fitted`). Stops do not change
the forward pass, and the backward pass of all sizes by one share. Steps that read from a forward cache have a
forward pass of their own, alike in a stretch. The dense run has frozen and left out what the user has, and the loop
that the step has. Where it was never measured so, what stops save is what they saved with other layers left out; in
another loop the share that they saved there; else, as in a run frozen from the first step on, what the forward pass
shows that the backward pass leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low

from trainables.gradskip.script_counting.input_sizes import Size, fitted, reads_of

#: Steps that are measured for each set of stopped layers and size of inputs: one of them may include an evaluation
#: without `torch.no_grad()`.
LOOKS = 3
#: Steps that are measured in a row where two of one size differ by more than a share.
LOOKS_IN_A_ROW, ALIKE = 100, 0.01
#: Further steps of a stretch that are measured, to find such differences, and each that is a multiple of a number.
LATER_LOOKS, LOOK_EVERY = frozenset(round(1.5**n) for n in range(4, 12)), 97
#: Most stretches with the same stops; steps that would begin another one count as of the most similar one.
MOST_STRETCHES = 128
#: Measured steps among which one is looked for that is like a step that was not measured.
TRIES = 40
#: Measured steps with the same stops behind which only each `LOOK_EVERY`th step is measured, whatever it is like.
MOST_LOOKS = 200
#: One step in so many, at most, includes an evaluation with gradients that no measured step included.
RARE = 8
#: Most sizes that are measured with nothing stopped, and with a set of layers stopped.
SIZES_DENSE, SIZES_STOPPED = 40, 8


#: What the user froze, what else got no gradient, and the loop.
Pattern = tuple[str, str, int]


@dataclass(kw_only=True)
class Stretch:
    """Steps of one optimizer with one set of stopped layers in the process, and of those that the user left out.

    Sets of this optimizer's parameters are hexadecimal masks; none has those of another.
    """

    steps: int = 0
    dense: bool = True  # true where nothing was stopped anywhere
    stopped: str = ""  # what was stopped in the process
    still: str = "0"  # what was stopped of this optimizer
    frozen: str = "0"  # what the user froze
    unused: str = "0"  # what else got no gradient
    loop: int = 0  # how often the loop had changed, so that it costs other FLOPs, or is seen by other sizes
    row_begins: int | None = None  # number of the first measured step of those in a row, which count alone
    forward_flops: list[int] = field(default_factory=list)  # of each measured step
    backward_flops: list[int] = field(default_factory=list)
    left_flops: list[float] = field(default_factory=list)  # what stops leave out of it, as the forward pass shows
    sizes: list[Size] = field(default_factory=list)  # size of each measured step's inputs
    counts: dict[Size, int] = field(default_factory=dict)  # number of steps of each size
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Return what its steps have in common."""
        return self.stopped, self.still, self.frozen, self.unused, self.loop

    def likeness(self, other: Stretch) -> tuple[bool, int]:
        """Return how alike two are, to be compared: the loop, then the number of parameters that one leaves out."""
        apart = int(self.frozen, 16) ^ int(other.frozen, 16) | int(self.unused, 16) ^ int(other.unused, 16)
        return self.loop == other.loop, -apart.bit_count()

    @property
    def wants_look(self) -> bool:
        """Return whether the next step is to be measured."""
        looks, begin = len(self.sizes), self.row_begins
        in_a_row = begin is not None and looks - begin < LOOKS_IN_A_ROW
        return looks < LOOKS or in_a_row or self.steps + 1 in LATER_LOOKS or (self.steps + 1) % LOOK_EVERY == 0

    def differs(self, size: Size, forward_flops: int, backward_flops: int) -> bool:
        """Return whether measured steps of this size cost something else: the first, or all of a whole row."""
        begin = self.row_begins or 0
        known = [look for look, other in enumerate(self.sizes[begin:], start=begin) if other == size]
        if not known or (self.row_begins is not None and len(self.sizes) < begin + LOOKS_IN_A_ROW):
            return False
        known = known if self.row_begins is not None else known[:1]
        pairs = ((forward_flops, self.forward_flops), (backward_flops, self.backward_flops))
        least_and_most = ((new, min(old[n] for n in known), max(old[n] for n in known)) for new, old in pairs)
        return any(not (1 - ALIKE) * least <= new <= (1 + ALIKE) * most for new, least, most in least_and_most)

    def lacks(self, size: Size) -> bool:
        """Return whether the cost of a step of this size follows from none that was measured."""
        calls = {other[0] for other in self.sizes if other}
        return not self.sizes or bool(size and size[0] not in calls and len(calls) < LOOKS)

    def pattern(self, still: str = "0") -> Pattern:
        """Return what the user left out, but for some parameters, and the loop."""
        return self.frozen, f"{int(self.unused, 16) & ~int(still, 16):x}", self.loop

    def add(self, size: Size, forward_flops: int, backward_flops: int, left_flops: float) -> None:
        """Note a measured step."""
        self.sizes.append(size)
        self.forward_flops.append(forward_flops)
        self.backward_flops.append(backward_flops)
        self.left_flops.append(left_flops)


def totals_of(stretches: Sequence[Stretch]) -> dict[str, int]:
    """Return the total cost of the steps of one optimizer, in FLOPs and bytes.

    FLOPs were counted in ``measured_steps``; those of the others follow from them. ``dense_flops`` and
    ``dense_backward_flops`` are those of the same number of steps with nothing stopped.
    """
    names = (
        "forward_flops", "backward_flops", "dense_flops", "dense_backward_flops", "gradient_bytes", "optimizer_bytes"
    )  # fmt: skip
    totals = dict.fromkeys(names, 0.0)
    measured = [s for s in stretches if s.backward_flops]
    whole = _dense_of(measured)
    of_pattern: dict[Pattern, list[Stretch]] = {}
    for stretch in measured:
        of_pattern.setdefault(stretch.pattern(), []).append(stretch)
    forward_of = {pattern: _typical(several, "forward_flops") for pattern, several in of_pattern.items()}
    known = {size for stretch in measured for size in stretch.sizes}
    seen = next((s for s in measured if s.dense), measured[0] if measured else stretches[0])
    for stretch in stretches:
        if stretch.backward_flops:
            seen = stretch
        elif others := [s for s in measured if s.stopped == stretch.stopped]:
            seen = max(others, key=stretch.likeness)
        # Else there are few steps between two stops, which cost as those before did.
        own, own_forward = _typical([seen], "backward_flops"), _typical([seen], "forward_flops")
        reading = {size: flops for size, flops in own_forward.items() if reads_of(size)}
        forward_flops = forward_of.get(seen.pattern(), {})
        whole_forward = {size: flops for size, flops in forward_flops.items() if not reads_of(size)}
        dense = whole.get(id(seen), {})
        full_of_own = sum(fitted(dense, size) for size in own)
        share = sum(own.values()) / full_of_own if full_of_own else 0.0
        more = _with_more_calls(stretch.counts, known)
        # Calls of an evaluation with gradients are among those of a few steps; of more steps the loop has grown.
        evaluated = more if sum(stretch.counts[size] for size in more) <= max(1, stretch.steps / RARE) else set()
        for size, count in stretch.counts.items():
            size = () if size in evaluated else size
            computing = _computing(size)
            full, forward = fitted(dense, computing), fitted(whole_forward, computing)
            executed = _partly_read(reading, whole_forward, size) if reading and reads_of(size) else forward
            totals["forward_flops"] += count * executed
            # Where nothing was stopped the user froze what is read, and the dense run reads it, too.
            totals["dense_flops"] += count * ((executed if stretch.dense else forward) + full)
            totals["dense_backward_flops"] += count * full
            totals["backward_flops"] += count * next((own[s] for s in (size, computing) if s in own), share * full)
        totals["gradient_bytes"] += stretch.steps * seen.gradient_bytes
        totals["optimizer_bytes"] += stretch.steps * seen.optimizer_bytes
    return {
        "steps": sum(stretch.steps for stretch in stretches),
        "measured_steps": sum(len(stretch.sizes) for stretch in stretches if stretch.steps),
        **{name: round(value) for name, value in totals.items()},
    }


def _partly_read(reading: Mapping[Size, float], computing: Mapping[Size, float], size: Size) -> float:
    """Return the forward FLOPs of a step of which some calls read, from those of such steps and of steps without.

    What is saved is in proportion to the calls that read.

    >>> _partly_read({(4, 40, 400, 1): 70.0}, {(4, 40, 400, 0): 100.0}, (4, 40, 400, 3))
    10.0
    """
    share = {other: reads_of(other) / sum(other[:1]) for other in (*reading, size)}  # of the calls
    alike = {other: flops for other, flops in reading.items() if share[other] == share[size]}
    if alike or not computing:
        return fitted(alike or reading, size)
    whole = {other: fitted(computing, _computing(other)) for other in share}
    saved = {_computing(other): max(0.0, whole[other] - flops) / share[other] for other, flops in reading.items()}
    return whole[size] - share[size] * fitted(saved, _computing(size))


def _computing(size: Size) -> Size:
    """Return the size of a step like this one of which no call reads."""
    return (*size[:3], 0) if size else ()


def _dense_of(measured: Sequence[Stretch]) -> dict[int, dict[Size, float]]:
    """Return the FLOPs of the backward pass by size with nothing stopped, by the ids of the stretches."""
    own = {id(stretch): _typical([stretch], "backward_flops") for stretch in measured}
    found = {id(stretch): own[id(stretch)] for stretch in measured if stretch.dense}
    of_pattern: dict[Pattern, dict[Size, float]] = {}
    saved: dict[tuple[str, str, int], dict[Size, float]] = {}  # by what was stopped and frozen, and the loop
    left: dict[tuple[str, str], float] = {}  # share of the backward pass, by what was stopped and frozen
    dense_of: dict[tuple[str, Pattern], list[Stretch]] = {}  # by what is stopped, and the pattern of all else
    pending = [stretch for stretch in measured if not stretch.dense]
    for still in {stretch.still for stretch in pending}:
        for stretch in measured:
            if stretch.dense:
                dense_of.setdefault((still, stretch.pattern(still)), []).append(stretch)

    def known_of(stretch: Stretch) -> dict[Size, float] | None:
        """Return what is measured without stops, or known by now where less was stopped."""
        if dense := dense_of.get((stretch.still, stretch.pattern())):
            return _mean([own[id(other)] for other in dense], [other.steps for other in dense])
        return of_pattern.get(stretch.pattern())

    def guess_of(stretch: Stretch) -> dict[Size, float] | None:
        """Return what follows from the forward pass, or from what the same stops saved elsewhere."""
        mine, stops = own[id(stretch)], (stretch.stopped, stretch.frozen)
        if not any(mine.values()):  # forward passes alone, such as for the statistics of averaged weights
            return mine
        shown = {size: flops for size, flops in _typical([stretch], "left_flops").items() if not reads_of(size)}
        # Where the user has frozen the layer behind what was stopped since, that may be frozen, too.
        since = int(stretch.frozen, 16) & ~int(measured[0].frozen, 16)
        if any(shown.values()) and not since >> int(stretch.still, 16).bit_length() & 1:
            return {size: flops + fitted(shown, _computing(size)) for size, flops in mine.items()}
        if (amounts := saved.get((*stops, stretch.loop))) is not None:
            return {size: flops + fitted(amounts, size) for size, flops in mine.items()}
        if stops in left:
            return {size: flops / (left[stops] or 1.0) for size, flops in mine.items()}
        return None

    def take(stretch: Stretch, whole: dict[Size, float]) -> None:
        mine, stops = own[id(stretch)], (stretch.stopped, stretch.frozen)
        whole = found[id(stretch)] = _with_sizes_of(stretch, whole)
        of_pattern.setdefault(stretch.pattern(), whole)
        saved.setdefault((*stops, stretch.loop), {n: max(0.0, fitted(whole, n) - flops) for n, flops in mine.items()})
        total = sum(fitted(whole, size) for size in mine)
        left.setdefault(stops, min(1.0, sum(mine.values()) / total) if total else 0.0)

    for last in False, True:
        for stretch in pending:
            if id(stretch) not in found:
                whole = known_of(stretch) or (guess_of(stretch) or own[id(stretch)] if last else None)
                if whole is not None:
                    take(stretch, whole)
    return found


def _with_sizes_of(stretch: Stretch, whole: dict[Size, float]) -> dict[Size, float]:
    """Return the FLOPs of the dense backward pass, with those of sizes that were measured with stops alone.

    A fit does not know them: they may be longer than any before the stop. Of a step that includes an evaluation with
    gradients the forward pass shows too much; of its backward pass stops save the share that they save elsewhere.
    """
    mine, left = _typical([stretch], "backward_flops"), _typical([stretch], "left_flops")
    common = [size for size in mine if size in whole]
    share = sum(mine[size] for size in common) / (sum(whole[size] for size in common) or 1.0)
    new, more = dict[Size, float](), _with_more_calls(mine, whole)
    for size, flops in mine.items():
        if share and size in more:
            new[size] = flops / share
        elif left.get(size) and not reads_of(size):
            new[size] = flops + left[size]
    return new | whole


def _with_more_calls(sizes: Iterable[Size], known: Iterable[Size]) -> set[Size]:
    """Return the sizes of more than twice the calls of any known step, as with an evaluation with gradients."""
    most = max((size[0] for size in known if size), default=0)
    return {size for size in sizes if size and size[0] > 2 * most > 0}


def _mean(costs: Sequence[Mapping[Size, float]], steps: Sequence[int]) -> dict[Size, float]:
    """Return the mean FLOPs of stretches by size, each of which counts by its steps."""
    sizes = dict.fromkeys(size for one in costs for size in one)
    weights = [max(1, count) for count in steps]
    return {
        size: sum(weight * fitted(one, size) for one, weight in zip(costs, weights, strict=True)) / sum(weights)
        for size in sizes
    }


def _typical(stretches: Iterable[Stretch], name: str) -> dict[Size, float]:
    """Return the FLOPs of a step by size: of those in a row the mean, else the median.

    Stretches of an older state have no ``left_flops``.
    """
    first: dict[Size, list[int]] = {}
    in_a_row: dict[Size, list[int]] = {}
    for stretch in stretches:
        for look, (size, flops) in enumerate(zip(stretch.sizes, getattr(stretch, name), strict=False)):
            counts = stretch.row_begins is not None and look >= stretch.row_begins
            (in_a_row if counts else first).setdefault(size, []).append(flops)
    medians = {size: float(median_low(values[:LOOKS])) for size, values in first.items()}
    return medians | {size: fmean(values) for size, values in in_a_row.items()}
