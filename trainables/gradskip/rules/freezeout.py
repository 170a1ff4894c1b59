"""Stop rule ``freezeout``: each layer's learning rate falls to zero along a cosine of its own.

Symbols: t iteration; t_0, T first and last iteration of the schedule (`CAC_RULE_START_ITR`, `CAC_RULE_END_ITR`);
K number of layers; t_i end of layer i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import ScheduledRule


class FreezeOutRule(ScheduledRule):
    """Rule that lowers each layer's learning rate to zero along its own cosine, and stops the layer there.

    Layer i of K ends at t_i, from t_0 for the first to T for the last, linearly in i (or, ``cubic``, at T times the
    cube of t_i / T). Its learning rate is the scheduled one times (1 + cos(pi t / t_i)) / 2, and with ``scaled`` also
    times T / t_i, so that every layer moves equally far. The paper's base schedule is constant.

    Source: Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing Layers", 2017, sections 2 and 3.
    """

    name = "freezeout"
    decides_by = "a cosine a layer"
    reads = ("rule_start_itr", "rule_end_itr", "rule_cubic", "rule_scaled")
    searched = (("rule_start_itr", 0.1, 0.9),)
    brakes = False
    scales_every_step = True

    def __init__(self, settings: Any, targets: Sequence[int], stoppable: int) -> None:
        super().__init__(settings, targets, len(targets))
        self.stoppable = stoppable
        assert settings.rule_end_itr is not None
        self.last = settings.rule_end_itr
        first = settings.rule_start_itr / self.last
        shares = [first + (1 - first) * k / max(1, len(targets) - 1) for k in range(len(targets))]
        if settings.rule_cubic:
            shares = [share**3 for share in shares]
        #: t_i of each layer.
        self.ends = [share * self.last for share in shares]
        self._scaled = settings.rule_scaled

    def factor(self, layer: int, iteration: int) -> float:
        """Return the factor on a layer's learning rate at an iteration; may be above 1 where scaled."""
        end = self.ends[layer]
        if iteration >= end:
            return 0.0
        scale = self.last / end if self._scaled else 1.0
        return scale * 0.5 * (1 + math.cos(math.pi * iteration / end))

    def next_due(self, iteration: int) -> int:
        return iteration  # every step has factors

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        return tuple(
            (self.targets[layer], self.factor(layer, iteration)) for layer in range(self.position, len(self.targets))
        )
