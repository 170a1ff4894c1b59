"""Gradient-Skip in auto mode: thresholds, timing and braking distance (`CAC_VAR_*`, `CAC_BRAKING_DISTANCE`).

Iteration-valued ranges are fractions of the run, because the published defaults are those of ImageNet and mean
nothing on a run of another length.
"""

from __future__ import annotations

from typing import Any

from search_spaces.space import Space, SpaceContext, Suggests

#: The run that the published defaults are taken to be for: 90 epochs of ImageNet at batch 256 (5,005 steps each).
#: CAC_VAR_START_ITR = 5000 is then one epoch, CAC_VAR_SAMPLES = 200 a twenty-fifth of one.
IMAGENET_STEPS = 90 * 5005
#: Variance ratios; the published thresholds, 0.95 to 0.98, lie in the middle.
THRESHOLDS = (0.9, 1.0)
#: Latest first decision, as a fraction of the run.
LATEST_START = 0.5
#: Choices of the braking distance beside 0, and the longest as a fraction of the run.
BRAKING_CHOICES, LONGEST_BRAKING = 5, 0.1


def suggest(trial: Suggests, context: SpaceContext) -> dict[str, Any]:
    """Ask for one configuration."""
    published = start(context)
    last_start = latest_start(context.total_steps)
    if context.latest_start_itr is not None:
        last_start = max(published["CAC_VAR_START_ITR"], min(last_start, context.latest_start_itr))
    first = thresholds(context.start_thr_range, published["CAC_VAR_START_THR"])
    mountain, slope = (
        thresholds(context.later_thr_range, published[name]) for name in ("CAC_VAR_MT_THR", "CAC_VAR_SLOPE_THR")
    )
    return {
        "CAC_VAR_START_ITR": trial.suggest_int("CAC_VAR_START_ITR", 0, last_start),
        "CAC_VAR_START_THR": trial.suggest_float("CAC_VAR_START_THR", *first),
        "CAC_VAR_MT_COUNT_THR": trial.suggest_int("CAC_VAR_MT_COUNT_THR", 0, 20),
        "CAC_VAR_MT_THR": trial.suggest_float("CAC_VAR_MT_THR", *mountain),
        "CAC_VAR_SLOPE_THR": trial.suggest_float("CAC_VAR_SLOPE_THR", *slope),
        "CAC_VAR_SAMPLES": trial.suggest_int("CAC_VAR_SAMPLES", 1, longest_interval(context.total_steps), log=True),
        "CAC_BRAKING_DISTANCE": suggest_braking(trial, context),
    }


def start(context: SpaceContext) -> dict[str, Any]:
    """The published defaults, iterations scaled from ImageNet's run to this one."""
    scale = context.total_steps / IMAGENET_STEPS
    return {
        "CAC_VAR_START_ITR": round(5000 * scale),
        "CAC_VAR_START_THR": 0.95,
        "CAC_VAR_MT_COUNT_THR": 5,
        "CAC_VAR_MT_THR": 0.96,
        "CAC_VAR_SLOPE_THR": 0.98,
        "CAC_VAR_SAMPLES": min(longest_interval(context.total_steps), max(1, round(200 * scale))),
        "CAC_BRAKING_DISTANCE": 0,
    }


def suggest_braking(trial: Suggests, context: SpaceContext) -> int:
    """Ask for a braking distance: few choices, so that no braking is tried as often as any other."""
    step = max(1, round(LONGEST_BRAKING * context.total_steps / BRAKING_CHOICES))
    return trial.suggest_int("CAC_BRAKING_DISTANCE", 0, BRAKING_CHOICES * step, step=step)


def thresholds(known: tuple[float, float] | None, published: float) -> tuple[float, float]:
    """The range of a threshold: where it makes a difference on this run, if that is known, else `THRESHOLDS`.

    The published value, which a search tries first, is always in it.
    """
    return THRESHOLDS if known is None else (min(known[0], published), known[1])


def latest_start(steps: int) -> int:
    """The latest first decision of a run."""
    return max(1, int(LATEST_START * steps))


def longest_interval(steps: int) -> int:
    """The most iterations from one decision to the next."""
    return max(2, steps // 15)


SPACE = Space(name="auto_thresholds", method="gradskip", suggest=suggest, start=start)
