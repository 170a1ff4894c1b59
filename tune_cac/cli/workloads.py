"""The command ``workloads``: list what can be trained."""

from __future__ import annotations

import argparse

from trainables.registry import WORKLOADS
from tune_cac.cli.command import command
from tune_cac.cli.console import print_list


@command(help="list the workloads")
def run(_: argparse.Namespace) -> int:
    """List the workloads."""
    listed = {name: f"{entry.description}; {entry.default_epochs} epochs" for name, entry in WORKLOADS.items()}
    listed["module:function"] = "what a function of yours returns: a dict of model, train, validation, ..."
    listed["--script 'COMMAND'"] = "a training script of yours; it prints its metrics, with tune_cac.report or as JSON"
    print_list(listed)
    return 0
