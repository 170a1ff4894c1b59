"""Optuna's lock of a journal, left by a process that was killed."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import LOCK_FILE_SUFFIX

from tune_cac import study


def test_a_lock_left_before_there_was_a_journal_is_taken_away(tmp_path: Path) -> None:
    journal = tmp_path / "optuna.journal"
    lock = tmp_path / "optuna.journal.lock"
    lock.symlink_to(journal)  # as Optuna makes it, before the journal is there
    study.mend_journal(journal)
    optuna.create_study(storage=optuna.storages.JournalStorage(JournalFileBackend(str(journal))))
    assert journal.exists()
    assert not lock.is_symlink()


def test_the_lock_of_a_journal_that_is_there_is_optunas_own_matter(tmp_path: Path) -> None:
    journal = tmp_path / "optuna.journal"
    journal.touch()
    lock = tmp_path / "optuna.journal.lock"
    lock.symlink_to(journal)
    study.mend_journal(journal)
    assert lock.is_symlink()
    assert study.LOCK_FILE_SUFFIX == LOCK_FILE_SUFFIX
