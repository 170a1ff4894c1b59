"""Optuna's lock of a journal, left by a process that was killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import LOCK_FILE_SUFFIX

from tune_cac.study import folder as study


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


def test_a_lock_of_this_moment_is_its_holders(tmp_path: Path) -> None:
    journal, lock = tmp_path / "optuna.journal", tmp_path / "optuna.journal.lock"
    journal.touch()
    _left(lock, journal, age_s=0)
    study.mend_journal(journal)
    assert lock.is_symlink()
    assert study.LOCK_FILE_SUFFIX == LOCK_FILE_SUFFIX
