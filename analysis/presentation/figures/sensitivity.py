"""A sensitivity analysis as one plot with a line for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.formatting import axis_words, drop_text, drop_words, plotted, plotted_text
from analysis.presentation.figures.figure import MOST_NAMED, Axis, Figure, Points, depth, short
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
        traces.append(
            Points(
                name=short(name.removesuffix(".weight")) if len(curves) <= MOST_NAMED else "", x=levels, y=values,
                labels=labels, symbol="o", size=6, line_width=2, colour=depth(place, len(curves)),
            )
        )  # fmt: skip
    limits = {}
    if first := next(iter(curves.values()), ()):
        amount = float(allowed_amount(allowed_drop, first[0][1]))
        lowest = float(plotted(first[0][1] - quality.sign * amount, quality))
        limits = {f"allowed {drop_words(quality)} ({drop_text(amount, quality)})": lowest}
    alt = f"{quality.name} against the share pruned of each of {len(curves)} layers alone."
    notes = ["Colours go from the first layer to the last. Point at a mark to see its layer."]
    x = Axis(title=f"{pruned} pruned of one layer (%)", range=(0, 100))
    y = Axis(title=axis_words(quality).removeprefix("validation "))
    return Figure(name="sensitivity", alt=alt, traces=traces, x=x, y=y, limits=limits, height=480, notes=notes)
