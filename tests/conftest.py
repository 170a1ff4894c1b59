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


#: Files that start Ray. Two clusters that start at once may choose the same port, so these never run side by side.
_START_RAY = ("integration/", "trainables/stage_tree/test_coordinator.py", "test_notebook.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes (pytest-xdist, ``--dist loadgroup``): a file stays together, and so do those with Ray."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    folder = Path(__file__).parent
    groups = {}
    for item in items:
        file = item.path.relative_to(folder).as_posix()
        groups[item] = "ray" if file.startswith(_START_RAY) else file
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    if config.getoption("dist") == "loadgroup":
        items.sort(key=lambda item: groups[item] != "ray")  # they take longest


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
