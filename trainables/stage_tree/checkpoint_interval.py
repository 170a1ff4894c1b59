"""Interval between a stage's checkpoints: short where forks are likely and training is expensive, long elsewhere.

Symbols: w seconds to write a checkpoint; c seconds of a step; n forks expected over a stage's N steps.
With checkpoints s steps apart, each step costs w / s for writing and n / N * c * s / 2 for forks. The sum is least at
s = sqrt(2 w N / (c n)).
"""

from __future__ import annotations

import math

#: Expected forks from the first stage, as a share of the trials, and the factor by which each level below has fewer.
FORKS_OF_FIRST, FEWER_BELOW = 0.25, 8.0
#: Most time for writing, as a share of the training time.
MOST_WRITING = 0.15


def checkpoint_interval(*, write_s: float, step_s: float, total_steps: int, trials: int, depth: int) -> int:
    """Return the steps from one checkpoint to the next, >= 1.

    Args:
        write_s: seconds that a checkpoint takes, >= 0.
        step_s: seconds that a training step takes, > 0.
        total_steps: steps of the run.
        trials: trials of the study, >= 1.
        depth: interventions before the stage.
    """
    forks = max(0.5, FORKS_OF_FIRST * trials) / FEWER_BELOW**depth
    cost = write_s / step_s
    cheapest = math.sqrt(2 * cost * total_steps / forks)
    return max(1, math.ceil(min(cheapest, total_steps)), math.ceil(cost / MOST_WRITING))
