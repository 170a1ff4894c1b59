"""The report, or one plot, as one HTML file that needs no network and no other file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from analysis.formatting import (
    ROUNDING,
    allowed_text,
    drop_number,
    drop_text,
    drop_unit,
    drop_words,
    metric_words,
    percent,
    plural,
    short_name,
    value_text,
    value_with_unit,
)
from analysis.io.checked import array_of, number_of
from analysis.metrics.accounting import search_cost, search_fraction
from analysis.metrics.confirmation import compared, of_trial, saved_again
from analysis.metrics.ranking import CONTROL_NAMES, baseline_of, beats_shorter, control_line
from analysis.metrics.saving import saved_of_one
from analysis.presentation.figures.figure import Figure, is_one_of, plain, saved, texts
from analysis.presentation.figures.palette import DARK, DEPTH_DARK, DEPTH_LIGHT, LIGHT
from analysis.presentation.figures.report_data import ReportData, SampleImage
from analysis.presentation.figures.report_figures import report_figures
from analysis.presentation.figures.variance import shown_trial
from analysis.presentation.markdown_report import is_compressed, layers, stop_table, sums
from analysis.presentation.settings_text import (
    RECIPE_NOTE,
    WHOLE_FILES,
    compresses,
    field_text,
    recipe_table,
    without_files,
)
from analysis.presentation.summary_text import TREE_CAPTION, compression_of, config_of, is_answer
from trainables.config import field_kinds
from trainables.errors import UserError
from trainables.quality import ACCURACY, Quality
from trainables.savings import BOTH, TIME, TRAINING

# --- Parts of sections of the page as HTML. All text is escaped with `escape` -----------------------------------------


class Markup(str):
    """A table's cell that is HTML already."""

    __slots__ = ()


def none(why: str) -> str:
    """Return a faint paragraph that says why something is missing."""
    return f'<p class="none">{escape(why)}</p>'


def pictures(figures: Mapping[str, Figure], *names: str) -> str:
    """Return those of the named figures that exist."""
    return "".join(picture(figures[name]) for name in names if name in figures)


def picture(figure: Figure) -> str:
    """Return the place in which the page's script draws a figure, with its caption."""
    notes = " ".join(escape(note) for note in figure.notes)
    caption = f"<figcaption>{notes}</figcaption>" if notes else ""
    return (
        f'<figure><div class="plot" id="plot-{figure.name}" data-figure="{figure.name}" role="img" '
        f'aria-label="{escape(figure.alt)}" style="height:{figure.height}px"></div>{caption}</figure>'
    )


def facts(kind: str, cells: Iterable[tuple[str, str]]) -> str:
    """Return a description list from names and the HTML of their values; empty without any."""
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in cells)
    return f'<dl class="{kind}">{shown}</dl>' if shown else ""


def small_table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = ()
) -> str:
    """Return a table in its own scrollable box; cells are text, or `Markup`."""
    number_class = [' class="number"' if i in numeric else "" for i in range(len(heads))]
    head = "".join(f'<th scope="col"{c}>{escape(h)}</th>' for h, c in zip(heads, number_class, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{_cell(v)}</td>" for v, c in zip(row, number_class, strict=True)) + "</tr>"
        for row in rows
    )
    inner = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return scrollable(caption, f"<table>{inner}</table>")


def _cell(value: str) -> str:
    return value if isinstance(value, Markup) else escape(value)


def scrollable(label: str, body: str, *, kind: str = "scroll") -> str:
    """Return a box that scrolls, also by keyboard."""
    return f'<div class="{kind}" tabindex="0" role="group" aria-label="{escape(label)}">{body}</div>'


# --- The sections of the page on gradient statistics and on clusters of samples. Empty for studies without them

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


# --- The section of the page on samples that a generator draws, epoch by epoch. Empty for studies without them

#: Most epochs of a trial that are shown, evenly spread.
_MOST_EPOCHS = 8
#: Enlargement of the pictures.
_FACTOR = 2
_PNG = b"\x89PNG\r\n\x1a\n"
_SAMPLES = (
    "Samples from the same noise after some of a trial's epochs: of the baseline, and of the trial that the report "
    "shows."
)
COLLAPSED = "discriminator_collapsed"


def sample_pictures(data: ReportData) -> str:
    """Return the section on samples and on collapsed discriminators."""
    rows = data.history
    if rows is None or "sample_picture" not in rows.columns:
        return ""
    rows = rows[rows["sample_picture"].map(lambda text: bool(_png(text)))]
    if rows.empty:
        return ""
    baselines = data.trials.loc[data.trials["role"] == "baseline", "trial"]
    chosen = [*baselines.head(1), shown_trial(data, rows)]
    shown = [int(trial) for trial in dict.fromkeys(chosen) if trial is not None and (rows["trial"] == trial).any()]
    table = [
        (f"{trial}{' (baseline)' if trial in set(baselines) else ''}", _pictures(rows[rows["trial"] == trial], data))
        for trial in shown
    ]
    warning = "".join(f"<p><strong>{escape(line)}</strong></p>" for line in collapsed(rows))
    return f"<p>{escape(_SAMPLES)}</p>{warning}" + small_table("Samples by trial", ("trial", "samples"), table)


def collapsed(rows: pd.DataFrame) -> list[str]:
    """Return a line on each trial whose discriminator had collapsed after an epoch.

    Args:
        rows: of `analysis.history`.

    >>> collapsed(pd.DataFrame({"trial": [3, 3, 4], "epoch": [1, 2, 1], "discriminator_collapsed": [1.0, 1.0, 0.0]}))
    ['The discriminator of trial 3 had collapsed after epoch 1, 2.']
    """
    if COLLAPSED not in rows.columns:
        return []
    told = rows[pd.to_numeric(rows[COLLAPSED], errors="coerce") > 0]
    return [
        f"The discriminator of trial {trial} had collapsed after epoch {', '.join(map(str, group['epoch']))}."
        for trial, group in told.groupby("trial")
    ]


def _pictures(rows: pd.DataFrame, data: ReportData) -> Markup:
    places = sorted({round(k * (len(rows) - 1) / (_MOST_EPOCHS - 1)) for k in range(_MOST_EPOCHS)})
    items = [_item(row, data) for row in rows.sort_values("epoch").iloc[places].to_dict("records")]
    return Markup(f'<ul class="samples">{"".join(items)}</ul>')


def _item(row: dict[Any, Any], data: ReportData) -> str:
    picture = _png(row["sample_picture"])
    width, height = (_FACTOR * int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    quality = data.quality
    value = row.get(quality.name)
    words = "" if value is None or value != value else f", {quality.name} {value_text(value, quality)}"
    alt = escape(f"samples after epoch {row['epoch']}{words}")
    source = base64.b64encode(picture).decode()
    return (
        f'<li><img alt="{alt}" title="{alt}" width="{width}" height="{height}" src="data:image/png;base64,{source}">'
        f"<small>epoch {int(row['epoch'])}{escape(words)}</small></li>"
    )


def _png(text: Any) -> bytes:
    """Return the picture in a cell; empty where there is none, whatever a study's file holds."""
    try:
        found = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return b""
    return found if found.startswith(_PNG) and len(found) >= 24 else b""


# --- The sections of the page as HTML. All text from a study is escaped with `escape` ---------------------------------

#: Maximum number of failed trials listed.
_MOST_FAILURES = 200


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the page."""

    name: str
    """Its anchor."""
    title: str
    """Its heading, as plain text."""
    body: str
    """Its HTML."""


def sections(data: ReportData, figures: Mapping[str, Figure]) -> list[Section]:
    """Return all sections that are not empty, in the order of the page."""
    made = [
        ("settings", "Settings to use", _settings(data)),
        ("trade-off", f"{data.saved_words.capitalize()} against {data.quality.name}",
         pictures(figures, "pareto") + _controls_note(data)),
        ("recipe", "What each choice brought", _recipe(data)),
        ("confirmation", "Confirmation on fresh seeds", _confirmation(data, figures)),
        ("sparsity", "What is zero", _sparsity(data)),
        ("stops", "When layers stopped", _stops(data, figures)),
        ("why", "Weight variances" if data.stops is None or len(data.stops) == 0 else "Why they stopped",
         pictures(figures, "variance")),
        ("training", "Training", pictures(figures, "learning")),
        ("gradients", "Noise of the gradients", gradients(data, figures)),
        ("clusters", "Samples with similar gradients", clusters(data)),
        ("samples", "Samples", sample_pictures(data)),
        ("parameters", "What mattered", _mattered(data, figures)),
        ("search", "The search", _search(figures)),
        ("tree", "Stage tree", f"<p>{TREE_CAPTION}</p>{picture(figures['tree'])}" if "tree" in figures else ""),
        ("trials", "All trials", _table(data)),
        ("failed", "Failed trials", _failed(data.trials)),
        ("environment", "Environment", _environment(data)),
    ]  # fmt: skip
    return [Section(name=name, title=title, body=body) for name, title, body in made if body]


def header(data: ReportData) -> str:
    """Return the header: the result in one sentence, and the numbers behind it."""
    info = data.info
    counts = data.trials["status"].value_counts()
    told = ", ".join(f"{n} {escape(str(status))}" for status, n in counts.items()) or "none"
    running = ""
    if data.status == "running":
        count = int(counts.get("running", 0))
        what = f"{plural(count, 'trial')} {'is' if count == 1 else 'are'} training" if count else "more is to come"
        running = (
            f'<p class="running">The search is running ({what}): this is what it had found when the report was '
            "made.</p>"
        )
    answer, caveats = first_sentence(data.headline)
    more = f'<p class="caveats">{escape(caveats)}</p>' if caveats else ""
    return (
        f'<p class="study">{escape(info.space)} on {escape(info.workload)}</p><h1>{escape(answer)}</h1>{more}{running}'
        f'<p class="cost">{escape(data.cost_line)}</p>{_tiles(data)}'
        f'<p class="faint">{info.length_text}, seed {info.seed}; allowed {escape(drop_words(data.quality))} '
        f"{escape(allowed_text(data.allowed_drop, data.quality))}; "
        f"trials: {told}.</p>"
    )


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text into its first sentence and the rest.

    >>> first_sentence("You can skip 3.1 % (allowed: 0.50 points). One seed, not confirmed. So be it.")
    ('You can skip 3.1 % (allowed: 0.50 points).', 'One seed, not confirmed. So be it.')
    >>> first_sentence("No trial has completed.")
    ('No trial has completed.', '')
    """
    first, *others = re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)
    return first, "".join(others)


def _tiles(data: ReportData) -> str:
    tiles: list[tuple[str, str, str]] = []
    best, quality, allowed = data.best, data.quality, allowed_text(data.allowed_drop, data.quality)
    if best is not None and saved_of_one(best) > 0:
        again = of_trial(data.confirmation, best)
        if again is not None and again["confirmed"]:
            over = f"over {plural(int(again['seeds']), 'fresh seed')}"
            tiles.append((data.saved_words, percent(saved_again(again)), over))
            beside = f"{compared(again).removesuffix(' accuracy')}, {over}; allowed {allowed}"
            tiles.append((drop_words(quality), _drop(again[quality.drop], quality), beside))
        else:
            tiles.append((data.saved_words, percent(saved_of_one(best)), _beside_saved(best, data.saving)))
            drop = number_of(best, quality.drop)
            tiles.append((drop_words(quality), _drop(drop, quality), f"validation; allowed {allowed}"))
        baseline = data.ranking[is_one_of(data.ranking, "role", "baseline")]
        test = number_of(best, quality.test)
        if np.isfinite(test) and len(baseline):
            base = number_of(baseline_of(data.ranking, best), quality.test)
            beside = "" if np.isnan(base) else f"baseline {value_with_unit(base, quality)}"
            tiles.append((f"test {quality.name}", value_with_unit(test, quality), beside))
    total = search_cost(data.trials)
    if total.dense_equivalents > 0:
        tiles.append(("search cost", f"{total.dense_equivalents:.1f} full trainings", plural(total.trials, "trial")))
    spans = [f"<span>{escape(beside)}</span>" if beside else "" for *_, beside in tiles]
    cells = [
        (name, f"<strong>{escape(value)}</strong>{span}") for (name, value, _), span in zip(tiles, spans, strict=True)
    ]
    return facts("tiles", cells)


def _recipe(data: ReportData) -> str:
    """Return the table of what each choice of the training recipe brought."""
    table = recipe_table(data.trials)
    if not table:
        return ""
    return f"<p>{escape(RECIPE_NOTE)}</p>" + small_table(
        "Effects of the recipe's choices", table[0], table[1:], numeric=(1, 2, 3, 4)
    )


def _beside_saved(best: pd.Series, saving: str) -> str:
    """Return the note on a saving: backward pass, sparsity, or the two savings of which it is the mean."""
    if saving == BOTH:
        training, inference = number_of(best, "compute_saved"), number_of(best, "inference_saved")
        return f"training {percent(training)}, inference {percent(inference)}"
    name, said = {
        TRAINING: ("backward_saved", "{} of the backward pass"),
        TIME: ("peak_memory_saved", "{} of the peak memory"),
    }.get(saving, ("sparsity", "sparsity {}"))
    value = number_of(best, name)
    return "" if np.isnan(value) else said.format(percent(value))


def _drop(drop: float, quality: Quality = ACCURACY) -> str:
    """Return a drop in words; a gain is marked as "better".

    >>> _drop(0.001), _drop(0.0), _drop(-0.002)
    ('0.10 points', 'none', '0.20 points better')
    """
    if np.isnan(drop):
        return "unknown"
    if abs(drop) <= ROUNDING:
        return "none"
    return drop_text(drop, quality) if drop > 0 else f"{drop_text(-drop, quality)} better"


def _settings(data: ReportData) -> str:
    best, how = data.best, ""
    if best is not None and is_answer(best) and is_compressed(best) and compresses(config_of(best)):
        how = (
            f"<p>Trial {escape(str(best['trial']))} compresses: {escape(compression_of(best))}. The whole schedule, to "
            "train with, is in <code>best.yaml</code>; <code>python -m tune_cac export STUDY --format schedule</code> "
            "prints it.</p>"
        )
    if not is_answer(best) and data.info.method == "compression":
        how = "<p>No schedule tried is worth training with.</p>"
    elif best is not None and is_answer(best) and str(best["method"]) == "recipe":
        how = "<p>No variable sets this; the lines, also in <code>best.env</code>, say how to train so.</p>"
    elif not how or "gradskip" in str(best["method"] if best is not None else ""):
        how += "<p>Paste these lines into a shell before training, or source <code>best.env</code>, which has them.</p>"
    return (
        f'{how}<div class="copy"><button type="button" id="copy" aria-describedby="copied">Copy settings</button>'
        '<span id="copied" role="status"></span></div>'
        f'<pre id="settings-text" tabindex="0" aria-label="settings">{escape(data.best_env.rstrip())}</pre>'
    )


def _sparsity(data: ReportData) -> str:
    """Return the section on the best trial's sparsity, in total and by layer; empty if it was not compressed."""
    best = data.best
    if best is None or not is_compressed(best):
        return ""
    found = facts("facts", [(name, escape(value)) for name, value in sums(best)])
    rows = layers(best)
    if not rows:
        return found
    caption = f"Sparsity by layer of the chosen trial {best['trial']}"
    return found + small_table(caption, ("layer", "sparsity"), rows, numeric=(1,))


def _stops(data: ReportData, figures: Mapping[str, Figure]) -> str:
    if set(texts(data.ranking, "method")) <= {"none", "recipe", "compression"} and is_one_of(data.ranking, "method",
                                                                                   "compression").any():  # fmt: skip
        return ""  # no layer could stop in this study
    drawn = pictures(figures, "timeline") or none("No ranked trial stopped a layer.")
    heads, *rows = [[]] if data.best is None else stop_table(data.best)
    if data.best is None or not rows:
        return drawn
    return drawn + small_table(f"Stops of the chosen trial {data.best['trial']}", heads, rows, numeric=(0, 1, 4))


def _controls_note(data: ReportData) -> str:
    if data.controls is None and data.saving == TRAINING:
        return none(
            f"No controls were trained, so the {data.quality.name} of a dense run cut to the same compute is not known."
        )
    return ""


def _confirmation(data: ReportData, figures: Mapping[str, Figure]) -> str:
    frame = data.confirmation
    if frame is None or len(frame) == 0:
        return none(
            "Nothing is confirmed: the winner among many on one seed is partly luck. Retrain the best on fresh seeds "
            "with python -m tune_cac confirm STUDY."
        )
    rows, quality = [], data.quality
    for _, row in frame.iterrows():
        drop, low, high = (
            drop_number(row[name], quality, allowed=data.allowed) for name in (quality.drop, "drop_low", "drop_high")
        )
        confidence = "" if np.isnan(row["confidence"]) else f"{100 * row['confidence']:.0f} %"
        again = percent(saved_again(row)) if row["seeds"] > 0 else "-"
        interval = f"{low} to {high}" if row["seeds"] > 1 else "-"
        found = [str(row["candidate"]), str(row["seeds"]), again, drop, interval]
        rows.append([*found, confidence, "yes" if row["confirmed"] else "no"])
    unit = drop_unit(quality)
    heads = ("trial", "seeds", data.saved_words, f"{drop_words(quality)}{unit}", f"interval{unit}", "confidence",
             "confirmed")  # fmt: skip
    table = small_table("Candidates retrained on fresh seeds", heads, rows, numeric=(0, 1, 2, 3, 4, 5))
    return pictures(figures, "confirmation") + table


def _mattered(data: ReportData, figures: Mapping[str, Figure]) -> str:
    drawn = pictures(figures, "importance")
    if not drawn and data.importance is not None:
        reason = data.importance.attrs.get("reason")
        return none(f"Importance of parameters is unknown: {reason or 'no trial says anything of it'}.")
    explained = {} if data.importance is None else data.importance.attrs.get("explained", {})
    if not drawn or not explained:
        return drawn
    said = " and ".join(f"{percent(share)} of the variance of {escape(name.replace('_', ' '))}"
                        for name, share in explained.items())  # fmt: skip
    return (
        f"<p>Each alone, the parameters explain together {said}. Importance is the share of that; the rest is what "
        f"they do in combination, and noise.</p>{drawn}"
    )


def _search(figures: Mapping[str, Figure]) -> str:
    titles = {"convergence": "Best found so far", "hypervolume": "Hypervolume", "cost": "Cost"}
    return "".join(f"<h3>{title}</h3>{picture(figures[name])}" for name, title in titles.items() if name in figures)


def _table(data: ReportData) -> str:
    if len(data.trials) == 0:
        return none("The study has no trials yet.")
    chosen = "" if data.best is None else f' data-chosen="{escape(str(data.best["trial"]))}"'
    return (
        '<div class="controls"><label for="filter">Filter</label><input id="filter" type="search" autocomplete="off" '
        'spellcheck="false" aria-describedby="filter-help"><span id="filter-help" class="faint">words that a row must '
        'have, such as <kbd>completed</kbd> or <kbd>saved&gt;30</kbd></span></div>'
        + scrollable("all trials", f'<table id="trials-table"{chosen}><caption>All trials; a heading sorts by its '
                      "column.</caption><thead></thead><tbody></tbody></table>") +
        '<div class="pages"><button type="button" id="previous">Previous</button>'
        '<span id="page-status" role="status"></span><button type="button" id="next">Next</button></div>'
        "<noscript><p>The table and the plots need JavaScript; ranking.csv, which the search wrote, has the same.</p>"
        "</noscript>"
    )  # fmt: skip


def _failed(trials: pd.DataFrame) -> str:
    failed = trials[is_one_of(trials, "status", "failed")]
    errors = texts(failed, "error")
    rows = "".join(
        f"<li>trial {escape(str(trial))}: <code>{escape(error or 'no reason known')}</code></li>"
        for trial, error in list(zip(failed["trial"], errors, strict=True))[:_MOST_FAILURES]
    )
    more = len(failed) - _MOST_FAILURES
    return f"<ul>{rows}</ul>" + (none(f"and {more} more") if more > 0 else "") if rows else ""


def _environment(data: ReportData) -> str:
    entries: dict[str, Any] = dict(data.environment)
    for name, version in data.info.versions.items():
        entries.setdefault(name, version)
    if data.info.hold:
        held = without_files(data.info.hold)
        entries["fixed in every trial but the baseline"] = " ".join(f"{k}={v}" for k, v in held.items())
    found = facts("facts", [(str(name), escape(str(value))) for name, value in entries.items()])
    return found or none("Nothing is known of where this ran.")


# --- The page's table of all trials: columns with their kinds, rows of plain values. Pure -----------------------------

#: Result columns: name, heading, description, decimals. Fractions are shown as percentages.
_COMPUTE = ("compute_saved", "saved %", "compute saved, percent of the full budget's FLOPs", 1)
#: Columns of compute saved and sparsity for a study that does not rank by training compute.
_INFERENCE = (
    ("saved", "saved %", "{}, percent", 1),
    ("inference_saved", "inference %", "multiply-adds saved at inference, percent of the model's as it was built", 1),
    ("sparsity", "sparsity %", "zeros among the weights of convolutions and linear layers, percent", 1),
    ("structured_sparsity", "structured %", "of these weights in whole filters, rows or channels of zeros, percent", 1),
    ("compute_saved", "training %", "training compute saved, percent of the full budget's FLOPs", 1),
)
_OTHERS = (
    ("backward_saved", "backward %", "backward FLOPs saved, percent", 1),
    ("communication_saved", "commun. %", "gradient bytes saved, percent", 1),
    ("time_saved", "time %", "training time saved, percent; one measurement beside other trials", 1),
    ("peak_memory_saved", "memory %", "peak memory saved, percent", 1),
)
_LATENCY = (
    "latency_s", "latency ms",
    "median time of a batch through the model from which structures were removed, milliseconds", 2,
)  # fmt: skip
_COST = ("search_cost", "search cost", "compute that the search executed for it, in full trainings of the baseline", 2)
#: Factors of the values that are not fractions.
_FACTORS = {"latency_s": 1000.0, "search_cost": 1.0}
#: Hyperparameters that are shown elsewhere or are not part of a setting.
_ELSEWHERE = ("workload", "unnamed", *WHOLE_FILES)
#: Maximum characters of an error in the table; the section of failed trials shows it in full.
_MOST_LETTERS = 120


def trial_table(data: ReportData) -> dict[str, Any]:
    """Return the columns and rows of the table.

    Returns:
        ``columns``: dicts with key, label, title, kind (``number`` or ``text``) and digits (None: unrounded); ``rows``:
        lists of values in the order of the columns, None for a missing value.
    """
    trials = data.trials
    columns: list[dict[str, Any]] = []
    values: list[list[Any]] = []

    def add(
        key: str, label: str, title: str, found: list[Any], kind: str = "number", digits: int | None = None
    ) -> None:
        columns.append({"key": key, "label": label, "title": title, "kind": kind, "digits": digits})
        values.append(found)

    rank_of = dict(zip(data.ranking.get("trial", ()), data.ranking.get("rank", ()), strict=True))
    add("trial", "trial", "number of the trial", [int(t) for t in trials["trial"]])
    add("rank", "rank", "place in the ranking", [rank_of.get(trial) for trial in trials["trial"]])
    add("role", "role", "baseline, published defaults, search or control", _roles(trials), "text")
    if "baseline" in data.ranking:
        numbers = dict(zip(data.ranking["trial"], data.ranking["baseline"], strict=True))
        compared = [numbers.get(trial, pd.NA) for trial in trials["trial"]]
        title = "trial of the same options that it is compared with"
        add("baseline", "baseline", title, [None if pd.isna(number) else int(number) for number in compared])
    add("status", "status", "how it ended", texts(trials, "status"), "text")

    of_training = data.saving == TRAINING
    compute = (_COMPUTE,) if of_training else _INFERENCE[:1] if data.saving == TIME else _INFERENCE
    results = trials.assign(saved=saved(trials), search_cost=search_fraction(trials))
    measured, tested = _metric_columns(data.quality)
    others = (*compute, *_OTHERS, tested, *(() if of_training else (_LATENCY,)), _COST)
    scale = 100.0 if data.quality.is_fraction else 1.0
    factors = {name: scale for name, *_ in (*measured, tested)} | _FACTORS
    for name, label, title, digits in (*measured, *others):
        found = array_of(results, name) * factors.get(name, 100.0)
        if np.isfinite(found).any():
            shown = [round(float(value), 6) + 0.0 for value in found]  # adding 0.0 turns -0.0 into 0.0
            add(name, label, title.format(data.saved_words), shown, digits=digits)
    beats = [None if pd.isna(b) else str(b) for b in beats_shorter(trials, control_line(trials))]
    if any(beats):
        title = "whether it is better than a dense run cut to the same compute"
        add("beats_shorter", "beats cut dense run", title, beats, "text")
    for name, kind in field_kinds().items():
        if name not in _ELSEWHERE and name in trials.columns and trials[name].dropna().nunique() > 1:
            add(name, short_name(name), name, *_setting(trials, name, kind))
    errors = [error if len(error) <= _MOST_LETTERS else f"{error[:_MOST_LETTERS]}…" for error in texts(trials, "error")]
    if any(errors):
        add("error", "error", "what went wrong", errors, "text")
    return {"columns": columns, "rows": plain([list(row) for row in zip(*values, strict=True)])}


_Column = tuple[str, str, str, int | None]


def _metric_columns(quality: Quality) -> tuple[tuple[_Column, _Column], _Column]:
    """Return the columns of the metric and its drop, and that of the test split: name, heading, description, digits."""
    if quality.is_fraction:
        name, drop, digits, unit = f"{quality.name} %", "in points", 2, ", percent"
    else:
        name, drop, digits, unit = quality.name, quality.unit, None, f", {quality.unit}" if quality.unit else ""
    lost = f"how much worse than the baseline's{', ' if drop else ''}{drop}"
    tested = "test %" if quality.is_fraction else quality.test
    return (
        (
            (quality.name, name, f"{metric_words(quality)} on the validation split{unit}", digits),
            (quality.drop, drop_words(quality), lost, digits),
        ),
        (quality.test, tested, f"{quality.name} on the test split{unit}; no choice was made by it", digits),
    )


def _roles(trials: pd.DataFrame) -> list[str]:
    controls = texts(trials, "control")
    return [
        f"{role}: {CONTROL_NAMES.get(control, control)}" if control else role
        for role, control in zip(texts(trials, "role"), controls, strict=True)
    ]


def _setting(trials: pd.DataFrame, name: str, kind: type) -> tuple[list[Any], str]:
    """Return a hyperparameter's values and their kind."""
    if kind in (int, float):
        found = array_of(trials, name)
        return [None if np.isnan(v) else int(v) if kind is int else float(f"{v:.6g}") for v in found], "number"
    return [field_text(name, text) for text in texts(trials, name)], "text"


# --- The report, or one plot, as one HTML file that needs no network and no other file --------------------------------


def report_html(data: ReportData) -> str:
    """Return a study's whole report as HTML; UserError if plotly is not installed."""
    figures = report_figures(data)
    parts = sections(data, figures)
    links = "".join(f'<li><a href="#{part.name}">{escape(part.title)}</a></li>' for part in parts)
    body = "".join(
        f'<section id="{part.name}" aria-labelledby="{part.name}-title"><h2 id="{part.name}-title">'
        f"{escape(part.title)}</h2>{part.body}</section>"
        for part in parts
    )
    measured = "Accuracies are" if data.quality.is_accuracy else f"Values of {data.quality.name} are"
    return _page(
        f"{data.info.space} on {data.info.workload}: {data.headline}",
        f"""<header>{header(data)}</header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main id="main" tabindex="-1">{body}</main>""",
        f"{measured} of the validation split unless said otherwise.",
        figures,
        f'<script type="application/json" id="table">{_json(trial_table(data))}</script>\n',
    )


def figure_html(title: str, figure: Figure) -> str:
    """Return a page with one plot; UserError if plotly is not installed."""
    body = f"""<header><h1>{escape(title)}</h1></header>
<main id="main" tabindex="-1">{picture(figure)}</main>"""
    return _page(title, body, "", {figure.name: figure}, "")


def _page(title: str, body: str, note: str, figures: Mapping[str, Figure], data: str) -> str:
    """Return a page as HTML.

    The content security policy lets a browser run only the page's two scripts, identified by their hashes, and load
    nothing. Plotly is embedded as text and runs only after the page has been shown.

    Args:
        title: as text.
        body: its HTML, with a main element ``main``.
        note: a sentence of the footer.
        figures: its plots, by name.
        data: further script elements that its script reads.
    """
    plotly, script = _plotly(), _asset("page.js")
    colours = {
        "light": {**LIGHT, "depth": list(DEPTH_LIGHT)},
        "dark": {**DARK, "depth": list(DEPTH_DARK)},
    }
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(script, plotly)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_variables()}
{_asset("page.css")}
</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
{body}
<footer><p>Made by tune_cac. {escape(note)}</p></footer>
<script type="application/json" id="figures">{_json({n: f.to_dict() for n, f in figures.items()})}</script>
{data}<script type="application/json" id="colours">{_json(colours)}</script>
<script>{script}</script>
<script type="text/plain" id="plotly">{plotly}</script>
</body>
</html>
"""


def _json(values: Any) -> str:
    """Return values as JSON that can be embedded in a script element: it neither ends it nor begins a comment."""
    text = json.dumps(plain(values), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _asset(name: str) -> str:
    return files("analysis.presentation.html").joinpath(name).read_text(encoding="utf-8").strip()


@cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the report's plots need plotly, which is not installed: pip install plotly") from None
    # Hint for V8 to compile all functions at once instead of each twice: 10 % less CPU time until the first plot.
    text = "//# allFunctionsCalledOnLoad\n" + str(get_plotlyjs())
    # Only these texts could end the script element or hide its end. In JavaScript they occur only in strings and
    # regular expressions, where the backslash changes nothing.
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _variables() -> str:
    def block(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    return f":root{{{block(LIGHT)}}}\n@media (prefers-color-scheme: dark){{:root{{{block(DARK)}}}}}"
