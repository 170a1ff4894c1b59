"""The page as text: one file, nothing of a study is markup, sections come and go with what is known."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from report_data import report_data

from analysis.presentation.html import page, report_html
from analysis.presentation.html.page import first_sentence, trial_table
from trainables.errors import UserError


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


def test_nothing_is_loaded_from_elsewhere() -> None:
    for tag, attrs in read().tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attrs.get(name, "")
            assert value.startswith(("#", "data:")) or not value, (tag, name, value)
    style = full()[full().index("<style>") : full().index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_allows_the_two_scripts_by_their_content_alone() -> None:
    policy = next(a["content"] for a in read().all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    there = {
        base64.b64encode(hashlib.sha256(read().scripts[name].encode()).digest()).decode() for name in ("code", "plotly")
    }
    assert allowed == there
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
        "Settings to use", "Compute saved against accuracy", "Confirmation on fresh seeds", "When layers stopped",
        "Why they stopped", "Training", "What mattered", "The search", "Stage tree", "All trials", "Failed trials",
        "Environment",
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
    assert len(plots) == 10
    assert all(attrs["role"] == "img" and len(attrs["aria-label"]) > 30 for attrs in plots)
    assert all(attrs["alt"] for attrs in found.all("img"))


def test_plotly_is_there_once_and_every_plot_has_its_figure() -> None:
    assert full().count("plotly.js v") == 1
    figures = json.loads(read().scripts["figures"])
    assert {a["data-figure"] for a in read().all("div") if "data-figure" in a} == set(figures)
    for name, figure in figures.items():
        assert figure["data"], name
        assert figure["layout"]["xaxis"]["title"]["text"], name


def test_what_is_not_known_has_no_section_or_one_line() -> None:
    bare = replace(
        report_data(12), history=None, importance=None, controls=None, confirmation=None,
        variance=None, stops=None, thresholds=None, stages=None, environment={},
    )  # fmt: skip
    html = report_html(bare)
    titles = [text for level, text in Reader(html).headings if level == "h2"]
    assert titles == [
        "Settings to use", "Compute saved against accuracy", "Confirmation on fresh seeds", "When layers stopped",
        "The search", "All trials", "Failed trials", "Environment",
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


def test_a_study_of_an_earlier_version_lacks_columns() -> None:
    data = report_data(12)
    gone = ["search_flops", "backward_saved", "time_saved", "test_accuracy", "stage", "stop_events", "control"]
    trials = data.trials.drop(columns=[c for c in gone if c in data.trials])
    ranking = data.ranking.drop(columns=[c for c in gone if c in data.ranking])
    html = report_html(replace(data, trials=trials, ranking=ranking, best=ranking.iloc[0]))
    assert "No ranked trial stopped a layer" in html


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
    assert probe in json.loads(found.scripts["table"])["rows"][7]


def test_no_plotly_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    page._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"needs? plotly, which is not installed: pip install"):
        report_html(report_data(3))


@pytest.mark.slow
def test_importing_loads_no_plotter_and_nothing_that_trains() -> None:
    code = "import sys, analysis.presentation.html; print(' '.join(sorted(m.split('.')[0] for m in sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"plotly", "matplotlib", "torch", "ray", "scipy", "sklearn", "optuna", "tune_cac"} & set(loaded)


def test_what_the_page_is_made_of_is_installed_with_the_package() -> None:
    text = (Path(page.__file__).parents[3] / "pyproject.toml").read_text()
    assert '"*.css"' in text, "package-data of analysis.presentation.html in pyproject.toml lacks *.css"
    assert '"*.js"' in text, "package-data of analysis.presentation.html in pyproject.toml lacks *.js"


class TestTable:
    def test_values_are_those_of_the_trials_in_percent(self) -> None:
        data = report_data(30)
        table = trial_table(data)
        keys = [column["key"] for column in table["columns"]]
        assert keys[:4] == ["trial", "rank", "role", "status"]
        assert len(table["rows"]) == 30
        by_trial = {row[0]: dict(zip(keys, row, strict=True)) for row in table["rows"]}
        for _, row in data.ranking.iterrows():
            shown = by_trial[row["trial"]]
            assert shown["rank"] == row["rank"]
            assert shown["compute_saved"] == pytest.approx(100 * row["compute_saved"])
            assert shown["accuracy_drop"] == pytest.approx(100 * row["accuracy_drop"], abs=1e-6)
            if row["role"] != "baseline":
                assert shown["CAC_VAR_START_THR"] == pytest.approx(row["CAC_VAR_START_THR"])

    def test_who_beats_training_shorter_is_a_column(self) -> None:
        data = report_data(20)
        trials = data.trials.copy()
        trials["control"] = pd.Series([None] * len(trials), dtype="string")
        control = trials.iloc[[0]].assign(trial=20, role="control", control="shorter", compute_saved=0.9, accuracy=0.5)
        table = trial_table(replace(data, trials=pd.concat([trials, control], ignore_index=True)))
        place = [column["key"] for column in table["columns"]].index("beats_shorter")
        assert table["rows"][1][place] == "yes"
        assert table["rows"][20][2] == "control: cut dense run"
