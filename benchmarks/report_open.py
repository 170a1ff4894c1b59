"""How long the report takes to open in Chromium, and to be made, by the number of trials.

    python benchmarks/report_open.py

Invented studies with all sections (tests/support/report_data.py). Each repeat opens the file in a new context of a
running browser, window 1200x900. Seconds from the start of the navigation: to the first picture on the screen, to the
filled table, to the first plot drawn, after which the page waits for its reader; CPU seconds that the page's thread
used until then, which say what a busy machine hides; and how long sorting the table by a click takes until the next
frame.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from pathlib import Path

from machine import header, spread

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from browser import ARGUMENTS, chromium_path
from playwright.sync_api import Browser, sync_playwright
from report_data import report_data

from analysis.presentation.html import report_html

TRIALS = (100, 1_000, 10_000)
REPEATS = 10
MOMENTS = {
    "paint": "first picture",
    "table": "filled table",
    "plot": "first plot",
    "cpu": "CPU until then",
    "sort": "a sort",
}
#: Notes when the first plot is drawn.
_NOTE = """
new MutationObserver(() => { window.drawnAt ??= performance.now(); })
    .observe(document, { subtree: true, attributeFilter: ["data-drawn"] });
"""
_TIMES = """async () => {
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    const begun = performance.now();
    [...document.querySelectorAll("#trials-table thead button")].find((b) => b.textContent === "saved %").click();
    await frame();
    return {
        paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
        table: performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd,
        plot: window.drawnAt,
        sort: performance.now() - begun,
    };
}"""


def open_once(browser: Browser, file: Path) -> dict[str, float]:
    """Seconds to each moment."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.add_init_script(_NOTE)
    tools = context.new_cdp_session(page)
    tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(file.as_uri(), wait_until="commit")
    page.wait_for_selector("#plot-pareto[data-drawn]", state="attached")
    used = {metric["name"]: metric["value"] for metric in tools.send("Performance.getMetrics")["metrics"]}
    times: dict[str, float] = page.evaluate(_TIMES)
    context.close()
    return {name: milliseconds / 1000 for name, milliseconds in times.items()} | {"cpu": used["ThreadTime"]}


def main() -> None:
    """Print the table."""
    path = chromium_path()
    if path is None:
        sys.exit("this benchmark needs Chromium: install it or set CHROMIUM to its path")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        print(header("benchmarks/report_open.py"), f"| Chromium {browser.version}, {platform.system()}")
        for trials in TRIALS:
            data = report_data(trials)
            report_html(report_data(3))  # Plotly's text is read once a process
            begun = time.perf_counter()
            html = report_html(data)
            made_s = time.perf_counter() - begun
            file = Path(folder) / f"{trials}.html"
            file.write_text(html, encoding="utf-8")
            open_once(browser, file)
            found = [open_once(browser, file) for _ in range(REPEATS)]
            print(f"\n{trials} trials: {len(html.encode()) / 1e6:.1f} MB, made in {made_s:.2f} s")
            for name, what in MOMENTS.items():
                print(f"  {what:<14} {spread([times[name] for times in found])} s")
        browser.close()


if __name__ == "__main__":
    main()
