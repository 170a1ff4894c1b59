"""Rule by which unfinished trials end early: a finished setting that saves as much is ahead by more than the noise.

A lead at a step matters as far as it lasts to the end of the run, so the noise is estimated from what leads of this
study became. Symbols: e an epoch and E the last one, q_i(e) quality of finished run i, n finished runs of one length.

    d_i(e) = q_i(E) - q_i(e)                 what a run's quality changes from e to its end
    noise(e) = max_{f >= e} sqrt(2 var_i d_i(f))

With the sample variance (n - 1), the root is the root mean square, over pairs of runs, of what their difference
changes; the maximum keeps it from being small at one epoch by chance. The noise falls to the end, holds what
learning-rate schedules do to differences, and is that of this seed, on which the search compares its trials; another
seed's is not in it. Runs of other lengths have other schedules and are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev

from analysis.formatting import ROUNDING
from trainables.quality import Quality

#: Epochs in a row at which the other run must be ahead, and by how many times the noise.
ROWS, TIMES_NOISE = 2, 2.0
#: Fewest finished runs of a length, of different quality, that tell its noise.
FEWEST_RUNS = 4


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Quality of a run after its epochs."""

    trial: int
    """Number of its trial."""
    epochs: int
    """Epochs of the whole run."""
    saved: float
    """Compute saved in the end, a fraction of that of the full run; predicted for one that runs."""
    quality: Mapping[int, float]
    """Quality by epoch, from 1; a run that was begun again from a checkpoint may lack the first ones."""
    may_answer: bool = True
    """True for runs that may be the search's answer, as a control may not."""


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Lead of a finished run, for which another one ends early."""

    trial: int
    """Number of the trial that is ahead."""
    epoch: int
    """Epoch after which it is."""
    amount: float
    """Quality that it is ahead by after that epoch, > 0."""
    noise: float
    """Change of such a lead until the end."""
    expected: float
    """Quality that the trial would end with if the lead lasted."""


def lead_over(running: Curve, finished: Sequence[Curve], quality: Quality) -> Lead | None:
    """Return the largest lead for which a run ends now; None if it goes on.

    Args:
        running: a run that has not ended.
        finished: runs that have.
        quality: metric by which they are compared.
    """
    last = max(running.quality, default=0)
    rows = range(last - ROWS + 1, last + 1)
    same_length = [one for one in finished if one.epochs == running.epochs and one.epochs in one.quality]
    noises = [noise(same_length, epoch) for epoch in rows]
    found = []
    for one in same_length:
        if not one.may_answer or one.saved < running.saved - ROUNDING:
            continue
        if any(epoch not in curve.quality for epoch in rows for curve in (running, one)):
            continue
        leads = [quality.lost(running.quality[epoch], one.quality[epoch]) for epoch in rows]
        if all(lead > TIMES_NOISE * least + ROUNDING for lead, least in zip(leads, noises, strict=True)):
            expected = one.quality[one.epochs] - quality.sign * leads[-1]
            found.append(Lead(trial=one.trial, epoch=last, amount=leads[-1], noise=noises[-1], expected=expected))
    return max(found, key=lambda lead: lead.amount, default=None)


def noise(finished: Sequence[Curve], epoch: int) -> float:
    """Return what the difference of two of these runs, all of one length, changes from an epoch on to their end.

    Infinite for fewer than `FEWEST_RUNS` whose quality is known from that epoch on; runs of equal quality throughout
    train alike and count once.
    """
    known = [one for one in finished if one.quality.keys() >= set(range(epoch, one.epochs + 1))]
    different = {tuple(sorted(one.quality.items())): one for one in known}.values()
    if len(different) < FEWEST_RUNS:
        return math.inf
    changes = (
        [one.quality[one.epochs] - one.quality[later] for one in different] for later in range(epoch, known[0].epochs)
    )
    return max((math.sqrt(2) * stdev(one) for one in changes), default=0.0)
