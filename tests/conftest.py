"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from browser import LACKING
from browser import chromium as chromium  # once: a second import would be a second browser, which playwright refuses
from commands_run import Run
from one_ray import RAY
from one_seed import one_seed
from xdist.scheduler import LoadFileScheduling

# Timing never decides a test.
hypothesis.settings.register_profile("tune_cac", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tune_cac")


_TESTS = Path(__file__).parent
#: What takes longest, and so begins first; all cases of a file, as the contract, run one after the other.
_FIRST = ("trainables/test_contract.py", "integration/", "e2e/", "trainables/stage_tree/test_leases.py")
#: Files whose searches use one Ray. Every second one shares it.
_WITH_RAY = sorted(
    file.relative_to(_TESTS).as_posix()
    for file in (*_TESTS.glob("integration/test_*.py"), *_TESTS.glob("e2e/test_*.py"))
    if "one_ray" in file.read_text("utf-8")
)


def _group(file: str) -> str:
    """Return which tests one process runs, one after the other: those of a file, or of several with one Ray."""
    return f"one Ray, {_WITH_RAY.index(file) % 2}" if file in _WITH_RAY else file


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(_TESTS).as_posix()


def _place(file: str) -> int:
    return next((place for place, first in enumerate(_FIRST) if file.startswith(first)), len(_FIRST))


class _GroupScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0].removeprefix("tests/"))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _GroupScheduling:
    """Give a process whole groups of tests."""
    return _GroupScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes (pytest-xdist) begin with what takes longest, and run groups in one piece."""
    if hasattr(config, "workerinput"):
        groups = {group: place for place, group in enumerate(dict.fromkeys(_group(_file(item)) for item in items))}
        items.sort(key=lambda item: (_place(_file(item)), groups[_group(_file(item))]))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the Ray of `one_ray` with the last test of its group."""
    if nextitem is None or _group(_file(nextitem)) != _group(_file(item)):
        RAY.close()


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


@pytest.fixture(autouse=True)
def _nothing_counts_on() -> Iterator[None]:
    """End the counting of optimizers' steps that a test began in its process: as in a script, it has no end."""
    yield
    counting = sys.modules.get("trainables.gradskip.script_counting.process_record")
    if counting is not None:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        counting._PROCESS.records.clear()
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, counting.StepFlops):
                mode.end()


@pytest.fixture(scope="session", autouse=True)
def searches_of_one_seed() -> Iterator[None]:
    """Let searches train their answers on one seed unless they say otherwise, as `one_seed` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tune_cac.study.search_options.SEEDS", 1)
        yield


@pytest.fixture
def tune_cac_command(tmp_path: Path) -> Run:
    """``python -m tune_cac ARGUMENTS`` in an empty folder, as a user runs it."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tune_cac", *one_seed(arguments)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run
