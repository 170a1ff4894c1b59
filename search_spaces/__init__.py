"""What may vary. One file a space; the file's stem is its name on the command line. Loads neither torch nor ray."""

from __future__ import annotations

from search_spaces.space import Space, SpaceContext
from trainables.errors import unknown_name

#: Stem and one line on each space; the module holds the rest.
SPACES: dict[str, str] = {
    "auto_thresholds": "Gradient-Skip in auto mode: the CAC_VAR_* thresholds, timing and braking distance",
    "braking_distance": "Gradient-Skip in auto mode: the braking distance alone, thresholds held",
    "manual_layers": "Gradient-Skip in manual mode: how many stops, through which layers, when",
    "stop_rules": "Gradient-Skip's rules against each other (CAC_RULE), each with its own settings",
}

__all__ = ["SPACES", "Space", "SpaceContext", "load"]


def load(name: str) -> Space:
    """The space of that name; UserError with the nearest name and the list if there is none."""
    import importlib

    if name not in SPACES:
        raise unknown_name("space", name, SPACES)
    space: Space = importlib.import_module(f"search_spaces.{name}").SPACE
    return space
