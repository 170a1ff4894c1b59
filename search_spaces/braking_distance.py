"""Gradient-Skip in auto mode with everything fixed but the braking distance, to show its effect alone.

The other variables have the published defaults, iterations scaled to the run; ``search --set`` fixes other values.
"""

from __future__ import annotations

from typing import Any

from search_spaces import auto_thresholds
from search_spaces.space import Space, SpaceContext, Suggests
from trainables.gradskip.settings import Settings

#: The longest distance, as a fraction of the run.
LONGEST = 0.3
#: Approximate number of distances that are searched; on a short run, every integer.
GRID = 100


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for a braking distance."""
    longest = max(1, int(LONGEST * context.total_steps))
    step = max(1, round(longest / GRID))
    return {
        # CAC_VAR_SAMPLES is among these: left unset, it would follow the braking distance.
        **auto_thresholds.start(context),
        "CAC_BRAKING_DISTANCE": trial.suggest_int("CAC_BRAKING_DISTANCE", 0, longest // step * step, step=step),
    }


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the published default: no braking."""
    return {"CAC_BRAKING_DISTANCE": Settings().braking_distance}


def notes(context: SpaceContext) -> list[str]:
    """Return a line with the fixed variables."""
    held = {k: v for k, v in auto_thresholds.start(context).items() if k != "CAC_BRAKING_DISTANCE"}
    return [
        "fixed, unless search --set gives other values: " + " ".join(f"{name}={value}" for name, value in held.items())
    ]


SPACE = Space(name="braking_distance", method="gradskip", suggest=suggest, start=start, notes=notes)
