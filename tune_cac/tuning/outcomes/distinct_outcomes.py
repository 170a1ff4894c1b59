"""Distinct outcomes of a space's settings: which layers stop when, as replay on recorded runs predicts it.

Settings with one outcome train alike, bit for bit, so only one of them is trained: the one in the middle of the region
that the others fill.

Shapes: k layers at which stops may end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tune_cac.tuning.warm_start.baseline import WarmStart
from tune_cac.tuning.warm_start.threshold_ranges import outcome, predictions


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a group of settings does to training."""

    parameters: Mapping[str, Any]
    """Optuna parameters of the setting in the middle of the group."""
    config: Mapping[str, Any]
    """Fields of that setting's configuration."""
    region: Mapping[str, tuple[float, float]]
    """Lowest and highest value of each numeric parameter in the group."""
    settings: int
    """Number of drawn settings in the group."""
    saved: float
    """Compute saved, a fraction."""
    stops: tuple[tuple[int, int], ...]
    """(iteration, position of the last parameter stopped) of each stop."""
    certain_share: float
    """Share of the run, from its start, that was trained before."""
    known: bool
    """Whether the whole run was trained before."""


def distinct_outcomes(known: WarmStart, seed: int, *, settings: int) -> list[Outcome]:
    """Draw settings of a space, and group those that train alike; those that do nothing are left out.

    Args:
        known: what was learned from the recorded runs.
        seed: of the draw.
        settings: number of settings to draw.

    Returns:
        By ascending savings; none for a space whose outcomes cannot be predicted.
    """
    drawn = known.drawn(seed, settings)
    groups: dict[str, list[int]] = {}
    predicted = predictions(known.trace, [values for _, values in drawn])
    for row, found in enumerate(predicted):
        if found is not None and found["stops"] > 0:
            groups.setdefault(outcome(found, drawn[row][1]), []).append(row)
    made = []
    for rows in groups.values():
        parameters = [drawn[row][0] for row in rows]
        middle = rows[middle_of(parameters)]
        made.append(_outcome(drawn[middle], predicted[middle] or {}, known.trace.total_steps, parameters))
    return sorted(made, key=lambda one: one.saved)


def predicted_again(known: WarmStart, outcomes: Sequence[Outcome], trace: Any) -> list[Outcome]:
    """Return the outcomes as all recorded runs predict them, in the given order.

    Args:
        known: what was learned from the recorded runs.
        outcomes: to predict.
        trace: all recorded runs of the study.
    """
    found = predictions(trace, [one.config for one in outcomes], branches=True)
    total = known.trace.total_steps
    return [
        one if row is None else replace(one, **_facts(row, total)) for one, row in zip(outcomes, found, strict=True)
    ]


def _outcome(
    drawn: tuple[Mapping[str, Any], Mapping[str, Any]],
    row: Mapping[str, Any],
    total_steps: int,
    group: Sequence[Mapping[str, Any]],
) -> Outcome:
    return Outcome(
        parameters=drawn[0], config=drawn[1], region=region_of(group), settings=len(group), **_facts(row, total_steps)
    )


def _facts(row: Mapping[str, Any], total_steps: int) -> dict[str, Any]:
    return {
        "saved": float(row["compute_saved"]),
        "stops": tuple((event["iteration"], event["layer"]) for event in json.loads(row["stop_events"])),
        "certain_share": min(1.0, row["exact_until"] / total_steps),
        "known": bool(row["exact"]),
    }


def region_of(group: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the lowest and highest value of each numeric parameter that all settings of a group have.

    >>> region_of([{"thr": 0.93, "rule": "a"}, {"thr": 0.96, "rule": "a"}])
    {'thr': (0.93, 0.96)}
    """
    names = [name for name in group[0] if all(_is_number(setting.get(name)) for setting in group)]
    return {name: (min(s[name] for s in group), max(s[name] for s in group)) for name in names}


def middle_of(group: Sequence[Mapping[str, Any]]) -> int:
    """Return the place of the setting whose numeric parameters are nearest to the middle of the group's region.

    >>> middle_of([{"thr": 0.90}, {"thr": 0.94}, {"thr": 1.0}])
    1
    """
    region = region_of(group)
    distances = [
        sum(((s[name] - (low + high) / 2) / (high - low)) ** 2 for name, (low, high) in region.items() if high > low)
        for s in group
    ]
    return int(np.argmin(distances))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def trained_shares(stops: Sequence[tuple[int, int]], layers: Sequence[int], total_steps: int) -> NDArray[np.float64]:
    """Return (k,) shares of the run that layers trained: features by which the quality of outcomes is modelled.

    Args:
        stops: of an outcome.
        layers: positions of the layers' last parameters, ascending.
        total_steps: of the run.
    """
    first = [min((when for when, through in stops if through >= layer), default=total_steps) for layer in layers]
    return np.array(first, float) / total_steps
