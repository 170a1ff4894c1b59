"""What is trained: model, data, loss, optimizer and schedule, by name. Loads no torch until a workload is built."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainables.errors import UserError
from trainables.registry import SCRIPT, WORKLOADS, check_workload, is_factory
from trainables.workload_options import call_with_options, read_options

if TYPE_CHECKING:
    from trainables.workloads.base import Workload


def build(name: str, options: Iterable[str] = ()) -> Workload:
    """The workload of that name.

    Args:
        name: registered, or ``package.module:function`` of the user's.
        options: texts NAME=VALUE; keyword arguments of the workload's class or of the function.

    Raises:
        UserError: an unknown name, a missing or unknown option, or a function of the user's that does not return what
            `trainables.workloads.factory` takes.
    """
    options = tuple(options)
    check_workload(name, options)
    if name == SCRIPT:
        raise UserError("workload script is a command of yours, which only a search runs: give --script to search")
    if is_factory(name):
        from trainables.workloads.factory import load

        workload: Workload = load(name, options)
    else:
        module, attribute = WORKLOADS[name].home.split(":")
        home = getattr(importlib.import_module(module), attribute)
        workload = call_with_options(home, read_options(options), f"workload {name}")
    workload.options = options
    return workload


def default_epochs(name: str, options: Iterable[str] = ()) -> int:
    """Epochs of a run unless asked otherwise; a factory of the user's is called for it."""
    check_workload(name, options)
    if name in WORKLOADS:
        return WORKLOADS[name].default_epochs
    return 1 if name == SCRIPT else build(name, options).default_epochs
