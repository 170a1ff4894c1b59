"""The command ``studies``: what is listed, what is deleted and what is not."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from studies import result_row, write_study
from thorough import rest_thorough

from tune_cac.cli.main import main
from tune_cac.study.folder import locked
from tune_cac.study.study_result import answer, write_answer

Refused = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Three studies, one of them finished with an answer, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one", "two", "three")):
        layout = write_study(tmp_path / "results" / name, [{"row": result_row()}, {"row": result_row(0.97, 0.25)}])
        os.utime(layout.info, (0, 86400 * number))
        if name == "two":
            write_answer(layout, answer(layout, allowed_drop=0.005, interrupted=True))
            assert main(["studies"]) == 0
            assert "finished" not in capsys.readouterr().out
            write_answer(layout, answer(layout, allowed_drop=0.005))
            found = layout.read_info()
            layout.write_info(replace(found, answer={"saved": 0.25}))
            os.utime(layout.info, (0, 86400 * 9))
    (tmp_path / "results" / "three" / "study.json").write_text("{")
    os.utime(tmp_path / "results" / "three" / "study.json", (0, 86400))
    (tmp_path / "results" / "mine").mkdir()
    return tmp_path / "results"


def test_studies_are_listed_the_latest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studies"]) == 0
    header, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["date", "state", "trials", "saved", "MB", "study"]
    two, three, one = lines
    assert [two[0], two[2], *two[4:6], two[-1]] == ["1970-01-10", "finished", "25.0", "%", "two"]
    assert (three[:3], three[-1]) == (["cannot", "be", "read"], "three")
    assert (one[2], one[-1]) == ("interrupted", "one")
    size = sum(file.stat().st_size for file in (folder / "two").rglob("*") if file.is_file())
    assert float(two[-2]) == pytest.approx(size / 1e6, abs=0.05)


@pytest.mark.parametrize(
    ("width", "shown"),
    rest_thorough(
        [
            (80, "date state trials saved MB study"),
            (56, "date state trials saved study"),
            (40, "state trials saved study"),
            (30, "state saved study"),
        ],
        of_several=True,
    ),
)
def test_a_terminal_lacks_the_columns_it_has_no_room_for(
    width: int, shown: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["studies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == shown.split()
    assert lines[1].split()[-1] == "two"
    assert max(map(len, lines)) <= width


def test_only_what_is_named_and_is_a_study_is_deleted(folder: Path, refused: Refused) -> None:
    assert "unknown study 'mine': Valid: one, three, two" in refused("studies", "delete", "one", "mine")
    assert "unknown study '../results/one'" in refused("studies", "delete", "../results/one")
    assert "got 'one'" in refused("studies", "one")
    assert "nobody can answer here: give --yes" in refused("studies", "delete", "one")
    (folder / "link").symlink_to(folder / "one")
    assert "must not be deleted" in refused("studies", "delete", "link", "--yes")
    (folder / "one" / "thesis.tex").touch()
    assert "must hold nothing but a study to be deleted, got thesis.tex: move" in refused("studies", "delete", "one")
    (folder / "mine" / "study.json").write_text('{"my": "data"}')
    assert "has format None" in refused("studies", "delete", "mine", "--yes")
    (folder / "one" / "thesis.tex").unlink()
    layout = write_study(folder / "busy", [{"row": result_row()}])
    with locked(layout):
        assert "busy must not be deleted: it is being searched" in refused("studies", "delete", "one", "busy", "--yes")
    (layout.root / "confirmation").mkdir()
    assert main(["studies", "delete", "three", "busy", "--yes"]) == 0
    assert sorted(one.name for one in folder.iterdir()) == ["link", "mine", "one", "two"]


@pytest.mark.parametrize(
    ("answered", "is_there"), rest_thorough([("n\n", True), ("\x04", True), ("y\n", False)], of_several=True)
)
def test_a_person_is_asked(answered: str, is_there: bool, folder: Path) -> None:
    """At a terminal of this machine; Ctrl-D is a no."""
    ours, theirs = pty.openpty()
    os.write(ours, answered.encode())
    command = [sys.executable, "-m", "tune_cac", "studies", "delete", "one", "one"]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("Delete results/one (0.0 MB)? [y/N] ")
    assert (folder / "one").exists() == is_there
