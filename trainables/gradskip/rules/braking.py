"""Braking distance: the learning rate of a layer about to stop falls to zero first.

With braking distance D the step of the stop decision and the D - 1 after it multiply the learning rate by
(c / D)^2 with c = D - 1, D - 2, ..., 0; at c = 0 the layer stops (published rule, `CAC_BRAKING_DISTANCE`).
"""

from __future__ import annotations

from trainables.gradskip.rules.stop_rule import Iterations


def first_step_after(decided: Iterations, distance: Iterations) -> Iterations:
    """Return the first step without the stopped layers' gradients, from the step of the decision.

    Until then no other stop is decided, or in that same step at the earliest.

    >>> first_step_after(10, 0), first_step_after(10, 4)
    (11, 14)
    """
    return decided + distance + (distance == 0)


def braking_factor(count: int, distance: int) -> float:
    """Return the factor on the learning rate with ``count`` braking steps left after this one, in [0, 1).

    >>> [braking_factor(c, 4) for c in (3, 2, 1, 0)]
    [0.5625, 0.25, 0.0625, 0.0]
    """
    return float(pow(count / distance, 2))
