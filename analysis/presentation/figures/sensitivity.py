"""A sensitivity analysis as one plot with a line for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.formatting import axis_words, drop_text, drop_words, plotted, plotted_text
from analysis.presentation.figures.figure import MOST_NAMED, Figure, axis, depth, limit, line, note, short
from trainables.quality import ACCURACY, Quality, allowed_amount


def sensitivity(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    allowed_drop: float | str,
    pruned: str = "elements",
    quality: Quality = ACCURACY,
) -> Figure:
    """Return the plot of accuracy, or another metric, against the pruned share of one layer alone.

    ``curves`` are (level, value) by layer, in the model's order, level 0 first; the allowed drop is drawn as a line
    from the first layer's value at level 0; ``pruned`` names what is pruned: elements, filters or channels.
    """
    traces = []
    for place, (name, points) in enumerate(curves.items()):
        levels, values = [100 * level for level, _ in points], list(plotted([value for _, value in points], quality))
        labels = [f"{name}\n{x:g} % pruned: {plotted_text(y, quality)}" for x, y in zip(levels, values, strict=True)]
        shown = {"mode": "lines+markers", "showlegend": len(curves) <= MOST_NAMED}
        colour = depth(place, len(curves))
        traces.append(line(short(name.removesuffix(".weight")), levels, values, labels, more=shown, color=colour))
    layout: dict[str, Any] = {
        "xaxis": axis(f"{pruned} pruned of one layer (%)", rangemode="tozero"),
        "yaxis": axis(axis_words(quality).removeprefix("validation ")),
    }
    if first := next(iter(curves.values()), ()):
        amount = float(allowed_amount(allowed_drop, first[0][1]))
        lowest = float(plotted(first[0][1] - quality.sign * amount, quality))
        words = f"allowed {drop_words(quality)} ({drop_text(amount, quality)})"
        layout |= {"shapes": [limit(lowest)], "annotations": [note(words, x=0, y=lowest)]}
    alt = f"{quality.name} against the share pruned of each of {len(curves)} layers alone."
    notes = ["Colours go from the first layer to the last. Point at a mark to see its layer."]
    return Figure(name="sensitivity", alt=alt, traces=traces, layout=layout, height=480, notes=notes)
