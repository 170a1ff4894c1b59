"""Workloads by name: model, data, loss, optimizer and schedule. Loads torch only when a workload is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trainables.errors import UserError
from trainables.registry import SCRIPT, WORKLOADS, check_workload, is_factory
from trainables.workload_options import keywords_of, parameters_of, read_options

if TYPE_CHECKING:
    from trainables.config import TrialConfig
    from trainables.workloads.base import Workload


def build(name: str, options: Iterable[str] = ()) -> Workload:
    """Build the workload of that name.

    Args:
        name: a registered name, or the user's ``package.module:function``.
        options: NAME=VALUE texts; keyword arguments of the workload's class or of the function.

    Raises:
        UserError: an unknown name, a missing or unknown option, or a user's function with a result that
            `trainables.workloads.factory` does not accept.
    """
    options = tuple(options)
    check_workload(name, options)
    if name == SCRIPT:
        raise UserError("workload script is a command of yours, which only a search runs: give --script to search")
    if is_factory(name):
        from trainables.workloads.factory import load

        workload: Workload = load(name, options)
    else:
        home = _home(name)
        workload = home(**keywords_of(home, read_options(options), f"workload {name}"))
    workload.options = options
    return workload


def build_for(config: TrialConfig) -> Workload:
    """Build the workload of a configuration, with the configuration's batch size.

    Raises:
        UserError: as `build`, or a batch size for a workload that chooses it itself.
    """
    workload = build(config.workload, config.options)
    if config.batch_size is not None:
        if workload.batch_size is None:
            raise UserError(
                f"batch_size can't be set for workload {config.workload}, which chooses it itself, got "
                f"{config.batch_size}: leave it out, and set it there"
            )
        workload.batch_factor = config.batch_size / workload.batch_size
        workload.batch_size = config.batch_size
    return workload


def option_names(name: str) -> tuple[str, ...] | None:
    """Return the options that a workload takes; None for a function that takes any."""
    named, takes_any = parameters_of(_home(name))
    return None if takes_any else tuple(named)


def check_call(name: str, options: Iterable[str]) -> None:
    """Raise UserError where a workload does not take these options; nothing is built."""
    keywords_of(_home(name), read_options(options), f"workload {name}")


def _home(name: str) -> Callable[..., Any]:
    if is_factory(name):
        from trainables.workloads.user_code import import_function

        return import_function(name, "workload")
    module, attribute = WORKLOADS[name].home.split(":")
    home: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return home


def default_epochs(name: str, options: Iterable[str] = ()) -> int:
    """Return the epochs of a run unless specified; calls a user's factory to find them."""
    check_workload(name, options)
    if name in WORKLOADS:
        return WORKLOADS[name].default_epochs
    return 1 if name == SCRIPT else build(name, options).default_epochs
