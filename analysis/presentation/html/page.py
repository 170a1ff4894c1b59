"""The report, or one plot, as one HTML file that needs no network and no other file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from analysis.presentation.figures.figure import Figure
from analysis.presentation.figures.palette import DARK, DEPTH_DARK, DEPTH_LIGHT, LIGHT
from analysis.presentation.figures.plain_columns import plain
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.figures.report_figures import report_figures
from analysis.presentation.html.elements import picture
from analysis.presentation.html.sections import header, sections
from analysis.presentation.html.trial_table import trial_table
from trainables.errors import UserError


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
