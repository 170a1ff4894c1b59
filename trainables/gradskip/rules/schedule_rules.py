"""Stop rules that use only the iteration: a depth schedule and per-layer cosines.

Symbols: t iteration; t_0, T first and last iteration of the schedule (`CAC_RULE_START_ITR`, `CAC_RULE_END_ITR`);
K number of layers; d depth (`CAC_RULE_DEPTH`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainables.gradskip.rules.state_machine import NEVER, Decision, InOrder, SignalOf
from trainables.gradskip.settings import Settings


class LinearRule(InOrder):
    """Rule whose number of stopped layers grows linearly in time, from 0 at t_0 to floor(d K) at T.

    Source: Composer's layer freezing (MosaicML): freeze_start is t_0 / T, freeze_level is d.
    """

    def __init__(self, settings: Settings, targets: Sequence[int]) -> None:
        super().__init__(targets)
        assert settings.rule_end_itr is not None
        self._dues = [
            math.ceil(
                settings.rule_start_itr
                + (settings.rule_end_itr - settings.rule_start_itr) * (k + 1) / (settings.rule_depth * len(targets))
            )
            for k in range(math.floor(settings.rule_depth * len(targets) + 1e-9))
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
        return Decision(layer=self.targets[due - 1], rule="linear", ratio=None)

    def next_due(self, iteration: int) -> int:
        return max(iteration, self._dues[self.position]) if self.position < len(self._dues) else NEVER

    def state_dict(self) -> dict[str, Any]:
        return self.target_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_target(state)


class FreezeOutRule(InOrder):
    """Rule that lowers each layer's learning rate to zero along its own cosine, and stops the layer there.

    Layer i of K ends at t_i, from t_0 for the first to T for the last, linearly in i (or, ``cubic``, at T times the
    cube of t_i / T). Its learning rate is the scheduled one times (1 + cos(pi t / t_i)) / 2, and with ``scaled`` also
    times T / t_i, so that every layer moves equally far. The paper's base schedule is constant.

    Source: Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing Layers", 2017, sections 2 and 3.

    Args:
        settings: timing.
        targets: positions at which layers end, ascending; may include the model's last layer, which never stops.
        stoppable: how many of them may stop.
    """

    def __init__(self, settings: Settings, targets: Sequence[int], stoppable: int) -> None:
        super().__init__(targets)
        assert settings.rule_end_itr is not None
        self.stoppable = stoppable
        self.last = settings.rule_end_itr
        first = settings.rule_start_itr / self.last
        shares = [first + (1 - first) * k / max(1, len(targets) - 1) for k in range(len(targets))]
        if settings.rule_cubic:
            shares = [share**3 for share in shares]
        #: t_i of each layer.
        self.ends = [share * self.last for share in shares]
        self._scaled = settings.rule_scaled

    def first_stop(self) -> int:
        return math.ceil(self.ends[0]) if self.stoppable else NEVER

    def factor(self, layer: int, iteration: int) -> float:
        """Return the factor on a layer's learning rate at an iteration; may be above 1 where scaled."""
        end = self.ends[layer]
        if iteration >= end:
            return 0.0
        scale = self.last / end if self._scaled else 1.0
        return scale * 0.5 * (1 + math.cos(math.pi * iteration / end))

    def decide(self, iteration: int, signal_of: SignalOf) -> Decision | None:
        due = self.position
        while due < self.stoppable and self.ends[due] <= iteration:
            due += 1
        if due == self.position:
            return None
        self.position = due
        return Decision(layer=self.targets[due - 1], rule="freezeout", ratio=None)

    def next_due(self, iteration: int) -> int:
        return iteration  # every step has factors

    def factors(self, iteration: int) -> tuple[tuple[int, float], ...]:
        return tuple(
            (self.targets[layer], self.factor(layer, iteration)) for layer in range(self.position, len(self.targets))
        )

    def state_dict(self) -> dict[str, Any]:
        return self.target_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_target(state)
