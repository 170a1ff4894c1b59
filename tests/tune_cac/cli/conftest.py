"""Fixtures of the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of this process."""
    monkeypatch.chdir(tmp_path)
