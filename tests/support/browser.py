"""A headless Chromium for tests of pages. Where there is none they are skipped, and the run's last line says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: Why a test of a page is skipped, and what to do about it (`conftest.pytest_terminal_summary`).
LACKING = "needs Chromium: install it (apt-get install chromium) or set CHROMIUM to its path"
#: Names under which it is installed; the variable CHROMIUM wins.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Nothing but the page talks: no sandbox (containers), no GPU, no updates, no services of its own.
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


def chromium_path() -> str | None:
    """Where Chromium is, None if it is not installed."""
    given = os.environ.get("CHROMIUM")
    if given:
        return given if Path(given).exists() else None
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def required_chromium() -> str:
    """Where Chromium is; the test that asks is skipped if it is nowhere."""
    path = chromium_path()
    if path is None:
        pytest.skip(LACKING)
    return path


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for the whole session; a test opens its own context in it."""
    path = required_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()
