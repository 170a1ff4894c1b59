"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from commands_run import Run

# Timing never decides a test.
hypothesis.settings.register_profile("tune_cac", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tune_cac")


#: Files that start Ray again and again. Two clusters that start at once may choose the same port, so these never run
#: side by side.
_START_RAY = ("integration/", "trainables/stage_tree/test_coordinator.py")


#: One cluster for nearly all of its tests: it need not wait for the others, who take longest together.
_STARTS_ONE = "integration/test_own_training.py"


def _starts_ray(nodeid: str) -> bool:
    name = nodeid.removeprefix("tests/")
    return name.startswith(_START_RAY) and not name.startswith(_STARTS_ONE)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (pytest-xdist, ``--dist loadfile``): files stay together, and all those with Ray do."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if _starts_ray(nodeid) else str(super()._split_scope(nodeid))

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """There, those with Ray come first: they take longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not _starts_ray(item.nodeid))


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
