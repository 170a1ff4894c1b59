"""Fixtures of the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tune_cac.cli.main import main


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of this process."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that is refused with one line alone; return the line."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err.removeprefix("tune_cac: error: ").rstrip("\n")

    return run
