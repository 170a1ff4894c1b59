"""The page as text: one file, nothing of a study is markup, sections come and go with what is known."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from functools import cache
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from compressed import SENSITIVITIES, pruned, write_compressed
from gradient_rows import with_gradients
from report_data import report_data

from analysis.metrics.ranking import SHORTER
from analysis.presentation.figures.figure import Points
from analysis.presentation.figures.outcomes import confirmation, pareto
from analysis.presentation.html import ReportData, report_html
from analysis.presentation.html.page import clusters, first_sentence
from tune_cac.cli.report import gather
from tune_cac.study.study_result import answer


@cache
def full() -> str:
    return report_html(report_data(40))


class Reader(HTMLParser):
    """Tags with their attributes, texts of headings, contents of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.headings: list[tuple[str, str]] = []
        self.scripts: dict[str, str] = {}
        self._inside, self._script = "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        self._inside = tag
        self._script = values.get("id", "code") if tag == "script" else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if re.fullmatch(r"h[1-6]", self._inside):
            self.headings.append((self._inside, data))
        if self._inside == "script":
            self.scripts[self._script] = self.scripts.get(self._script, "") + data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]


@cache
def read() -> Reader:
    return Reader(full())


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere() -> None:
    for tag, attrs in read().tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attrs.get(name, "")
            assert value.startswith(("#", "data:")) or not value, (tag, name, value)
    style = full()[full().index("<style>") : full().index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_allows_the_script_by_its_content_alone() -> None:
    policy = next(a["content"] for a in read().all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    (allowed,) = re.findall(r"'sha256-([^']+)'", policy)
    assert allowed == base64.b64encode(hashlib.sha256(read().scripts["code"].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_the_answer_comes_first_and_headings_go_down_one_level_at_a_time() -> None:
    headings = read().headings
    answer, caveats = first_sentence(report_data(40).headline)
    assert headings[0] == ("h1", answer)
    assert caveats
    assert f'<p class="caveats">{escape(caveats)}</p>' in full()
    assert [level for level, _ in headings].count("h1") == 1
    levels = [int(level[1]) for level, _ in headings]
    assert all(b <= a + 1 for a, b in pairwise(levels))
    titles = [text for level, text in headings if level == "h2"]
    assert titles == [
        "Compute saved against accuracy", "Settings to use", "Confirmation on fresh seeds", "When layers stopped",
        "Stage tree", "Ranking", "Failed trials", "Environment",
    ]  # fmt: skip


def test_landmarks_names_and_anchors() -> None:
    found = read()
    assert [len(found.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    ids = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for attrs in found.all("a"):
        assert attrs["href"].removeprefix("#") in ids
    for _, attrs in found.tags:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert attrs.get(name) in (None, *ids)
    plots = [attrs for attrs in found.all("div") if attrs.get("class") == "plot"]
    assert len(plots) == 4
    assert all(attrs["role"] == "img" and len(attrs["aria-label"]) > 30 for attrs in plots)
    assert all(attrs["alt"] for attrs in found.all("img"))


def test_the_page_is_small_and_its_plots_are_in_the_colours_of_the_page() -> None:
    assert len(full()) < 300_000
    drawn = re.findall(r"<svg.*?</svg>", full(), re.DOTALL)
    assert len(drawn) == 4
    for svg in drawn:
        assert set(re.findall(r"stroke: (#\w+)", svg)) == set()
        assert "var(--text)" in svg
    (tree,) = [svg for svg in drawn if "116.0: stop through conv1.weight" in svg]
    assert "color-mix(in srgb,var(--depth4) 100%,var(--depth3))" in tree


@pytest.mark.slow
@pytest.mark.thorough
def test_what_is_not_known_has_no_section_or_one_line() -> None:
    bare = replace(
        report_data(12), controls=None, confirmation=None, stages=None, environment={},
    )  # fmt: skip
    html = report_html(bare)
    titles = [text for level, text in Reader(html).headings if level == "h2"]
    assert titles == [
        "Compute saved against accuracy", "Settings to use", "Confirmation on fresh seeds", "When layers stopped",
        "Ranking", "Failed trials", "Environment",
    ]  # fmt: skip
    assert "Nothing is confirmed" in html
    assert "No controls were trained" in html


def test_a_running_search_is_said_to_run() -> None:
    data = report_data(9)
    trials = data.trials.copy()
    trials.loc[trials.index[-2:], "status"] = "running"
    assert "The search is running (2 trials are training)" in report_html(
        replace(data, trials=trials, status="running")
    )
    assert "The search is running" not in full()


def test_text_of_a_study_is_never_markup() -> None:
    probe = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--"
    data = report_data(20)
    trials = data.trials.copy()
    trials.loc[trials["status"] == "failed", "error"] = probe
    info = replace(data.info, space=probe, workload=probe, versions={probe: probe}, hold={probe: probe})
    html = report_html(
        replace(data, trials=trials, info=info, headline=probe, cost_line=probe, best_env=probe,
                environment={probe: probe})
    )  # fmt: skip
    assert probe not in html
    found = Reader(html)
    assert len(found.all("script")) == len(read().all("script"))
    assert not [a for a in found.all("img") if not a.get("src", "").startswith("data:")]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert escape(probe) in html


def cells(html: str) -> list[list[str]]:
    """Contents of a table's rows."""
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)[1:]]


def table_of(html: str, caption: str) -> list[list[str]]:
    """Contents of the rows of the table with this caption."""
    (found,) = re.findall(rf"<caption>{caption}</caption>(.*?)</table>", html, flags=re.DOTALL)
    return cells(found)


# --- a study that compresses ----------------------------------------------------------------------------------------

#: Accuracy, compute saved at inference and in training.
TRIALS = [
    (0.968, 0.5, 0.1), (0.966, 0.7, 0.0), (0.95, 0.9, 0.2), (0.969, 0.2, 0.3), (0.967, 0.6, 0.0),
]  # fmt: skip


def page_data(folder: Path, *, saving: str = "inference", **config: Any) -> ReportData:
    """A study as the command report gathers it, with a shorter training that is no rival."""
    shorter = pruned(0.97, 0.0, 0.5, saving=saving, method="none") | {"role": "control", "control": SHORTER}
    trials = [
        pruned(*outcome, saving=saving, **(config or {"pruning_sensitivities": SENSITIVITIES}), threads=place)
        for place, outcome in enumerate(TRIALS, start=1)
    ]
    layout = write_compressed(folder, [*trials, shorter], saving=saving)
    return gather(layout, answer(layout, allowed_drop=0.005))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    return page_data(tmp_path_factory.mktemp("page") / "s")


def test_sums_and_layers_of_the_best(data: ReportData) -> None:
    html = report_html(data)
    assert table_of(html, "Sparsity by layer of the chosen trial 2") == [
        ["conv1.weight", "40.0 %"], ["conv2.weight", "20.0 %"], ["fc.weight", "0.0 %"],
    ]  # fmt: skip
    assert "<dt>MACs of the weights that are not zero</dt><dd>300,000</dd>" in html
    assert data.best is not None
    unmeasured = data.best.copy()
    unmeasured["layer_sparsity"] = "{}"
    assert "Sparsity by layer" not in report_html(replace(data, best=unmeasured))


@pytest.mark.slow
@pytest.mark.thorough
def test_pictures_are_drawn_over_what_the_study_ranks_by(data: ReportData) -> None:
    found = pareto(data)
    assert found is not None
    traces = {trace.name: trace for trace in found.traces if isinstance(trace, Points)}
    assert found.alt.startswith("Inference compute saved against validation accuracy of 5 searched trials.")
    assert sorted(zip(traces["trials"].x, traces["trials"].y, strict=True)) == sorted(
        (100 * inference, pytest.approx(100 * accuracy)) for accuracy, inference, _ in TRIALS
    )
    assert (traces["chosen"].x, traces["Pareto front"].x) == ([70], [0, 20, 50, 60, 70, 90])
    assert "cut dense runs" not in traces  # rivals of training compute alone
    assert "inference compute saved 70.0 %" in traces["chosen"].labels[0]
    frame = pd.DataFrame(
        {"candidate": [2], "seeds": [5], "compute_saved": [0.1], "saved": [0.66], "accuracy_drop": [0.001],
         "drop_low": [-0.002], "drop_high": [0.004], "drop_worst": [0.003], "confidence": [0.95], "confirmed": [True]}
    )  # fmt: skip
    retrained = replace(data, confirmation=frame)
    drawn = confirmation(retrained)
    assert drawn is not None
    assert "inference compute saved 66.0 %" in drawn.traces[0].labels[0]
    html = report_html(retrained)
    assert table_of(html, "Candidates retrained on fresh seeds")[0][2] == "66.0 %"
    assert found.x.title == "inference compute saved (%)"


def test_the_ranking_has_what_its_saving_consists_of(data: ReportData) -> None:
    html = report_html(data)
    headings = re.findall(
        r"<th [^>]*>(.*?)</th>", html[html.index("<caption>The completed trials") :].split("</tr>")[0]
    )
    assert {"rank", "trial", "saved", "sparsity", "MACs", "test acc."} < set(headings)
    assert "beats cut dense run" not in headings
    rows = table_of(html, "The completed trials, best first")
    saved = {row[headings.index("trial")]: row[headings.index("saved")] for row in rows}
    expected = {str(trial): f"{100 * inference:.1f} %" for trial, (_, inference, _) in enumerate(TRIALS, start=1)}
    assert saved == expected | {"0 (baseline)": "0.0 %"}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_schedule_that_prunes_nothing_is_not_said_to_compress(tmp_path: Path) -> None:
    assert "compresses:" not in report_html(page_data(tmp_path / "s", pruning_sensitivities=("a.weight=0",)))


# --- statistics and clusters of gradients -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_the_page_explains_and_shows_statistics_and_clusters() -> None:
    page = report_html(with_gradients())
    for name in ("gradient_noise", "gradient_variance", "layer_noise"):
        (tag,) = re.findall(rf'<div class="plot" id="plot-{name}"[^>]*>', page)
        assert re.search(r'role="img" aria-label="[^"]{30,}"', tag)
    assert "Normalised variance is V[g] / E[g²]" in page
    assert "near 1 the gradient is noise" in page
    assert "What measuring costs is counted in the trials&#x27; compute." in page


def test_the_table_has_size_share_spread_and_examples() -> None:
    section = clusters(with_gradients())
    assert cells(section) == [
        ["1", "6", "60.0 %", "2.5", "4, 0"], ["2", "3", "30.0 %", "1265", "11"], ["3", "1", "10.0 %", "0", "2"],
    ]  # fmt: skip
