"""A rule's state machine, one step after the other over given variances: the slow oracle of everything vectorised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainables.gradskip.rules.choice import make_rule
from trainables.gradskip.rules.state_machine import Decision, SkipMachine
from trainables.gradskip.settings import Settings


def stops_of(
    settings: Settings,
    targets: Sequence[int],
    variance_at: Callable[[int, int], float],
    steps: int,
    *,
    single_precision: bool = True,
) -> list[tuple[int, Decision]]:
    """(iteration, decision) of each stop; ``variance_at`` takes an iteration and a target."""
    machine = SkipMachine(settings, make_rule(settings, targets, single_precision=single_precision))
    plans = [
        (iteration, machine.step(lambda layer, now=iteration: variance_at(now, layer)))  # type: ignore[misc]
        for iteration in range(steps)
    ]
    return [(iteration, plan.decision) for iteration, plan in plans if plan.decision is not None]
