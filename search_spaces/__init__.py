"""Search spaces, one file each; the file's stem is its name on the command line. Loads neither torch nor ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_spaces.space import Space, SpaceContext
from trainables.errors import unknown_name

#: Stem and a one-line description of each space; its module has the details.
SPACES: dict[str, str] = {
    "auto_thresholds": "Gradient-Skip in auto mode: CAC_VAR_* thresholds, timing, braking distance",
    "braking_distance": "Gradient-Skip in auto mode: the braking distance alone, thresholds fixed",
    "manual_layers": "Gradient-Skip in manual mode: how many stops, through which layers, when",
    "stop_rules": "Gradient-Skip's rules against each other (CAC_RULE), each with its settings",
    "pruning_sensitivities": "pruning: one sensitivity a layer",
    "pruning_sensitivities_by_block": "pruning: one sensitivity a block of layers",
    "agp": "automated gradual pruning: final sparsity, start, end and frequency",
    "distillation": "knowledge distillation: temperature, weight and start",
    "schedule": "a compression schedule of yours: its values marked !search",
}

__all__ = ["SPACES", "Space", "SpaceContext", "load", "parts_of"]


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the spaces that are searched together under a name such as ``auto_thresholds+agp``."""
    return tuple(name.split("+"))


def load(name: str, grid: Mapping[str, Any] | None = None) -> Space:
    """Return the space of that name, or several joined by ``+`` that are searched together.

    Args:
        name: of the space.
        grid: the points of a grid file, which are the space where they are given.

    Raises:
        UserError: there is no such space (with the nearest name and the list), or two cannot be searched together.
    """
    import importlib

    if grid is not None:
        from search_spaces.grid_file import grid_space

        return grid_space(grid)
    for part in parts_of(name):
        if part not in SPACES:
            raise unknown_name("space", part, SPACES)
    spaces: list[Space] = [importlib.import_module(f"search_spaces.{part}").SPACE for part in parts_of(name)]
    if len(spaces) == 1:
        return spaces[0]
    from search_spaces.joined import joined

    return joined(spaces)
