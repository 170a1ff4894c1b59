"""Stop rule ``linear``: the number of stopped layers grows linearly in time.

Symbols: t_0, T first and last iteration of the schedule (`CAC_RULE_START_ITR`, `CAC_RULE_END_ITR`); K number of layers;
d depth (`CAC_RULE_DEPTH`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import ScheduledRule


class LinearRule(ScheduledRule):
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
        self.ends = [
            math.ceil(
                settings.rule_start_itr
                + (settings.rule_end_itr - settings.rule_start_itr) * (k + 1) / (settings.rule_depth * stoppable)
            )
            for k in range(math.floor(settings.rule_depth * stoppable + 1e-9))
        ]
        self.stoppable = len(self.ends)
