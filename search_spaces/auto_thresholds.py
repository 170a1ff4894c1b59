"""Gradient-Skip in auto mode: thresholds, timing and braking distance (`CAC_VAR_*`, `CAC_BRAKING_DISTANCE`).

Iteration-valued ranges are fractions of the run, because the published defaults are for ImageNet and do not fit a run
of another length. All ranges are coarse grids: a difference that moves no stop, or moves it by a step or two, does not
change the accuracy, and settings with the same effect are trained once.
"""

from __future__ import annotations

import math
from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests
from trainables.gradskip.settings import Settings

#: Steps of the run assumed for the published defaults: 90 epochs of ImageNet at batch 256 (5,005 steps each).
#: CAC_VAR_START_ITR = 5000 is then one epoch, CAC_VAR_SAMPLES = 200 a twenty-fifth of one.
IMAGENET_STEPS = 90 * 5005
#: Variance ratios; the published thresholds, 0.95 to 0.98, are in the middle. If more is known about a run, it has its
#: own ranges, which need not contain the published thresholds that a search starts with.
THRESHOLDS = (0.9, 1.0)
#: Latest first decision, as a fraction of the run.
LATEST_START = 0.5
#: Grids: number of values of the first iteration besides 0, and step between values of the count.
START_CHOICES, COUNT_STEP = 5, 5
#: Steps between thresholds, and the maximum number of steps in a range before the next wider step is used.
THRESHOLD_STEPS = tuple(digit / scale for scale in (10_000, 1_000, 100, 10) for digit in (1, 2, 3, 4, 5))
MOST_THRESHOLDS = 5
#: The shortest interval between decisions, as a fraction of the run; 1, 3 and 5 times it are tried. The published one
#: is shorter, a 2,252nd of the run; only the trial with the published defaults uses it.
SHORTEST_INTERVAL, LONGEST_MULTIPLE, MULTIPLE_STEP = 1 / 100, 5, 2
#: Choices of the braking distance besides 0, and the longest as a fraction of the run.
BRAKING_CHOICES, LONGEST_BRAKING = 2, 0.1


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for one configuration."""
    last_start = latest_start(context.total_steps)
    if context.latest_start_itr is not None:
        last_start = max(1, min(last_start, context.latest_start_itr))
    first, later = context.first_thresholds or THRESHOLDS, context.later_thresholds or THRESHOLDS
    shortest = max(1, round(SHORTEST_INTERVAL * context.total_steps))
    first_step = min(last_start, max(1, round(LATEST_START * context.total_steps / START_CHOICES)))
    return {
        "CAC_VAR_START_ITR": trial.suggest_int(
            "CAC_VAR_START_ITR", 0, last_start // first_step * first_step, step=first_step
        ),
        "CAC_VAR_START_THR": _suggest_threshold(trial, "CAC_VAR_START_THR", first),
        "CAC_VAR_MT_COUNT_THR": trial.suggest_int("CAC_VAR_MT_COUNT_THR", 0, 20, step=COUNT_STEP),
        "CAC_VAR_MT_THR": _suggest_threshold(trial, "CAC_VAR_MT_THR", later),
        "CAC_VAR_SLOPE_THR": _suggest_threshold(trial, "CAC_VAR_SLOPE_THR", later),
        "CAC_VAR_SAMPLES": trial.suggest_int(
            "CAC_VAR_SAMPLES", shortest, LONGEST_MULTIPLE * shortest, step=MULTIPLE_STEP * shortest
        ),
        "CAC_BRAKING_DISTANCE": suggest_braking(trial, context),
    }


def _suggest_threshold(trial: Suggests, name: str, wanted: tuple[float, float]) -> float:
    low, high, step = threshold_grid(*wanted)
    return round(trial.suggest_float(name, low, high, step=step), 6)


def threshold_grid(low: float, high: float) -> tuple[float, float, float]:
    """Return lower end, upper end and step of a threshold's values.

    They are round numbers from the upper end down, none below ``low``, where they would have no effect.

    >>> threshold_grid(0.9252, 1.0)
    (0.94, 1.0, 0.02)
    """
    counts = ((math.floor(round((high - low) / step, 6)), step) for step in THRESHOLD_STEPS)
    count, step = next((count, step) for count, step in counts if count <= MOST_THRESHOLDS)
    return round(high - max(1, count) * step, 6), high, step


def start(context: SpaceContext) -> dict[str, Any]:
    """Return the published defaults, with iterations scaled from ImageNet's run to this one."""
    published, scale = Settings(), context.total_steps / IMAGENET_STEPS
    return {
        "CAC_VAR_START_ITR": round(published.start_itr * scale),
        "CAC_VAR_START_THR": published.start_thr,
        "CAC_VAR_MT_COUNT_THR": published.mt_count_thr,
        "CAC_VAR_MT_THR": published.mt_thr,
        "CAC_VAR_SLOPE_THR": published.slope_thr,
        "CAC_VAR_SAMPLES": max(1, round(published.sampling_interval * scale)),
        "CAC_BRAKING_DISTANCE": published.braking_distance,
    }


def suggest_braking(trial: Suggests, context: SpaceContext) -> int:
    """Ask for a braking distance: few choices, so that no braking is tried as often as any other distance."""
    step = max(1, round(LONGEST_BRAKING * context.total_steps / BRAKING_CHOICES))
    return trial.suggest_int("CAC_BRAKING_DISTANCE", 0, BRAKING_CHOICES * step, step=step)


def latest_start(steps: int) -> int:
    """Return the latest first decision in a run of ``steps`` steps."""
    return max(1, int(LATEST_START * steps))


def longest_interval(steps: int) -> int:
    """Return the maximum number of iterations between two decisions in a run of ``steps`` steps."""
    return max(2, steps // 15)


SPACE = Space(name="auto_thresholds", method="gradskip", suggest=suggest, start=start)
