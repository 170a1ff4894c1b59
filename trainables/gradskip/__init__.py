"""CAC Gradient-Skip: drop-in optimizers that stop layers which have converged.

    import tune_cac as cac
    optimizer = cac.gradskip.SGD(model.parameters(), lr=0.1, momentum=0.9)

Settings, rules and the state machine import no torch; the optimizers load it when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainables.gradskip.settings import VARIABLES, Settings

if TYPE_CHECKING:
    from trainables.gradskip.controller import GradientSkip, StopEvent
    from trainables.gradskip.sgd import SGD

__all__ = ["SGD", "Settings", "GradientSkip", "StopEvent", "VARIABLES"]

_HOMES = {
    "SGD": "trainables.gradskip.sgd",
    "GradientSkip": "trainables.gradskip.controller",
    "StopEvent": "trainables.gradskip.controller",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
