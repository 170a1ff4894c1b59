"""How often a stage is checkpointed: where forks are likely and training is dear, often; where they are not, seldom.

Symbols: w seconds to write a checkpoint; c seconds of a step; n forks expected over a stage's N steps.
With checkpoints s steps apart, writing costs w / s a step and forks cost n / N * c * s / 2: least at
s = sqrt(2 w N / (c n)).
"""

from __future__ import annotations

import math

#: Forks from the first stage, as a share of the trials; stages further down have fewer by a factor each.
FORKS_OF_FIRST, FEWER_BELOW = 0.25, 8.0
#: Writing takes at most this share of the time that training takes.
MOST_WRITING = 0.15


def spacing(*, write_s: float, step_s: float, total_steps: int, trials: int, depth: int) -> int:
    """Steps from one checkpoint to the next, >= 1.

    Args:
        write_s: seconds that a checkpoint takes, >= 0.
        step_s: seconds that a training step takes, > 0.
        total_steps: of the run.
        trials: of the study, >= 1.
        depth: interventions before the stage.
    """
    forks = max(0.5, FORKS_OF_FIRST * trials) / FEWER_BELOW**depth
    cost = write_s / step_s
    cheapest = math.sqrt(2 * cost * total_steps / forks)
    return max(1, math.ceil(min(cheapest, total_steps)), math.ceil(cost / MOST_WRITING))
