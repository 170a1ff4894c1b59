"""Ray's start: one cluster of a machine at a time."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from tune_cac.cluster import starting_alone


def _start(folder: str, begun: Event, go_on: Event) -> None:
    import tempfile

    tempfile.tempdir = folder
    with starting_alone():
        begun.set()
        go_on.wait(30)


def test_two_processes_start_one_after_the_other(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    first, second, go_on = spawn.Event(), spawn.Event(), spawn.Event()
    one = spawn.Process(target=_start, args=(str(tmp_path), first, go_on))
    other = spawn.Process(target=_start, args=(str(tmp_path), second, go_on))
    one.start()
    assert first.wait(60)
    other.start()
    assert not second.wait(3)  # it waits for the first
    go_on.set()
    assert second.wait(60)
    for process in (one, other):
        process.join(60)
        assert process.exitcode == 0


def test_who_waits_too_long_starts_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with starting_alone():
        begun = time.monotonic()
        with starting_alone(most_s=0.3):
            assert time.monotonic() - begun >= 0.3


def test_a_lock_that_cannot_be_opened_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with starting_alone():
        pass
