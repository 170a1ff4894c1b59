"""Options of a search about its sampler and its grid: checks, the grid file, the points to train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search_spaces import Space, SpaceContext
from search_spaces.grid import GridPoints, grid_points
from search_spaces.grid_file import read_grid
from trainables.config import TrialConfig, field_kinds
from trainables.errors import UserError, unknown_name
from tune_cac.study.fixed_params import ANY_RUN, read_value, shown, shown_hold

#: The sampler that trains distinct outcomes where their savings are known before, else learns from the baseline's run.
AUTO = "auto"
#: Names of the samplers.
SAMPLERS = (AUTO, "tpe", "random", "grid", "gp", "nsga2")
#: A script's run is known when its baseline has ended: a grid's points must be the same on runs of both lengths.
_OTHER_RUN = SpaceContext(
    total_steps=3100,
    layer_names=tuple(f"layer{n}" for n in range(20)),
    unit_ends=(2, 5, 8, 11),
    weight_names=tuple(f"block{n}.weight" for n in range(5)),
    epochs=100,
)


def grid_of(given: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the points of a grid file (`read_grid`), given by its path, as text or map, or as the points themselves.

    Raises:
        UserError: the file cannot be read or is no grid.
    """
    if given is None or (isinstance(given, Mapping) and "settings" in given):
        return given
    text, source = json.dumps(given) if isinstance(given, Mapping) else str(given), "<grid>"
    if isinstance(given, Path) or not ("\n" in text or text.lstrip().startswith("{")):
        source = text
        try:
            text = Path(source).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            said = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UserError(f"--grid must be a file in YAML, {source} cannot be read: {said}") from None
    return read_grid(text, source, _read)


def _read(name: str, given: Any) -> Any:
    kind = field_kinds().get(name)
    # As --set reads it, but true and false are no numbers.
    value = read_value(name, given if isinstance(given, bool) and kind is not bool else shown(given))
    return float(value) if kind is float else value


def check_sampler(sampler: str) -> None:
    """Raise UserError for an unknown sampler."""
    if sampler not in SAMPLERS:
        raise unknown_name("sampler", str(sampler), SAMPLERS)


def check_points(points: Mapping[str, Any], hold: Mapping[str, Any]) -> None:
    """Raise UserError for a point of a grid file whose values cannot be had together."""
    for number, point in enumerate(points["settings"], start=1):
        try:
            TrialConfig.from_mapping({**point, **hold})
        except UserError as error:
            raise UserError(f"point {number} of the grid ({shown_hold(point)}) can't be: {error}") from None


def points_of(space: Space, context: SpaceContext | None) -> GridPoints:
    """Return the points that a grid search trains.

    Args:
        space: what is searched.
        context: of the run; None for a script, whose run is not known before its baseline.

    Raises:
        UserError: the space is no grid, or the points of a script depend on its run.
    """
    if context is not None:
        return grid_points(space, context)
    found, other = (grid_points(space, run) for run in (ANY_RUN, _OTHER_RUN))
    if found != other:
        raise UserError(
            f"a grid over space {space.name} depends on the run, which a script tells when its baseline has ended: "
            "give the values to try in a grid file (--grid FILE), or take another --sampler"
        )
    return found


def trials_in_all(before: int, more: int | None, grid: GridPoints | None) -> int:
    """Return the number of trials of a study with those that a search adds; a grid has no more than its points.

    Args:
        before: trials that were asked for so far.
        more: trials to add; None for all of a grid.
        grid: the points; None for another sampler.
    """
    most = None if grid is None else 1 + len(grid)  # and the baseline
    counts = [count for count in (None if more is None else before + more, most) if count is not None]
    return min(counts)
