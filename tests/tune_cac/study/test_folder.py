"""A study's folder: Optuna's lock, left by a process that was killed; threads; what an interrupted trial leaves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from studies import result_row, write_study

from trainables.config import TrialConfig
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE
from trainables.runtime.processors import processors
from tune_cac.study import folder as study
from tune_cac.study.folder import last_checkpoint, last_row, threads_in
from tune_cac.tuning import run


def _left(lock: Path, target: Path, *, age_s: float) -> None:
    lock.symlink_to(target)
    then = time.time() - age_s
    os.utime(lock, (then, then), follow_symlinks=False)


def test_a_lock_that_leads_nowhere_is_taken_away(tmp_path: Path) -> None:
    journal, lock = tmp_path / "optuna.journal", tmp_path / "optuna.journal.lock"
    journal.touch()
    _left(lock, Path("results/s/optuna.journal"), age_s=60)  # relative to another folder, as Optuna made it
    study.mend_journal(journal)
    optuna.create_study(storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))))
    assert journal.stat().st_size > 0


def test_a_resumed_study_keeps_the_threads_of_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = min(2, processors())
    config = TrialConfig(method="none", threads=threads).to_dict()
    layout = write_study(tmp_path / "s", [{"config": config, "row": result_row()}])
    assert threads_in(layout.journal) == {"cpus_per_trial": threads}
    found: list[int] = []
    monkeypatch.setattr(run, "_run", lambda layout, options, device: found.append(options.cpus_per_trial))
    run.resume("s", results=tmp_path)
    run.resume("s", results=tmp_path, cpus_per_trial=1)
    assert found == [threads, 1]
    layout.journal.unlink()
    assert threads_in(layout.journal) == {}


def test_the_last_checkpoint_is_the_newest_one_that_is_whole(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "missing") is None
    assert last_checkpoint(tmp_path) is None
    for number, whole in ((0, True), (9, True), (10, False)):
        folder = tmp_path / f"checkpoint_{number:06d}"
        folder.mkdir()
        if whole:
            (folder / CHECKPOINT_FILE).touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint_000009"


def test_the_last_row_is_the_last_that_was_written_whole(tmp_path: Path) -> None:
    assert last_row(tmp_path) == {}
    file, row = tmp_path / "result.json", {"search_flops": 20, "dense_flops": 100}
    for torn in (b"", b'{"search_flops": 4', b"null\n", b"[1]\n", b"\x00\x00"):
        file.write_bytes(b'{"search_flops": 10}\n' + json.dumps({"epoch": 2, **row}).encode() + b"\n" + torn)
        assert last_row(tmp_path) == row
    for none in (b"", b'{"epoch": 1}\n', b"\xff\xfe\n"):
        file.write_bytes(none)
        assert last_row(tmp_path) == {}
