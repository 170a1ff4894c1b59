"""What an interrupted trial leaves in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE
from tune_cac.study.folder import last_checkpoint, last_row, trial_folder_name


def test_names_sort_as_numbers() -> None:
    assert [trial_folder_name(n) for n in (0, 7, 12345)] == ["trial-00000", "trial-00007", "trial-12345"]
    assert sorted(map(trial_folder_name, range(120))) == list(map(trial_folder_name, range(120)))


def test_the_last_checkpoint_is_the_newest_one_that_is_whole(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "missing") is None
    assert last_checkpoint(tmp_path) is None
    for number, whole in ((0, True), (9, True), (10, False)):
        folder = tmp_path / f"checkpoint_{number:06d}"
        folder.mkdir()
        if whole:
            (folder / CHECKPOINT_FILE).touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint_000009"


@pytest.mark.parametrize("torn", ["", '{"search_flops": 4', "null\n", "[1]\n", "\x00\x00"])
def test_the_last_row_is_the_last_that_was_written_whole(torn: str, tmp_path: Path) -> None:
    rows = [{"epoch": n, "search_flops": 10 * n, "dense_flops": 100} for n in (1, 2)]
    (tmp_path / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    assert last_row(tmp_path) == {"search_flops": 20, "dense_flops": 100}


def test_no_row_is_no_row(tmp_path: Path) -> None:
    assert last_row(tmp_path) == {}
    (tmp_path / "result.json").write_text("")
    assert last_row(tmp_path) == {}
    (tmp_path / "result.json").write_text('{"epoch": 1}\n')
    assert last_row(tmp_path) == {}
    (tmp_path / "result.json").write_bytes(b"\xff\xfe\n")
    assert last_row(tmp_path) == {}
