"""A study whose trials Optuna keeps in a PostgreSQL database, and the journal that is written from it.

The database is what the search reads and writes, so nothing is lost with the driver's disk, and optuna-dashboard shows
it live. Everything else of this package reads journals: the study's own is written anew from the database, now and then
and at the end.
"""

from __future__ import annotations

import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from analysis.io.layout import STUDY_NAME, Layout, StudyInfo
from trainables.atomic_write import atomic_write
from trainables.errors import UserError
from tune_cac.messages import say

if TYPE_CHECKING:
    import optuna

#: Seconds from one writing of the journal to the next, and the least of them by the time that it takes.
JOURNAL_S, _TIMES = 30.0, 20.0
#: Attribute of Optuna's study with the contents of ``study.json``.
_INFO = "study.json"
_SCHEME = "postgresql"


def check_url(url: str) -> None:
    """Raise UserError for a URL of another kind, or with a password, which files and process lists would show."""
    parts = urlsplit(url)
    if parts.scheme != _SCHEME or not parts.path.strip("/"):
        shown = url if parts.password is None else f"{parts.scheme}://..."
        raise UserError(f"--study-storage must be postgresql://USER@HOST:PORT/DATABASE, got {shown}")
    if parts.password is not None or "password=" in parts.query:
        raise UserError(
            f"--study-storage must have no password in it, got one for {parts.hostname}: set PGPASSWORD, or write it "
            "into ~/.pgpass"
        )


def open_database(url: str) -> optuna.storages.BaseStorage:
    """Return Optuna's storage of a database; it connects anew when the server was restarted.

    Raises:
        UserError: its driver is not installed, or the database cannot be opened.
    """
    import optuna

    try:
        import psycopg  # noqa: F401 - SQLAlchemy's driver
    except ImportError:
        raise UserError("--study-storage needs psycopg: pip install 'tune-cac[postgresql]'") from None
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return optuna.storages.RDBStorage(
            f"{_SCHEME}+psycopg{url.removeprefix(_SCHEME)}", engine_kwargs={"pool_pre_ping": True}
        )
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise UserError(
            f"--study-storage must be a database that can be opened, got {url} ({reason}): check host, port and names, "
            "and PGPASSWORD or ~/.pgpass"
        ) from None


def name_there(layout: Layout) -> str:
    """Return the name of a study in its database, which holds many; of a confirmation after its search's."""
    above = Layout(layout.root.parent)
    return f"{above.root.name}/{layout.root.name}" if above.confirmation == layout else layout.root.name


def restore_info(url: str, layout: Layout) -> bool:
    """Write ``study.json`` of a study that only the database has; return whether there is one.

    Raises:
        UserError: `open_database`, or another program's study has this name.
    """
    study = _study_of(open_database(url), layout)
    if study is None:
        return False
    info = study.user_attrs.get(_INFO)
    if info is None:
        raise UserError(f"{url} holds a study {study.study_name} that no search wrote: choose another --name")
    layout.root.mkdir(parents=True, exist_ok=True)
    layout.write_info(StudyInfo(**info))
    return True


def _study_of(storage: optuna.storages.BaseStorage, layout: Layout) -> optuna.Study | None:
    import optuna

    try:
        return optuna.load_study(study_name=name_there(layout), storage=storage)
    except KeyError:
        return None


def _write_journal(storage: optuna.storages.BaseStorage, layout: Layout) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    with tempfile.TemporaryDirectory(prefix="tune_cac-") as here, warnings.catch_warnings():
        target = Path(here) / layout.journal.name
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.copy_study(
            from_study_name=name_there(layout),
            from_storage=storage,
            to_storage=optuna.storages.JournalStorage(JournalFileBackend(str(target))),
            to_study_name=STUDY_NAME,
        )
        with atomic_write(layout.journal) as file:
            file.write(target.read_bytes())


@contextmanager
def journal_of_database(layout: Layout) -> Iterator[None]:
    """Write the journal of a study in a database before the block, now and then, and at its end; else nothing.

    Raises:
        UserError: the database cannot be opened.
    """
    info = layout.read_info()
    if not info.study_storage:
        yield
        return
    storage = open_database(info.study_storage)
    _exchange(storage, layout)
    done = threading.Event()
    thread = threading.Thread(target=_write_until, args=(storage, layout, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _exchange(storage, layout)


def exchange(layout: Layout) -> None:
    """Keep a study's settings in its database, and write its journal from there; nothing without a database."""
    if database := layout.read_info().study_storage:
        _exchange(open_database(database), layout)


def _exchange(storage: optuna.storages.BaseStorage, layout: Layout) -> None:
    study = _study_of(storage, layout)
    if study is not None:
        study.set_user_attr(_INFO, asdict(layout.read_info()))  # from which another machine goes on
        _write_journal(storage, layout)


def _write_until(storage: optuna.storages.BaseStorage, layout: Layout, done: threading.Event) -> None:
    wait_s, failed = JOURNAL_S, False
    while not done.wait(wait_s):
        begun = time.monotonic()
        try:
            _exchange(storage, layout)
            failed = False
        except Exception as error:  # noqa: BLE001 - SQLAlchemy's and Optuna's; the search itself says what stops it
            if not failed:
                say(f"warning: {layout.journal} was not written: {str(error).splitlines()[0]}")
            failed = True
        wait_s = max(JOURNAL_S, _TIMES * (time.monotonic() - begun))
