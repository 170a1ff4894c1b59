"""Simulate `confirm --until-decided`: how often a setting is confirmed or refuted by its true loss, and when.

    python benchmarks/confirm_power.py [--seeds 16] [--allowed 0.5] [--deviation 0.65] [--candidates 1] [--rounds 2000]

A setting's loss on a seed is normal about its true one (points of accuracy; .65 is the deviation of a difference of two
trainings on digits). Looks are those of `analysis.metrics.confirmation.looks_at`, intervals those of `mean_limits` with
the error divided by looks (`shares_of_error`) and candidates. Beside it the same looks by hand, each a call of its own
while nothing is decided, and one look at the end. A setting that loses just what is allowed is the hardest: it may be
confirmed in at most 2.5 of 100 cases, half of the error, for an interval has two ends; by hand in 3.75.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain

import numpy as np
from machine import header
from numpy.typing import NDArray

from analysis.metrics.confirmation import looks_at, mean_limits, shares_of_error


def outcome(
    losses: NDArray[np.float64], calls: Sequence[Sequence[int]], allowed: float, candidates: int
) -> tuple[float, float, float]:
    """Return shares confirmed and refuted, and mean seeds; losses are (rounds, seeds), ``calls`` have their looks."""
    open_ = np.ones(len(losses), dtype=bool)
    confirmed, refuted, used = 0, 0, 0
    looks = list(chain(*calls))
    for n, before in zip(looks, [0, *looks], strict=False):
        used += (n - before) * int(open_.sum())
        confidence = 1 - 0.05 * shares_of_error(n, calls)[0]
        low, high = mean_limits(losses[open_, :n], confidence=confidence, comparisons=candidates, resamples=200)
        confirmed, refuted = confirmed + int((high <= allowed).sum()), refuted + int((low > allowed).sum())
        open_[open_] = (high > allowed) & (low <= allowed)
        if not open_.any():
            break
    return confirmed / len(losses), refuted / len(losses), used / len(losses)


def main() -> None:
    """Print a line a true loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--allowed", type=float, default=0.5)
    parser.add_argument("--deviation", type=float, default=0.65)
    parser.add_argument("--candidates", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2000)
    given = parser.parse_args()
    print(header("benchmarks/confirm_power.py"), f"| {given}")
    print("true loss | until decided: confirmed, refuted, seeds | by hand: the same | at the end: the same")
    looks = looks_at(given.seeds)
    for true in np.arange(-2, 5) * given.allowed / 2:
        losses = np.random.default_rng(0).normal(true, given.deviation, (given.rounds, given.seeds))
        found = [
            outcome(losses, calls, given.allowed, given.candidates)
            for calls in ([looks], [[look] for look in looks], [[given.seeds]])
        ]
        print(f"{true:9.2f} | " + " | ".join(f"{one[0]:.3f} {one[1]:.3f} {one[2]:5.1f}" for one in found))


if __name__ == "__main__":
    main()
