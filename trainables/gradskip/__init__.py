"""CAC Gradient-Skip: drop-in optimizers that stop layers which have converged.

    import tune_cac as cac
    optimizer = cac.gradskip.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = cac.gradskip.wrap(any_optimizer, model=model)

Settings, rules and the state machine import no torch; the optimizers load it on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import RULES, VARIABLES
from trainables.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainables.gradskip.controller import GradientSkip
    from trainables.gradskip.data_parallel import DistributedDataParallel
    from trainables.gradskip.forward_cache import ForwardCache
    from trainables.gradskip.optimizers import SGD, Adam, AdamW, wrap
    from trainables.gradskip.replay import StopEvent

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "wrap",
    "Settings",
    "DistributedDataParallel",
    "ForwardCache",
    "GradientSkip",
    "StopEvent",
    "RULES",
    "VARIABLES",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "optimizers": ("SGD", "Adam", "AdamW", "wrap"),
        "controller": ("GradientSkip",),
        "replay": ("StopEvent",),
        "data_parallel": ("DistributedDataParallel",),
        "forward_cache": ("ForwardCache",),
    },
)
