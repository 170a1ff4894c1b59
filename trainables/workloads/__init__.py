"""What is trained: model, data, loss, optimizer and schedule, by name. Loads no torch until a workload is built."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainables.errors import UserError, unknown_name
from trainables.workloads.options import call_with_options, check_options, read_options

if TYPE_CHECKING:
    from trainables.workloads.base import Workload

#: The name that stands for a command of the user's.
SCRIPT = "script"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered workload."""

    home: str
    """``module:class``. The class's keyword arguments are the workload's options."""
    default_epochs: int
    """Epochs of a run unless asked otherwise."""
    description: str
    """One line."""
    needs: tuple[str, ...] = ()
    """Options that have no default."""


WORKLOADS: dict[str, Entry] = {
    "digits": Entry(
        home="trainables.workloads.digits:Digits",
        default_epochs=30,
        description="real handwritten digits that ship with scikit-learn, six convolutions; seconds a run on one core",
    ),
    "images": Entry(
        home="trainables.workloads.images.workload:Images",
        default_epochs=30,
        description="your images: Hugging Face Parquet or folders by class (--data PATH), on resnet20, resnet18, ... "
        "(--model NAME, or package.module:function)",
        needs=("data",),
    ),
    "text": Entry(
        home="trainables.workloads.text:Text",
        default_epochs=30,
        description="the next character of the manual that ships with Python: two transformer blocks, no convolution; "
        "half a minute a run on one core",
    ),
}


#: Options with flags of their own.
_OWN_FLAGS = {"data": "--data PATH"}


def check_workload(name: str, options: Iterable[str] = ()) -> None:
    """Raise UserError for a name that is neither registered nor ``module:function``, or options not of NAME=VALUE."""
    if not isinstance(name, str) or (name not in WORKLOADS and name != SCRIPT and not is_factory(name)):
        raise unknown_name("workload", str(name), [*WORKLOADS, "package.module:function"])
    given = read_options(options)
    check_options(name, given)
    needs = WORKLOADS[name].needs if name in WORKLOADS else ()
    missing = [_OWN_FLAGS.get(need, f"--option {need}=...") for need in needs if need not in given]
    if name == SCRIPT and "command" not in given:
        raise UserError("workload script needs a command: give --script 'python train.py'")
    if missing:
        raise UserError(f"workload {name} needs {' and '.join(missing)}")


def is_factory(name: str) -> bool:
    """Whether a workload's name is that of a function of the user's, ``package.module:function``."""
    module, separator, function = name.partition(":")
    return bool(separator) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


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
