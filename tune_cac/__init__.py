"""tune_cac: find out how much of a PyTorch training run can be skipped without losing accuracy.

    import tune_cac as cac
    optimizer = cac.gradskip.SGD(model.parameters(), lr=0.1, momentum=0.9)

    cac.report(accuracy=0.91, step=100)     # in a script that a search runs

    found = cac.search(space="auto_thresholds", workload="digits", trials=24)
    found.ranking       # pandas
    cac.analysis.load("results/mine"), cac.compression, cac.search_spaces     # one import for everything

Importing this package loads neither torch nor ray; functions that need them import them when called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tune_cac.own_packages import ALIASES, NAMES, check_own, install

install()

if TYPE_CHECKING:
    import analysis
    import search_spaces
    from trainables import compression, gradients, gradskip
    from trainables.deployment.exporting import export_model
    from trainables.script.report_lines import report
    from tune_cac.study.study_result import SearchResult
    from tune_cac.tuning.confirmation import confirm
    from tune_cac.tuning.run import search

__version__ = "0.1.0"
__all__ = [
    "gradskip",
    "compression",
    "gradients",
    "analysis",
    "search_spaces",
    "report",
    "search",
    "confirm",
    "export_model",
    "SearchResult",
    "__version__",
]

_HOMES = {
    "confirm": "tune_cac.tuning.confirmation",
    "export_model": "trainables.deployment.exporting",
    "report": "trainables.script.report_lines",
    "search": "tune_cac.tuning.run",
    "SearchResult": "tune_cac.study.study_result",
}


def __getattr__(name: str) -> Any:
    if name in ALIASES:
        return importlib.import_module(f"tune_cac.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A user's training script may have an analysis.py in its folder, and needs only trainables.
    check_own(["trainables"] if _HOMES[name].startswith("trainables.") else NAMES)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
