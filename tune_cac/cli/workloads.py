"""The command ``workloads``: list what can be trained."""

from __future__ import annotations

import argparse
from typing import Any

from trainables.registry import WORKLOADS
from tune_cac.cli.console import print_list


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("workloads", parents=[debug], help="list the workloads")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List the workloads."""
    listed = {name: f"{entry.description}; {entry.default_epochs} epochs" for name, entry in WORKLOADS.items()}
    listed["module:function"] = "what a function of yours returns: a dict of model, train, validation, ..."
    listed["--script 'COMMAND'"] = "a training script of yours; it prints its metrics, with tune_cac.report or as JSON"
    print_list(listed)
    return 0
