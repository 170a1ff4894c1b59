"""CAC Gradient-Skip: drop-in optimizers that stop layers which have converged.

    import tune_cac as cac
    optimizer = cac.gradskip.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = cac.gradskip.wrap(any_optimizer, model=model)

Settings, rules and the state machine import no torch; the optimizers load it on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainables.gradskip.settings import Settings
from trainables.gradskip.variables import RULES, VARIABLES

if TYPE_CHECKING:
    from trainables.gradskip.controller import GradientSkip
    from trainables.gradskip.forward_cache.cache import ForwardCache
    from trainables.gradskip.integrations.data_parallel import DistributedDataParallel
    from trainables.gradskip.layer_plan import StopEvent
    from trainables.gradskip.optimizers import SGD, Adam, AdamW, wrap
    from trainables.gradskip.recording.variance_recorder import Recorder, record

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "wrap",
    "Settings",
    "DistributedDataParallel",
    "ForwardCache",
    "record",
    "Recorder",
    "GradientSkip",
    "StopEvent",
    "RULES",
    "VARIABLES",
]

_HOMES = {
    "SGD": "optimizers",
    "Adam": "optimizers",
    "AdamW": "optimizers",
    "wrap": "optimizers",
    "GradientSkip": "controller",
    "StopEvent": "layer_plan",
    "DistributedDataParallel": "integrations.data_parallel",
    "ForwardCache": "forward_cache.cache",
    "Recorder": "recording.variance_recorder",
    "record": "recording.variance_recorder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
