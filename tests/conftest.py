"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from browser import LACKING
from browser import chromium as chromium  # once: a second import would be a second browser, which playwright refuses
from commands_run import Run

# Timing never decides a test.
hypothesis.settings.register_profile("tune_cac", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tune_cac")


#: Files that start Ray again and again: they take longest.
_START_RAY = ("integration/", "e2e/test_commands_page.py", "trainables/stage_tree/test_coordinator.py")


#: The file that takes longest, as all cases of a file run one after the other.
_LONGEST = "trainables/test_contract.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes (pytest-xdist) begin with the longest file, then those with Ray: none is left over."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place(item.nodeid.removeprefix("tests/")))


def _place(name: str) -> int:
    return 0 if name.startswith(_LONGEST) else 1 if name.startswith(_START_RAY) else 2


#: Most seconds of CPU that a test without the mark ``slow`` may take: twice what CONTRIBUTING.md asks for, since the
#: same test takes twice as much on a loaded machine.
MOST_CPU_S = 4.0
#: Set in CI: there a test that was left out for something lacking is a failure, and one that takes long is none.
NOTHING_LACKS = "TUNE_CAC_NOTHING_LACKS"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes long and is not marked ``slow``, as `make check` runs all others; never in CI."""
    before_s = _cpu_s()
    yield
    spent_s = _cpu_s() - before_s
    if spent_s > MOST_CPU_S and item.get_closest_marker("slow") is None and not os.environ.get(NOTHING_LACKS):
        pytest.fail(
            f"took {spent_s:.1f} s of CPU, and a test that takes more than {MOST_CPU_S:g} s must be marked slow: make "
            "it cheaper, or mark it with @pytest.mark.slow",
            pytrace=False,
        )


def _cpu_s() -> float:
    """Seconds of CPU of this process and of those of its children that have ended."""
    return sum(os.times()[:4])


def _lacking(reporter: pytest.TerminalReporter) -> int:
    return sum(LACKING in str(report.longrepr) for report in reporter.stats.get("skipped", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which tests were left out for something that the machine lacks."""
    if count := _lacking(terminalreporter):
        terminalreporter.write_line(f"NOT RUN: {count} tests of pages; {LACKING}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, fail for tests that were left out for something that the machine lacks."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and os.environ.get(NOTHING_LACKS) and _lacking(reporter) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_cac_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the developer's own variables."""
    for name in [name for name in os.environ if name.startswith("CAC_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def tune_cac_command(tmp_path: Path) -> Run:
    """``python -m tune_cac ARGUMENTS`` in an empty folder, as a user runs it."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tune_cac", *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run
