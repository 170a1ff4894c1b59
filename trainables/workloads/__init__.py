"""What is trained: model, data, loss, optimizer and schedule, by name. Loads no torch until a workload is built."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainables.errors import unknown_name

if TYPE_CHECKING:
    from trainables.workloads.base import Workload


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered workload."""

    home: str
    """``module:class``."""
    default_epochs: int
    """Epochs of a run unless asked otherwise."""
    description: str
    """One line."""


WORKLOADS: dict[str, Entry] = {
    "digits": Entry(
        home="trainables.workloads.digits:Digits",
        default_epochs=30,
        description="real handwritten digits that ship with scikit-learn, six convolutions; seconds a run on one core",
    ),
}


def build(name: str) -> Workload:
    """The workload of that name; UserError with the nearest name and the list if there is none."""
    if name not in WORKLOADS:
        raise unknown_name("workload", name, WORKLOADS)
    module, attribute = WORKLOADS[name].home.split(":")
    workload: Workload = getattr(importlib.import_module(module), attribute)()
    return workload
