"""Options shared by several commands."""

from __future__ import annotations

import argparse


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a study and the option for the folder that holds it."""
    parser.add_argument("study", metavar="STUDY", help="a study's folder, or its name under --results")
    add_results(parser)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder that holds the studies."""
    parser.add_argument("--results", default="results", help="folder that holds the studies (default: results)")


def add_ranking(parser: argparse.ArgumentParser) -> None:
    """Add the options of a ranking."""
    parser.add_argument("--allowed-drop", type=float, help="accuracy that may be lost (default: the study's)")
    parser.add_argument("--top", type=int, default=20, help="rows to show (default: 20)")
    parser.add_argument(
        "--price", type=float, metavar="SHARE", help="rank by worth: the share of the training compute that a point "
        "of accuracy is worth, such as 0.1",
    )  # fmt: skip


def add_checkpoint_budget(parser: argparse.ArgumentParser) -> None:
    """Add the option for the most bytes of checkpoints that sharing keeps."""
    parser.add_argument(
        "--checkpoint-budget", default="20GB", metavar="BYTES",
        help="most bytes of checkpoints that sharing keeps, such as 500MB (default: 20GB)",
    )  # fmt: skip


def add_compatible(parser: argparse.ArgumentParser) -> None:
    """Add the flag that accepts what Distiller accepted in a schedule."""
    parser.add_argument(
        "--compatible", action="store_true", help="warn of what Distiller silently accepted instead of refusing it"
    )
