"""Fixtures of the tests of workloads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from user_factories import HEAD, Write

from trainables.workloads import factory


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module into the working directory; the name of its function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    factory.load.cache_clear()

    def written(body: str, *, module: str = "own_training", head: str = HEAD) -> str:
        (tmp_path / f"{module}.py").write_text(head + "\n" + body)
        sys.modules.pop(module, None)
        factory.load.cache_clear()
        return f"{module}:make"

    return written
