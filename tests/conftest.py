"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from commands_run import Run

# Timing never decides a test.
hypothesis.settings.register_profile("tune_cac", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tune_cac")


#: Files that start Ray again and again: they take longest.
_START_RAY = ("integration/", "e2e/test_readme_commands.py", "trainables/stage_tree/test_coordinator.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes (pytest-xdist) those with Ray come first, so that none of them is left at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(_START_RAY))


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
