"""The numbers of the plots that compare outcomes: Pareto picture, confirmation, importance. Pure, without a plotter.

Here and in `course_figures` and `stop_figures` a figure is None where there is nothing to draw. Percentages and points
(of accuracy, 0.01 each) are on the axes, fractions in the frames. Labels are plain text, lines separated by newlines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.formatting import percent, plural, points
from analysis.metrics.saving import TRAINING, saved_of_one, saved_words, saving_of
from analysis.presentation.html.plain_columns import (
    bare,
    is_one_of,
    number,
    numbers,
    percent_values,
    saved,
    saved_again,
    texts,
)
from analysis.presentation.html.report_data import ReportData
from analysis.presentation.summary_text import settings_text

#: Trial numbers that a label lists.
_MOST_NUMBERS = 6
#: Bars of an objective in the pictures of importance and interaction.
_MOST_BARS = 10
#: Free room above and below, as a share of the accuracies shown.
_MARGIN = 0.12
#: Points of accuracy below the lowest of what the Pareto picture is about that it shows at least, if trials are there.
_LEAST_REACH = 3.0


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of one kind."""

    x: list[float]
    """Horizontal places."""
    y: list[float]
    """Vertical places."""
    labels: list[str]
    """What is said of each."""
    counts: list[int]
    """Trials that each stands for."""

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, kw_only=True)
class Pareto:
    """What the study ranks by (x, %) against validation accuracy (y, %)."""

    saved: str
    """What is saved, in words."""
    trials: Points
    """Outcomes of searched trials."""
    front: Points
    """Those that no other beats in both, by compute saved."""
    baseline: Points
    """Training without the method."""
    published: Points
    """The method's published defaults."""
    shorter: Points
    """Dense training cut short, by compute saved: what any setting has to beat. Like the other controls none where the
    study ranks by other compute than the training's."""
    random_stops: Points
    """Other controls."""
    chosen: Points
    """The answer."""
    least_accuracy: float | None
    """Accuracy (%) at the allowed drop; None without a baseline."""
    y_range: tuple[float, float]
    """Accuracies (%) that the picture shows at first."""
    below: int
    """Trials under that range."""


def pareto(data: ReportData) -> Pareto | None:
    """The picture of all outcomes; None if no trial completed."""
    ranking = bare(data.ranking)
    if len(ranking) == 0:
        return None
    searched = ranking[~is_one_of(ranking, "role", "baseline", "published", "control")]
    on_front = numbers(ranking, "on_front") == 1
    baseline = _outcomes(ranking[is_one_of(ranking, "role", "baseline")])
    front = _by_x(_outcomes(ranking[on_front & ~is_one_of(ranking, "role", "control")]))
    shorter, random_stops = _controls(data.controls if data.saving == TRAINING else None)
    if len(shorter):
        shorter = _by_x(_joined(baseline, shorter))  # the line begins where nothing is cut
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
    """Baseline, controls and the answer in full, and as many of the trials below as do not squeeze these."""
    low, high = min(about), max(about)
    reach = max(2 * (high - low), _LEAST_REACH)
    shown = [*about, *(y for y in others if y >= low - reach)]
    low, high = min(shown), max(shown)
    margin = _MARGIN * (high - low + 0.1)
    return low - margin, min(100.5, high + margin)


def _outcomes(rows: pd.DataFrame) -> Points:
    """One point for all trials of one outcome."""
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
    beside = "" if np.isnan(drop) else f", drop {points(drop)}"
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
    """Dense training cut short, and the others."""
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
                    f"control: {names[i]}{epochs[i]}\ncompute saved {percent(compute[i])}\n"
                    f"accuracy {100 * accuracy[i]:.2f} %"
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
    """Drops in accuracy over fresh seeds with their intervals, in points; one entry a candidate."""

    candidates: list[str]
    """Which trial it is."""
    drop: list[float]
    """Mean drop."""
    low: list[float]
    """Lower end of its interval."""
    high: list[float]
    """Upper end."""
    confirmed: list[bool]
    """Whether the upper end is within the allowed drop."""
    labels: list[str]
    """What is said of each."""
    allowed: float
    """The allowed drop."""


def confirmation(data: ReportData) -> Confirmation | None:
    """Candidates in the order given; None if none was retrained."""
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
        f"drop {points(drop[i], allowed=data.allowed_drop)}, {100 * confidence[i]:.0f} % interval "
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
    """Column that they are of."""
    names: list[str]
    """A parameter, or two."""
    values: list[float]
    """Shares in [0, 1]."""
    explained: float | None = None
    """What they are shares of, as a part of the objective's variance; None where that is not known."""

    @property
    def title(self) -> str:
        """The objective in words, with what is explained of it."""
        words = self.objective.replace("_", " ")
        return words if self.explained is None else f"{words}: shares of {percent(self.explained)} of its variance"


def importance(data: ReportData) -> list[Bars]:
    """How much of each objective's variation every parameter explains."""
    return _bars(data.importance, "importance", lambda frame: [short_name(n) for n in texts(frame, "parameter")])


def interactions(data: ReportData) -> list[Bars]:
    """How strongly two parameters act together, beyond what each does alone."""
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
    """A variable without the prefix common to all.

    >>> short_name("CAC_VAR_START_THR"), short_name("epochs")
    ('START_THR', 'epochs')
    """
    return variable.removeprefix("CAC_").removeprefix("VAR_")
