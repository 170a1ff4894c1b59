"""The two speeds of the tests: what is slow is marked, and what was left out is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUSY = """
import time, pytest
def burn():
    end = time.process_time() + 4.6
    while time.process_time() < end:
        pass
def test_unmarked(): burn()
@pytest.mark.slow
def test_marked(): burn()
def test_quick(): time.sleep(0.1)
"""
PAGE = """
from browser import required_chromium
def test_page(): required_chromium()
def test_other(): pass
"""


def run_pytest(folder: Path, source: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests under the project's own conftest, whichever tests are running around it."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "conftest.py")
    (folder / "test_it.py").write_text(source, "utf-8")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests' / 'support'}\nmarkers = slow: slow\n")
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TUNE_CAC"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, "test_it.py"],
        cwd=folder,
        env={**given, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.thorough
@pytest.mark.slow
def test_a_long_test_must_be_marked(tmp_path: Path) -> None:
    found = run_pytest(tmp_path, BUSY)
    assert "1 failed, 2 passed" in found.stdout
    assert "must be marked slow" in found.stdout
    assert run_pytest(tmp_path, BUSY, "-m", "not slow").stdout.count("deselected") == 1
    assert run_pytest(tmp_path, BUSY, TUNE_CAC_NOTHING_LACKS="1").returncode == 0  # a busy machine decides nothing


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), pytest.param(("-n", "1"), marks=pytest.mark.thorough)])
@pytest.mark.thorough
def test_what_lacks_is_said_and_fails_in_ci(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    lacking = {"CHROMIUM": str(tmp_path / "nowhere")}
    found = run_pytest(tmp_path, PAGE, *arguments, **lacking)
    assert found.returncode == 0, found.stdout
    assert "NOT RUN: 1 tests of pages; needs Chromium: install it (apt-get install chromium)" in found.stdout
    assert run_pytest(tmp_path, PAGE, *arguments, **lacking, TUNE_CAC_NOTHING_LACKS="1").returncode == 1
    there = {"CHROMIUM": sys.executable, "TUNE_CAC_NOTHING_LACKS": "1"}
    assert run_pytest(tmp_path, PAGE, *arguments, **there).returncode == 0
