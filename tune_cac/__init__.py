"""tune_cac: find out how much of a PyTorch training run can be skipped without losing accuracy.

    import tune_cac as cac
    optimizer = cac.gradskip.SGD(model.parameters(), lr=0.1, momentum=0.9)

    cac.report(accuracy=0.91, step=100)     # in a script that a search runs

    found = cac.search(space="auto_thresholds", workload="digits", trials=24)
    found.ranking       # pandas

Importing this package loads neither torch nor ray; what needs them loads them when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainables import gradskip
    from trainables.script.reporting import report
    from tune_cac.study.study_result import SearchResult
    from tune_cac.tuning.confirmation import confirm
    from tune_cac.tuning.study_search import search

__version__ = "0.1.0"
__all__ = ["gradskip", "report", "search", "confirm", "SearchResult", "__version__"]

_HOMES = {
    "confirm": "tune_cac.tuning.confirmation",
    "report": "trainables.script.reporting",
    "search": "tune_cac.tuning.study_search",
    "SearchResult": "tune_cac.study.study_result",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "gradskip":
        return importlib.import_module("trainables.gradskip")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
