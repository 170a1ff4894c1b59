"""Command-line options of what is trained: ``--workload``, ``--data``, ``--model``, ``--option`` and ``--script``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.registry import SCRIPT
from trainables.workload_options import canonical, read_options
from trainables.workloads import default_epochs


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the options of ``--workload``, which `workload_options` reads."""
    parser.add_argument("--data", metavar="PATH", help="the workload's data, such as image Parquet or an image folder")
    parser.add_argument("--model", help="the workload's model, such as resnet18")
    parser.add_argument(
        "--option", action="append", metavar="NAME=VALUE", help="another option of the workload; may be repeated"
    )


def workload_options(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the workload's options as a configuration holds them; None if none was given.

    Raises:
        UserError: an option that is not NAME=VALUE, or one that is given twice.
    """
    texts = list(getattr(arguments, "option", None) or [])
    if getattr(arguments, "data", None) is not None:
        texts.append(f"data={Path(arguments.data).expanduser().absolute()}")  # a trial has another working directory
    if getattr(arguments, "model", None) is not None:
        texts.append(f"model={arguments.model}")
    if getattr(arguments, "script", None) is not None:
        texts.append(f"command={arguments.script}")
    return canonical(read_options(texts)) if texts else None


def config_of(arguments: argparse.Namespace, **values: Any) -> TrialConfig:
    """Return the configuration that ``--workload``, ``--epochs``, ``--device`` and ``--threads`` ask for.

    Args:
        arguments: of a command with these flags; without ``--epochs`` the workload's own number counts.
        values: other fields of the configuration.

    Raises:
        UserError: a wrong option or value.
    """
    options = workload_options(arguments) or ()
    return TrialConfig(
        workload=arguments.workload,
        workload_options=options,
        epochs=default_epochs(arguments.workload, options) if arguments.epochs is None else arguments.epochs,
        device=arguments.device,
        threads=arguments.threads,
        **values,
    )


def take_script(arguments: argparse.Namespace) -> None:
    """Use ``--script`` as the workload; raise UserError if another one is given or the command is empty."""
    if arguments.script is None:
        return
    if arguments.workload not in (None, SCRIPT):
        raise UserError(f"--script trains with a command of yours, so it takes no --workload, got {arguments.workload}")
    if not arguments.script.strip():
        raise UserError("--script must be a command, such as 'python train.py', got an empty one")
    arguments.workload = SCRIPT
