"""The numbers of the plots that compare outcomes: Pareto picture, confirmation, importance. Pure; draws nothing.

Here and in `figures.course` and `figures.stops` a figure is None if there is nothing to draw. The axes show percentages
and points (of accuracy, 0.01 each), the frames contain fractions. Labels are plain text with lines separated by
newlines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import percent, plural, points
from analysis.metrics.controls import CONTROL_NAMES
from analysis.metrics.saving import TRAINING, saved_of_one, saved_words, saving_of
from analysis.presentation.figures.plain_columns import (
    bare,
    is_one_of,
    number,
    numbers,
    percent_values,
    saved,
    saved_again,
    texts,
)
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.summary_text import settings_text

#: Maximum number of trial numbers in a label.
_MOST_NUMBERS = 6
#: Maximum number of bars per objective in the plots of importance and interactions.
_MOST_BARS = 10
#: Margin above and below, as a share of the range of accuracies shown.
_MARGIN = 0.12
#: Minimum reach, in points of accuracy, below the lowest reference outcome of the Pareto picture, if it has trials.
_LEAST_REACH = 3.0


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of one kind in a plot."""

    x: list[float]
    """Horizontal coordinates."""
    y: list[float]
    """Vertical coordinates."""
    labels: list[str]
    """Hover text of each point."""
    counts: list[int]
    """Number of trials that each point represents."""

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, kw_only=True)
class Pareto:
    """Saving that the study ranks by (x, %) against validation accuracy (y, %)."""

    saved: str
    """Name of the saving, in words."""
    trials: Points
    """Outcomes of searched trials."""
    front: Points
    """Outcomes on the Pareto front, by saving."""
    baseline: Points
    """Training without the method."""
    published: Points
    """The method's published defaults."""
    shorter: Points
    """Shortened dense training, by compute saved, which any setting has to beat. Like the other controls, empty if the
    study does not rank by training compute."""
    random_stops: Points
    """Other controls."""
    chosen: Points
    """The chosen trial."""
    least_accuracy: float | None
    """Accuracy (%) at the allowed accuracy loss; None without a baseline."""
    y_range: tuple[float, float]
    """Initial range of accuracies (%)."""
    below: int
    """Number of trials below that range."""


def pareto(data: ReportData) -> Pareto | None:
    """Return the picture of all outcomes; None if no trial completed."""
    ranking = bare(data.ranking)
    if len(ranking) == 0:
        return None
    searched = ranking[~is_one_of(ranking, "role", "baseline", "published", "control")]
    on_front = numbers(ranking, "on_front") == 1
    baseline = _outcomes(ranking[is_one_of(ranking, "role", "baseline")])
    front = _by_x(_outcomes(ranking[on_front & ~is_one_of(ranking, "role", "control")]))
    shorter, random_stops = _controls(data.controls if data.saving == TRAINING else None)
    if len(shorter):
        shorter = _by_x(_joined(baseline, shorter))  # the line begins at the full length
    chosen = ranking.iloc[:0] if data.best is None else data.best.to_frame().T
    trials = _outcomes(searched)
    least = None if len(baseline) == 0 else float(np.mean(baseline.y)) - 100 * data.allowed_drop
    about = [*baseline.y, *shorter.y, *_outcomes(chosen).y, *([] if least is None else [least])]
    y_range = _y_range(about or [max(front.y)], [*trials.y, *front.y])
    everything = (trials, _outcomes(ranking[is_one_of(ranking, "role", "published")]), random_stops)
    return Pareto(
        saved=data.saved_words,
        trials=trials,
        front=front,
        baseline=baseline,
        published=everything[1],
        shorter=shorter,
        random_stops=random_stops,
        chosen=_outcomes(chosen),
        least_accuracy=least,
        y_range=y_range,
        below=sum(n for group in everything for y, n in zip(group.y, group.counts, strict=True) if y < y_range[0]),
    )


def _y_range(about: list[float], others: list[float]) -> tuple[float, float]:
    """Return the initial range of accuracies (%).

    The range contains all values in `about` (baseline, shorter training, chosen trial), and of `others` those that are
    not too far below them.
    """
    low, high = min(about), max(about)
    reach = max(2 * (high - low), _LEAST_REACH)
    shown = [*about, *(y for y in others if y >= low - reach)]
    low, high = min(shown), max(shown)
    margin = _MARGIN * (high - low + 0.1)
    return low - margin, min(100.5, high + margin)


def _outcomes(rows: pd.DataFrame) -> Points:
    """Return one point for all trials with the same outcome."""
    trials = rows["trial"].tolist()
    groups: dict[tuple[float, float], list[int]] = {}
    for place, (x, y) in enumerate(zip(saved(rows), numbers(rows, "accuracy"), strict=True)):
        if np.isfinite(x) and np.isfinite(y):
            groups.setdefault((float(x), float(y)), []).append(place)
    return Points(
        x=percent_values(np.array([x for x, _ in groups])),
        y=percent_values(np.array([y for _, y in groups])),
        labels=[_outcome_label(rows.iloc[places[0]], [trials[p] for p in places]) for places in groups.values()],
        counts=[len(places) for places in groups.values()],
    )


def _outcome_label(first: pd.Series, trials: list[int]) -> str:
    role = str(first.get("role") or "")
    listed = ", ".join(map(str, trials[:_MOST_NUMBERS]))
    more = f" and {len(trials) - _MOST_NUMBERS} more" if len(trials) > _MOST_NUMBERS else ""
    beside = f" ({role})" if role not in ("", "search") else ""
    lines = [f"trial{'s' if len(trials) > 1 else ''} {listed}{more}{beside}"]
    lines.append(f"{saved_words(saving_of(first))} {percent(saved_of_one(first))}")
    drop = number(first, "accuracy_drop")
    beside = "" if np.isnan(drop) else f", accuracy loss {points(drop)}"
    lines.append(f"accuracy {100 * number(first, 'accuracy'):.2f} %{beside}")
    settings = settings_text(first)
    if settings not in ("", "-"):
        lines += _folded(settings)
    return "\n".join(lines)


def _folded(settings: str, width: int = 44) -> list[str]:
    lines = [""]
    for word in settings.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _controls(controls: pd.DataFrame | None) -> tuple[Points, Points]:
    """Return the controls of shortened dense training, and the other controls."""
    if controls is None or len(controls) == 0:
        empty = Points(x=[], y=[], labels=[], counts=[])
        return empty, empty
    names = texts(controls, "control")
    compute, accuracy = numbers(controls, "compute_saved"), numbers(controls, "accuracy")
    epochs = ["" if np.isnan(n) else f" ({n:.0f} epochs)" for n in numbers(controls, "epochs")]
    cut = np.array([name.startswith("shorter") for name in names], dtype=bool)
    known = np.isfinite(compute) & np.isfinite(accuracy)

    def group(mask: NDArray[np.bool_]) -> Points:
        places = np.flatnonzero(mask & known)
        return _by_x(
            Points(
                x=percent_values(compute[places]),
                y=percent_values(accuracy[places]),
                labels=[
                    f"control: {CONTROL_NAMES.get(names[i], names[i])}{epochs[i]}\n"
                    f"compute saved {percent(compute[i])}\naccuracy {100 * accuracy[i]:.2f} %"
                    for i in places
                ],
                counts=[1] * len(places),
            )
        )

    return group(cut), group(~cut)


def _joined(first: Points, second: Points) -> Points:
    return Points(
        x=first.x + second.x,
        y=first.y + second.y,
        labels=first.labels + second.labels,
        counts=first.counts + second.counts,
    )


def _by_x(found: Points) -> Points:
    order = sorted(range(len(found)), key=lambda i: (found.x[i], -found.y[i]))
    return Points(
        x=[found.x[i] for i in order],
        y=[found.y[i] for i in order],
        labels=[found.labels[i] for i in order],
        counts=[found.counts[i] for i in order],
    )


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """Accuracy losses over fresh seeds with their intervals, in points; one entry per candidate."""

    candidates: list[str]
    """Name of the trial."""
    drop: list[float]
    """Mean accuracy loss."""
    low: list[float]
    """Lower end of the interval."""
    high: list[float]
    """Upper end of the interval."""
    confirmed: list[bool]
    """True for each candidate whose upper end is within the allowed accuracy loss."""
    labels: list[str]
    """Hover text of each candidate."""
    allowed: float
    """The allowed accuracy loss."""


def confirmation(data: ReportData) -> Confirmation | None:
    """Return the retrained candidates in the order given; None if there are none."""
    frame = data.confirmation
    if frame is None or len(frame) == 0:
        return None
    drop, low, high = (numbers(frame, name) for name in ("accuracy_drop", "drop_low", "drop_high"))
    share, seeds, confidence = saved_again(frame), numbers(frame, "seeds"), numbers(frame, "confidence")
    confirmed = numbers(frame, "confirmed") == 1
    candidates = [f"trial {name}" for name in texts(frame, "candidate")]
    labels = [
        f"{candidates[i]}: {'confirmed' if confirmed[i] else 'not confirmed'}\n"
        f"{data.saved_words} {percent(share[i])}\n"
        f"accuracy loss {points(drop[i], allowed=data.allowed_drop)}, {100 * confidence[i]:.0f} % interval "
        f"{points(low[i])} to {points(high[i], allowed=data.allowed_drop)}\n"
        f"{plural(int(seeds[i]) if np.isfinite(seeds[i]) else 0, 'seed')}"
        for i in range(len(frame))
    ]
    return Confirmation(
        candidates=candidates,
        drop=percent_values(drop),
        low=percent_values(low),
        high=percent_values(high),
        confirmed=[bool(value) for value in confirmed],
        labels=labels,
        allowed=100 * data.allowed_drop,
    )


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Named shares of one objective, greatest first."""

    objective: str
    """Column of the objective."""
    names: list[str]
    """Names of a parameter or a pair of parameters."""
    values: list[float]
    """Shares in [0, 1]."""
    explained: float | None = None
    """The total of which these are shares, as a fraction of the objective's variance; None if unknown."""

    @property
    def title(self) -> str:
        """Return the objective in words, with the explained share of its variance if known."""
        words = self.objective.replace("_", " ")
        return words if self.explained is None else f"{words}: shares of {percent(self.explained)} of its variance"


def importance(data: ReportData) -> list[Bars]:
    """Return the importance of every parameter: its share of each objective's explained variance."""
    return _bars(data.importance, "importance", lambda frame: [short_name(n) for n in texts(frame, "parameter")])


def interactions(data: ReportData) -> list[Bars]:
    """Return the strength of the interaction of two parameters, beyond their separate effects."""
    return _bars(
        data.interactions,
        "strength",
        lambda frame: [
            f"{short_name(a)} × {short_name(b)}"  # noqa: RUF001 - the sign of multiplication
            for a, b in zip(texts(frame, "first"), texts(frame, "second"), strict=True)
        ],
    )


def _bars(frame: pd.DataFrame | None, column: str, names_of: object) -> list[Bars]:
    if frame is None or len(frame) == 0:
        return []
    assert callable(names_of)
    found = []
    for objective in dict.fromkeys(texts(frame, "objective")):
        rows = frame[is_one_of(frame, "objective", objective)]
        values, names = numbers(rows, column), names_of(rows)
        order = [i for i in np.argsort(-values, kind="stable") if np.isfinite(values[i])][:_MOST_BARS]
        if order:
            found.append(
                Bars(
                    objective=objective,
                    names=[names[i] for i in order],
                    values=[float(values[i]) for i in order],
                    explained=frame.attrs.get("explained", {}).get(objective),
                )
            )
    return found


def short_name(variable: str) -> str:
    """Return a variable's name without the prefix common to all.

    >>> short_name("CAC_VAR_START_THR"), short_name("epochs")
    ('START_THR', 'epochs')
    """
    return variable.removeprefix("CAC_").removeprefix("VAR_")
