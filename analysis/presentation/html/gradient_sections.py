"""The sections of the page on gradient statistics and on clusters of samples. Empty for studies without them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from analysis.formatting import percent, plural
from analysis.presentation.figures.figure import Figure
from analysis.presentation.figures.gradient_noise import shown_trial
from analysis.presentation.figures.report_data import ReportData, SampleImage
from analysis.presentation.html.elements import Markup, none, pictures, small_table

#: Maximum number of clusters in the table.
_MOST_CLUSTERS = 30
#: Shown side of small pictures in pixels: the longer side is enlarged to at least this, in whole factors.
_SIDE = 44
_NOISE = (
    "Normalised variance is V[g] / E[g²] of a gradient's elements, on average: at most about 1, and near 1 the "
    "gradient is noise. Average variance is the mean of V[g]. What measuring costs is counted in the trials' compute."
)
_CLUSTERS = (
    "Samples of a cluster have similar gradients. Spread is their mean squared distance from the cluster's centre, and "
    "examples are the training samples nearest to it, the nearest first."
)


def gradients(data: ReportData, figures: Mapping[str, Figure]) -> str:
    """Return the section on gradient statistics."""
    drawn = pictures(figures, "gradient_noise", "gradient_variance")
    layers = pictures(figures, "layer_noise")
    if not drawn and not layers:
        return ""
    return f"<p>{escape(_NOISE)}</p>{drawn}" + (f"<h3>Layer by layer</h3>{layers}" if layers else "")


def clusters(data: ReportData) -> str:
    """Return the section on the clusters of the trial that the report shows."""
    trial = shown_trial(data, data.clusters)
    if trial is None or data.clusters is None:
        return ""
    found = data.clusters[data.clusters["trial"] == trial]
    rows = [
        (str(row["cluster"] + 1), str(row["size"]), percent(row["share"]), _spread(row["spread"]),
         _examples(row["examples"], data.cluster_images))
        for row in found.head(_MOST_CLUSTERS).to_dict("records")
    ]  # fmt: skip
    heads = ("cluster", "samples", "share", "spread", "examples")
    caption = f"{plural(len(found), 'cluster')} of trial {trial}, the largest first"
    more = len(found) - _MOST_CLUSTERS
    end = none(f"and {plural(more, 'smaller cluster')}") if more > 0 else ""
    return f"<p>{escape(_CLUSTERS)}</p>" + small_table(caption, heads, rows, numeric=(0, 1, 2, 3)) + end


def _spread(value: Any) -> str:
    return "" if value != value else f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _examples(numbers: Iterable[int], images: Mapping[int, SampleImage]) -> str:
    """Return the samples' numbers, with small pictures and labels where there are any."""
    numbers = list(numbers)
    if not any(number in images for number in numbers):
        return ", ".join(map(str, numbers))
    return Markup(f'<ul class="samples">{"".join(_example(number, images.get(number)) for number in numbers)}</ul>')


def _example(number: int, image: SampleImage | None) -> str:
    if image is None:
        return f"<li>{number}</li>"
    factor = max(1, -(-_SIDE // max(image.width, image.height)))
    label = f"label {image.label}" if image.label else "no label"
    source = base64.b64encode(image.png).decode()
    return (
        f'<li><img alt="sample {number}, {escape(label)}" title="sample {number}, {escape(label)}" '
        f'width="{factor * image.width}" height="{factor * image.height}" src="data:image/png;base64,{source}">'
        f"<span>{escape(image.label)}</span><small>{number}</small></li>"
    )
