"""The report, or one plot, as one HTML file that needs no network and no other file. All text is escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import pandas as pd

from analysis.formatting import allowed_text, drop_words, percent, plural
from analysis.metrics.ranking import beats_shorter, control_line
from analysis.metrics.saving import saved_of_one
from analysis.presentation.figures.drawing import svg_of
from analysis.presentation.figures.figure import Figure, is_one_of, texts
from analysis.presentation.figures.gradient_noise import shown_trial
from analysis.presentation.figures.palette import DARK, LIGHT
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.report_figures import report_figures
from analysis.presentation.markdown_report import (
    beside_answer,
    confirmation_table,
    control_cells,
    is_compressed,
    layers,
    ranked_table,
    stop_table,
    sums,
)
from analysis.presentation.settings_text import compresses, without_files
from analysis.presentation.summary_text import TREE_CAPTION, compression_of, config_of, is_answer
from trainables.savings import TRAINING

#: Most rows that are listed of clusters, of failed trials and of the ranking.
_MOST_CLUSTERS, _MOST_FAILURES, _MOST_RANKED = 30, 200, 200


class Markup(str):
    """A table's cell that is HTML already."""

    __slots__ = ()


def _paragraph(text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>"


def _picture(figure: Figure) -> str:
    """Return a plot with its caption."""
    notes = " ".join(escape(note) for note in figure.notes)
    caption = f"<figcaption>{notes}</figcaption>" if notes else ""
    return (
        f'<figure><div class="plot" id="plot-{figure.name}" role="img" aria-label="{escape(figure.alt)}" tabindex="0">'
        f"{svg_of(figure)}</div>{caption}</figure>"
    )


def _pictures(figures: Mapping[str, Figure], *names: str) -> str:
    return "".join(_picture(figures[name]) for name in names if name in figures)


def _facts(cells: Iterable[tuple[str, str]]) -> str:
    """Return a description list from names and values; empty without any."""
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in cells)
    return f'<dl class="facts">{shown}</dl>' if shown else ""


def _table(caption: str, cells: Sequence[Sequence[str]], *, numeric: Sequence[int] = ()) -> str:
    """Return a table, header first, in its own box that scrolls, also by keyboard; cells are text, or `Markup`."""
    kinds = [' class="number"' if place in numeric else "" for place in range(len(cells[0]))]

    def row(values: Sequence[str], tag: str) -> str:
        name = tag.partition(" ")[0]
        shown = (value if isinstance(value, Markup) else escape(value) for value in values)
        return "".join(f"<{tag}{kind}>{value}</{name}>" for value, kind in zip(shown, kinds, strict=True))

    head = row(cells[0], 'th scope="col"')
    body = "".join(f"<tr>{row(values, 'td')}</tr>" for values in cells[1:])
    inner = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}"><table>{inner}</table></div>'


def _header(data: ReportData) -> str:
    info, quality = data.info, data.quality
    counts = data.trials["status"].value_counts()
    told = ", ".join(f"{n} {status}" for status, n in counts.items()) or "none"
    running = ""
    if data.status == "running":
        count = int(counts.get("running", 0))
        what = f"{plural(count, 'trial')} {'is' if count == 1 else 'are'} training" if count else "more is to come"
        running = _paragraph(
            f"The search is running ({what}): this is what it had found when the report was made.", "running"
        )
    answer, caveats = first_sentence(data.headline)
    beside = ""
    if data.best is not None and saved_of_one(data.best) > 0:
        beside = _paragraph(beside_answer(data.best, data.ranking, data.confirmation))
    length = (
        f"{info.length_text}, seed {info.seed}; allowed {drop_words(quality)} "
        f"{allowed_text(data.allowed_drop, quality)}; trials: {told}."
    )
    return (
        f"{_paragraph(f'{info.space} on {info.workload}', 'study')}<h1>{escape(answer)}</h1>"
        f"{_paragraph(caveats, 'caveats') if caveats else ''}{running}{_paragraph(data.cost_line, 'cost')}"
        f"{beside}{_paragraph(length, 'faint')}"
    )


def first_sentence(text: str) -> tuple[str, str]:
    """Split a text into its first sentence and the rest.

    >>> first_sentence("Freeze all up to a.b: saves 3.1 %, 0.50 points allowed. That is so. So be it.")
    ('Freeze all up to a.b: saves 3.1 %, 0.50 points allowed.', 'That is so. So be it.')
    """
    first, *others = re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)
    return first, "".join(others)


def _sections(data: ReportData, figures: Mapping[str, Figure]) -> list[tuple[str, str, str]]:
    """Return anchor, heading and HTML of all sections that are not empty, in the order of the page."""
    made = [
        ("trade-off", f"{data.saved_words.capitalize()} against {data.quality.name}",
         _pictures(figures, "pareto") + _controls(data)),
        ("settings", "Settings to use", _settings(data)),
        ("confirmation", "Confirmation on fresh seeds", _confirmation(data, figures)),
        ("sparsity", "What is zero", _sparsity(data)),
        ("stops", "When layers stopped", _stops(data, figures)),
        ("gradients", "Noise of the gradients", _gradients(figures)),
        ("clusters", "Samples with similar gradients", clusters(data)),
        ("tree", "Stage tree", f"<p>{TREE_CAPTION}</p>{_picture(figures['tree'])}" if "tree" in figures else ""),
        ("trials", "Ranking", _ranking(data)),
        ("failed", "Failed trials", _failed(data.trials)),
        ("environment", "Environment", _environment(data)),
    ]  # fmt: skip
    return [section for section in made if section[2]]


def _settings(data: ReportData) -> str:
    best, how = data.best, ""
    if best is not None and is_answer(best):
        compressed = is_compressed(best) and compresses(config_of(best))
        if str(best["method"]) == "recipe":
            how = "<p>No variable sets this; the lines, also in <code>best.env</code>, say how to train so.</p>"
        elif compressed:
            how = (
                f"<p>Trial {escape(str(best['trial']))} compresses: {escape(compression_of(best))}. The whole "
                "schedule, to train with, is in <code>best.yaml</code>; <code>python -m tune_cac export STUDY "
                "--as schedule</code> prints it.</p>"
            )
    elif data.info.method == "compression":
        how = "<p>No schedule tried is worth training with.</p>"
    if not how or "gradskip" in str(best["method"] if best is not None and is_answer(best) else ""):
        how += "<p>Paste these lines into a shell before training, or source <code>best.env</code>, which has them.</p>"
    return (
        f'{how}<div class="copy"><button type="button" id="copy" aria-describedby="copied">Copy settings</button>'
        '<span id="copied" role="status"></span></div>'
        f'<pre id="settings-text" tabindex="0" aria-label="settings">{escape(data.best_env.rstrip())}</pre>'
    )


def _controls(data: ReportData) -> str:
    if data.saving != TRAINING:
        return ""
    if cells := control_cells(control_line(data.trials)):
        return _table("Controls: what any setting has to beat", cells, numeric=(1, 2))
    return _paragraph(
        f"No controls were trained, so the {data.quality.name} of a dense run cut to the same compute is not known.",
        "none",
    )


def _confirmation(data: ReportData, figures: Mapping[str, Figure]) -> str:
    if data.confirmation is None or len(data.confirmation) == 0:
        return _paragraph(
            "Nothing is confirmed: python -m tune_cac confirm STUDY retrains the best settings, beside the "
            "baseline, on seeds that the search never saw.",
            "none",
        )
    cells = confirmation_table(data.confirmation, data.saved_words, data.allowed, data.quality)
    table = _table("Candidates retrained on fresh seeds", cells, numeric=range(7))
    return _pictures(figures, "confirmation") + table


def _sparsity(data: ReportData) -> str:
    """Return the section on the best trial's sparsity, in total and by layer; empty if it was not compressed."""
    best = data.best
    if best is None or not is_compressed(best):
        return ""
    found = _facts(sums(best))
    if rows := layers(best):
        caption = f"Sparsity by layer of the chosen trial {best['trial']}"
        found += _table(caption, [("layer", "sparsity"), *rows], numeric=(1,))
    return found


def _stops(data: ReportData, figures: Mapping[str, Figure]) -> str:
    methods = set(texts(data.ranking, "method"))
    if methods <= {"none", "recipe", "compression"} and "compression" in methods:
        return ""  # no layer could stop in this study
    drawn = _pictures(figures, "timeline") or _paragraph("No ranked trial stopped a layer.", "none")
    if data.best is None or len(cells := stop_table(data.best)) == 1:
        return drawn
    return drawn + _table(f"Stops of the chosen trial {data.best['trial']}", cells, numeric=(0, 1, 4))


def _gradients(figures: Mapping[str, Figure]) -> str:
    drawn = _pictures(figures, "gradient_noise", "gradient_variance")
    by_layer = _pictures(figures, "layer_noise")
    if not drawn and not by_layer:
        return ""
    text = _paragraph(
        "Normalised variance is V[g] / E[g²] of a gradient's elements, on average: at most about 1, and near 1 the "
        "gradient is noise. Average variance is the mean of V[g]. What measuring costs is counted in the trials' "
        "compute."
    )
    return text + drawn + (f"<h3>Layer by layer</h3>{by_layer}" if by_layer else "")


def clusters(data: ReportData) -> str:
    """Return the section on the clusters of samples with similar gradients; empty for studies without them."""
    trial = shown_trial(data, data.clusters)
    if trial is None or data.clusters is None:
        return ""
    found = data.clusters[data.clusters["trial"] == trial]
    cells = [["cluster", "samples", "share", "spread", "examples"]]
    for row in found.head(_MOST_CLUSTERS).to_dict("records"):
        examples = ", ".join(map(str, row["examples"]))
        cells.append(
            [str(row["cluster"] + 1), str(row["size"]), percent(row["share"]), _spread(row["spread"]), examples]
        )
    text = _paragraph(
        "Samples of a cluster have similar gradients. Spread is their mean squared distance from the cluster's centre, "
        "and examples are the numbers of the training samples nearest to it, the nearest first."
    )
    caption = f"{plural(len(found), 'cluster')} of trial {trial}, the largest first"
    return text + _table(caption, cells, numeric=(0, 1, 2, 3)) + _and_more(len(found) - _MOST_CLUSTERS, "cluster")


def _spread(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _and_more(count: int, noun: str) -> str:
    return _paragraph(f"and {plural(count, f'more {noun}')}", "none") if count > 0 else ""


def _ranking(data: ReportData) -> str:
    if len(data.ranking) == 0:
        return _paragraph("No trial has completed yet.", "none")
    cells = ranked_table(
        data.ranking, top=_MOST_RANKED, test=True, beats=beats_shorter(data.ranking, control_line(data.trials)),
        allowed_drop=data.allowed_drop,
    )  # fmt: skip
    words = ("trial", "within", "front", "than cut dense run", "configuration")
    numeric = [place for place, heading in enumerate(cells[0]) if heading not in words]
    table = _table("The completed trials, best first", cells, numeric=numeric)
    return table + _and_more(len(data.ranking) + 1 - len(cells), "trial")


def _failed(trials: pd.DataFrame) -> str:
    failed = trials[is_one_of(trials, "status", "failed")].head(_MOST_FAILURES)
    rows = "".join(
        f"<li>trial {trial}: <code>{escape(error or 'no reason known')}</code></li>"
        for trial, error in zip(failed["trial"], texts(failed, "error"), strict=True)
    )
    more = int(is_one_of(trials, "status", "failed").sum()) - _MOST_FAILURES
    return f"<ul>{rows}</ul>{_and_more(more, 'failed trial')}" if rows else ""


def _environment(data: ReportData) -> str:
    entries: dict[str, Any] = {**data.info.versions, **data.environment}
    if data.info.hold:
        held = without_files(data.info.hold)
        entries["fixed in every trial but the baseline"] = " ".join(f"{k}={v}" for k, v in held.items())
    found = _facts((str(name), str(value)) for name, value in entries.items())
    return found or _paragraph("Nothing is known of where this ran.", "none")


#: Sections that are not folded: the picture, and the settings.
OPEN = 2


def _section(name: str, title: str, inner: str, *, folded: bool) -> str:
    heading = f'<h2 id="{name}-title">{escape(title)}</h2>'
    shown = f"<details><summary>{heading}</summary>{inner}</details>" if folded else f"{heading}{inner}"
    return f'<section id="{name}" aria-labelledby="{name}-title">{shown}</section>'


def report_html(data: ReportData) -> str:
    """Return a study's whole report as HTML."""
    figures = report_figures(data)
    parts = _sections(data, figures)
    links = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in parts)
    body = "".join(_section(*part, folded=place >= OPEN) for place, part in enumerate(parts))
    measured = "Accuracies are" if data.quality.is_accuracy else f"Values of {data.quality.name} are"
    return _page(
        f"{data.info.space} on {data.info.workload}: {data.headline}",
        f"""<header>{_header(data)}</header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main id="main" tabindex="-1">{body}</main>""",
        f"{measured} of the validation split unless said otherwise.",
    )


def figure_html(title: str, figure: Figure) -> str:
    """Return a page with one plot."""
    body = f"""<header><h1>{escape(title)}</h1></header>
<main id="main" tabindex="-1">{_picture(figure)}</main>"""
    return _page(title, body, "")


def _page(title: str, body: str, note: str) -> str:
    """Return a page as HTML, given its title, the HTML of its body and a note for its footer.

    The content security policy lets a browser run only the page's own script, identified by its hash, and load nothing.
    """
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    light, dark = ("".join(f"--{name}:{value};" for name, value in scheme.items()) for scheme in (LIGHT, DARK))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
:root{{{light}}}
@media (prefers-color-scheme: dark){{:root{{{dark}}}}}
{_asset("page.css")}
</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
{body}
<footer><p>Made by tune_cac. {escape(note)}</p></footer>
<script>{script}</script>
</body>
</html>
"""


@cache
def _asset(name: str) -> str:
    return files("analysis.presentation.html").joinpath(name).read_text(encoding="utf-8").strip()
