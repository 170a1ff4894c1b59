"""The sections of the page as HTML. All text from a study is escaped with `escape`."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from analysis.formatting import ROUNDING, percent, plural
from analysis.io.checked import number_of
from analysis.metrics.accounting import search_cost
from analysis.metrics.baseline import baseline_of
from analysis.metrics.confirmation import compared, of_trial, saved_again
from analysis.metrics.saving import saved_of_one
from analysis.presentation.compression_text import without_files
from analysis.presentation.figures.figure import Figure
from analysis.presentation.figures.plain_columns import is_one_of, texts
from analysis.presentation.figures.report_data import ReportData
from analysis.presentation.html.elements import facts, none, picture, pictures, scrollable, small_table
from analysis.presentation.html.gradient_sections import clusters, gradients
from analysis.presentation.html.picture_section import sample_pictures
from analysis.presentation.ranked_table import stop_table
from analysis.presentation.recipe_text import RECIPE_NOTE, recipe_table
from analysis.presentation.schedule_text import compresses
from analysis.presentation.sparsity_text import is_compressed, layers, sums
from analysis.presentation.summary_text import TREE_CAPTION, compression_of, config_of, is_answer
from analysis.quality_words import allowed_text, drop_number, drop_text, drop_unit, drop_words, value_with_unit
from trainables.quality import ACCURACY, Quality
from trainables.savings import BOTH, TIME, TRAINING

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
        ("tree", "Stage tree", _tree(data)),
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
    drawn = pictures(figures, "importance", "interactions")
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


def _tree(data: ReportData) -> str:
    """Return the stage tree as an image: no script in it can run, and its ids and styles are isolated from the page."""
    if not data.tree_svg:
        return ""
    svg = base64.b64encode(data.tree_svg.encode()).decode()
    size = re.match(r"<svg[^>]*?\bwidth=\"(\d+)[^>]*?\bheight=\"(\d+)", data.tree_svg)
    measures = f' width="{size[1]}" height="{size[2]}"' if size else ""
    image = (
        f'<img alt="Stage tree of the search: training shared between trials"{measures} '
        f'src="data:image/svg+xml;base64,{svg}">'
    )
    return f"<p>{TREE_CAPTION}</p>" + scrollable("stage tree", image, kind="scroll paper")


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
