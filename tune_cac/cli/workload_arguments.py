"""Command-line options of what is trained: ``--workload``, ``--data``, ``--model`` and ``--option``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainables.config import TrialConfig
from trainables.training.device_choice import choose_device, sees_gpu
from trainables.workload_options import canonical, read_options
from trainables.workloads import default_epochs
from tune_cac.messages import say


def add_data_and_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the options of ``--workload`` that many have."""
    parser.add_argument("--data", metavar="PATH", help="the workload's data, such as image Parquet or an image folder")
    parser.add_argument("--model", help="the workload's model, such as resnet18")


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the options of ``--workload``, which `workload_options` reads."""
    add_data_and_model(parser)
    parser.add_argument(
        "--option",
        dest="workload_options",
        action="append",
        metavar="NAME=VALUE",
        help="another option of the workload; may be repeated",
    )


def add_run(parser: argparse.ArgumentParser, *, epochs: str = "epochs", seed: str = "seed") -> None:
    """Add the flags of a training run, for `config_from_arguments`; ``epochs`` and ``seed`` say what these are."""
    parser.add_argument("--workload", default="digits", help="what is trained (default: digits)")
    add_workload_options(parser)
    parser.add_argument("--epochs", type=int, help=f"{epochs} (default: the workload's)")
    parser.add_argument("--seed", type=int, default=0, help=f"{seed} (default: 0)")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: what trains faster, by 20 steps on each (default: auto)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")


def workload_options(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the workload's options as a configuration holds them; None if none was given.

    Raises:
        UserError: an option that is not NAME=VALUE, or one that is given twice.
    """
    texts = list(getattr(arguments, "workload_options", None) or [])
    if getattr(arguments, "data", None) is not None:
        texts.append(f"data={Path(arguments.data).expanduser().absolute()}")  # a trial has another working directory
    if getattr(arguments, "model", None) is not None:
        texts.append(f"model={arguments.model}")
    return canonical(read_options(texts)) if texts else None


def config_from_arguments(arguments: argparse.Namespace, **values: Any) -> TrialConfig:
    """Return the configuration that the flags of `add_run` ask for.

    Args:
        arguments: of a command with these flags; without ``--epochs`` the workload's own number counts.
        values: other fields of the configuration.

    Raises:
        UserError: a wrong option or value.
    """
    options = workload_options(arguments) or ()
    is_auto = arguments.device == "auto"
    config = TrialConfig(
        workload=arguments.workload,
        workload_options=options,
        epochs=default_epochs(arguments.workload, options) if arguments.epochs is None else arguments.epochs,
        seed=arguments.seed,
        device="cpu" if is_auto else arguments.device,
        threads=arguments.threads,
        **values,
    )
    if not (is_auto and sees_gpu()):
        return config
    found = choose_device(replace(config, method="none"))
    say(f"training {found}")
    return replace(config, device=found.device)
