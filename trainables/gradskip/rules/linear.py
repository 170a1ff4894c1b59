"""Stop rule ``linear``: the number of stopped layers grows linearly in time.

Symbols: t_0, T first and last iteration of the schedule (`CAC_RULE_START_ITR`, `CAC_RULE_END_ITR`); K number of layers;
d depth (`CAC_RULE_DEPTH`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import NEVER, Decision, NamedRule, SignalOf


class LinearRule(NamedRule):
    """Rule whose number of stopped layers grows linearly in time, from 0 at t_0 to floor(d K) at T.

    Source: Composer's layer freezing (MosaicML): freeze_start is t_0 / T, freeze_level is d.
    """

    name = "linear"
    decides_by = "a depth schedule"
    reads = ("rule_start_itr", "rule_end_itr", "rule_depth")
    searched = (("rule_depth", 0.1, 1.0),)

    def __init__(self, settings: Any, targets: Sequence[int], stoppable: int) -> None:
        super().__init__(settings, targets, stoppable)
        assert settings.rule_end_itr is not None
        self._dues = [
            math.ceil(
                settings.rule_start_itr
                + (settings.rule_end_itr - settings.rule_start_itr) * (k + 1) / (settings.rule_depth * stoppable)
            )
            for k in range(math.floor(settings.rule_depth * stoppable + 1e-9))
        ]

    def first_stop(self) -> int:
        return self._dues[0] if self._dues else NEVER

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        due = self.position
        while due < len(self._dues) and self._dues[due] <= iteration:
            due += 1
        if due == self.position:
            return None
        self.position = due
        return Decision(layer=self.targets[due - 1], rule=self.name, ratio=None)

    def next_due(self, iteration: int) -> int:
        return max(iteration, self._dues[self.position]) if self.position < len(self._dues) else NEVER
