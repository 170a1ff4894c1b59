"""Make the README's picture and print what its first command prints: `python docs/first_search.py`, about a minute.

The picture is a plot of the page in headless Chromium. One trial at a time, so that the same versions give the same
trials.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "pareto.png"
SEARCH = ("search", "--space", "auto_thresholds", "--concurrency", "1", "--name", "first")


def tune_cac(folder: Path, *arguments: str) -> str:
    """Run a command in a folder; return what it prints."""
    command = [sys.executable, "-m", "tune_cac", *arguments]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(tune_cac(folder, *SEARCH))
        print((folder / "results" / "first" / "best.env").read_text("utf-8"))
        tune_cac(folder, "report", "first")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"))
            page = browser.new_page(viewport={"width": 860, "height": 900}, device_scale_factor=2)
            page.goto((folder / "results" / "first" / "report.html").as_uri())
            page.locator("#plot-pareto").scroll_into_view_if_needed()  # only then is it drawn
            page.locator("#plot-pareto .main-svg").first.wait_for()
            page.locator("#plot-pareto").screenshot(path=PICTURE)
            browser.close()
