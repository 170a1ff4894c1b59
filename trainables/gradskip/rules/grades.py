"""Stop rule ``grades``: front layers stop whose gradients hardly change from one step to the next.

Symbols: t iteration; W a layer's weight of n entries; g_t its gradient at t; tau threshold (`CAC_RULE_TAU`); alpha the
share of the run before the first stop (`CAC_RULE_START_ITR` over the run's length).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import NEVER, Decision, MeasuredRule, SignalOf


class GradESRule(MeasuredRule):
    """Rule that stops the front layers for which ||g_t - g_{t-1}||_1 / n < tau at a decision.

    Source: Wen et al., "GradES: Significantly Faster Training in Transformers with Gradient-Based Early Stopping",
    arXiv 2509.01842, 2025: the L1 norm, tau, and that nothing stops before alpha. There each matrix stops by itself,
    whatever lies before it, and norms are not divided by n, so that tau depends on a model's width; the authors' code
    (package ``grades``) takes differences of weights in place of gradients, every ``compute_interval`` steps.
    """

    name = "grades"
    decides_by = "change of gradients"
    reads = ("rule_start_itr", "rule_interval", "rule_tau")
    searched = (("rule_start_itr", 0.1, 0.9), ("rule_tau", 1e-6, 1e-1, "log"))

    def __init__(self, settings: Any, targets: Sequence[int], stoppable: int) -> None:
        super().__init__(settings, targets, stoppable)
        self.tau = settings.rule_tau

    def first_stop(self) -> int:
        return self.next_due(max(1, self.start)) if self.targets else NEVER  # a change needs two gradients

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        if self.next_due(iteration) != iteration:
            return None
        found = None
        while self.target is not None and (change := signal_of(self.target)) < self.tau:
            found = Decision(layer=self.stop_target(), rule=self.name, ratio=change)
        return found
