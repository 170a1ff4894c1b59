"""A study's folder: Optuna's lock of a journal, left by a process that was killed; threads of a study."""

from __future__ import annotations

import os
import time
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from studies import result_row, write_study

from trainables.config import TrialConfig
from trainables.runtime.processors import processors
from tune_cac.study import folder as study
from tune_cac.study.folder import threads_in
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
