"""Searches of tests train their answers on one seed unless they say otherwise: others test something else."""

from __future__ import annotations

from collections.abc import Sequence


def one_seed(arguments: Sequence[str]) -> list[str]:
    """Arguments of the command, of a new search with its one seed."""
    given = list(arguments)
    is_search = "search" in given and not {"--seeds", "--resume"} & set(given)
    return [*given, "--seeds", "1"] if is_search else given
