"""The page in a browser: what it does, without a network, without complaints of the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gradient_rows import with_gradients
from playwright.sync_api import Browser, Locator, Page
from report_data import LAYERS, report_data, stages
from report_data import confirmation as confirmation_of

from analysis.presentation.figures.sensitivity import sensitivity
from analysis.presentation.html import ReportData, figure_html, report_html

pytestmark = pytest.mark.slow

Open = Callable[..., Page]


@cache
def usual() -> tuple[ReportData, str]:
    """A study and its page, made once."""
    data = report_data(60)
    return data, report_html(data)


@pytest.fixture
def open_page(chromium: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a report (the usual one by default); at the end none may have asked for anything or complained."""
    complaints: list[str] = []
    contexts = []

    def opened(data: ReportData | None = None, *, script: str = "", **options: Any) -> Page:
        file = tmp_path / f"report-{len(contexts)}.html"
        file.write_text(usual()[1] if data is None else report_html(data), encoding="utf-8")
        context = chromium.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda request: complaints.append(f"asked for {request.url}")
                if not request.url.startswith((file.as_uri(), "data:", "blob:")) else None)  # fmt: skip
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def unfold(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(element => { element.open = true; })")


def come_to(page: Page, mark: Locator) -> None:
    """Scroll to a mark, and wait until the page has heard of it, for that hides the tip."""
    mark.scroll_into_view_if_needed()
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_mark_shows_its_label_at_the_pointer_and_no_other_does(open_page: Open) -> None:
    page = open_page()
    tip = page.locator(".tip")
    assert not tip.is_visible()
    chosen = page.locator("#plot-pareto [data-label]").last
    come_to(page, chosen)
    chosen.hover()
    assert tip.inner_text().startswith(f"trial {usual()[0].best['trial']}")  # type: ignore[index]
    box = tip.bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= 1200 - box["width"]
    page.locator("h1").hover()
    assert not tip.is_visible()


@pytest.mark.thorough
def test_hollow_marks_and_thin_lines_are_met_and_the_tip_is_beside_the_pointer(open_page: Open) -> None:
    page = open_page(replace(with_gradients(9), confirmation=confirmation_of(report_data(12).ranking)))
    unfold(page)
    tip = page.locator(".tip")
    for mark in page.locator("#plot-layer_noise [data-label], #plot-confirmation [data-label]").all():
        come_to(page, mark)
        box = mark.bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        assert tip.inner_text() == mark.get_attribute("data-label")
        shown = tip.bounding_box()
        assert shown is not None
        assert 0 < y - shown["y"] - shown["height"] < 20
        assert abs(shown["x"] - x) < 20 or shown["x"] + shown["width"] > 1180
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    come_to(page, page.locator("#plot-gradient_noise path[data-label]").first)
    middle = """() => {
        const line = document.querySelector('#plot-gradient_noise path[data-label]');
        const p = line.getPointAtLength(line.getTotalLength() * 0.4).matrixTransform(line.getScreenCTM());
        return [p.x, p.y];
    }"""
    x, y = page.evaluate(middle)
    page.mouse.move(x, y + 3)
    assert tip.inner_text() == "SGD, smallest"
    page.mouse.wheel(0, 10)
    tip.wait_for(state="hidden")


@pytest.mark.thorough
def test_a_legend_of_long_names_is_inside_the_picture(chromium: Browser, tmp_path: Path) -> None:
    names = [f"bert.encoder.layer.{n}.attention.self.query.weight" for n in range(8)]
    figure = sensitivity({name: [(0.0, 0.9), (0.5, 0.8)] for name in names}, allowed_drop=0.01)
    (file := tmp_path / "page.html").write_text(figure_html("long", figure), encoding="utf-8")
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    ends = page.evaluate("[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().right)")
    assert max(ends) < page.evaluate("document.querySelector('svg').getBoundingClientRect().right")
    page.close()


def test_a_link_unfolds_its_section(open_page: Open) -> None:
    page = open_page()
    table = page.locator("#trials .scroll")
    assert not table.is_visible()
    page.get_by_role("navigation").get_by_role("link", name="Ranking").click()
    table.wait_for(state="visible")
    assert page.locator("#stops details[open]").count() == 0
    assert page.locator("#plot-pareto").evaluate("e => e.getBoundingClientRect().top + scrollY") < 900


def test_all_by_keyboard(open_page: Open) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.wait_for_selector("#settings-text")
    focused = "document.activeElement.id || document.activeElement.textContent.trim()"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the report"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate(focused) == "copy":
            break
    assert page.evaluate(focused) == "copy"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('copied').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == usual()[0].best_env


def test_a_phone_never_scrolls_sideways(open_page: Open) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, color_scheme="dark", has_touch=True, is_mobile=True)
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wide = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, .plot, .skip'))"
        ".filter(e => e.getBoundingClientRect().right > 361).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    box = page.locator("#trials .scroll")
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")  # the table scrolls in its own box


def colour_of(page: Page, selector: str, name: str) -> str:
    return str(page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{name}"))


@pytest.mark.thorough
def test_the_scheme_of_the_reader_and_its_change_reach_page_and_plots(open_page: Open) -> None:
    page = open_page(color_scheme="light")
    unfold(page)
    light = (colour_of(page, "body", "backgroundColor"), colour_of(page, "#plot-pareto text", "fill"))
    assert light[0] == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    dark = (colour_of(page, "body", "backgroundColor"), colour_of(page, "#plot-pareto text", "fill"))
    assert dark[0] == "rgb(19, 23, 28)"
    assert light[1] != dark[1]


@pytest.mark.thorough
def test_no_text_of_a_study_runs(open_page: Open) -> None:
    probes = (
        "</script><script>window.ran=1</script>", "<img src=x onerror=window.ran=1>", "<svg onload=window.ran=1>",
        '"><b onmouseover=window.ran=1>', '<a href="javascript:window.ran=1">click</a>', "@text $x$",
    )  # fmt: skip
    probe = " ".join(probes)
    data = report_data(30)
    assert data.controls is not None
    trials, ranking = data.trials.copy(), data.ranking.copy()
    trials.loc[trials["status"] == "failed", "error"] = probe
    trials["CAC_WATCH"] = probe
    trials.loc[3, "CAC_WATCH"] = "another"
    for frame in (trials, ranking):
        frame["stop_events"] = frame["stop_events"].str.replace(LAYERS[0], probe.replace('"', r"\""))
    page = open_page(
        replace(
            data, trials=trials, ranking=ranking, best=ranking.iloc[0], headline=probe, best_env=probe,
            info=replace(data.info, space=probe, versions={probe: probe}), environment={"machine": probe},
            controls=data.controls.assign(control="shorter " + probe),
            stages=stages(probe),
        )
    )  # fmt: skip
    unfold(page)
    assert page.locator("h1").inner_text().split() == probe.split()
    for plot in ("pareto", "timeline", "tree"):
        come_to(page, mark := page.locator(f"#plot-{plot} [data-label]").last)
        mark.hover()
    assert probe.split()[0] in page.locator(".tip").inner_text()
    assert "<script" in page.locator("#plot-tree").text_content()
    assert page.evaluate("window.ran") is None
    assert page.locator("main a, main img[src=x], .plot a, b").count() == 0
