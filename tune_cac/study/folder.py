"""A study's folder: creation, reopening, and the lock while a search runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from analysis.io.journal import torn_end
from analysis.io.studies import read_journal
from analysis.io.study_files import Layout, StudyInfo
from analysis.io.study_options import StudyOptions, options_of, results_here
from trainables.errors import DISK_REFUSALS, DiskError, UserError, cannot_write
from trainables.runtime.checkpoint_folder import CHECKPOINT, CHECKPOINT_FILE
from trainables.storage import check_place, files_of, is_uri, joined
from trainables.workload_options import what_is_trained
from tune_cac.study.fixed_params import shown_hold
from tune_cac.study.object_storage import fetch_study
from tune_cac.study.script_files import check_unchanged
from tune_cac.study.search_options import SearchOptions

# --- A trial's folder in its Ray experiment: its name, and the results of an interrupted trial in it ------------------

#: Columns of the compute that was spent on a trial that did not end well.
SPENT = ("search_flops", "dense_flops")


def trial_folder_name(number: int) -> str:
    """Return the name of a trial's folder in its Ray experiment, by Optuna's trial number."""
    return f"trial-{number:05d}"


def is_trial_folder(name: Any) -> bool:
    """Return whether a name from a journal is that of a trial's folder, relative to its study."""
    return isinstance(name, str) and re.fullmatch(r"ray/run-\d+/trial-\d+", name) is not None


def last_checkpoint(trial_folder: Path | str) -> Path | str | None:
    """Return the newest complete checkpoint in a trial's folder, which may be a URI; None if there is none."""
    files = files_of(trial_folder)
    try:
        names = [name for name in files.names("") if name.startswith(CHECKPOINT)]
        found = [name for name in names if files.size(f"{name}/{CHECKPOINT_FILE}") is not None]
    except OSError:  # a failing storage: the trial begins anew
        return None
    return joined(trial_folder, max(found)) if found else None


def last_row(trial_folder: Path) -> dict[str, Any]:
    """Return what an interrupted trial had executed by the last result that Ray wrote; empty if there is none."""
    try:
        lines = (trial_folder / "result.json").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in reversed(lines):
        with suppress(ValueError):  # the last line may be cut off
            row = json.loads(line)
            if isinstance(row, dict):
                return {name: row[name] for name in SPENT if name in row}
    return {}


#: Suffix of the file with which Optuna locks a journal.
LOCK_FILE_SUFFIX = ".lock"
#: Seconds after which a lock was left by a process that has ended.
_LOCK_S = 3.0
#: Options that every search of a study has the same.
_SAME = (
    "space", "workload", "workload_options", "epochs", "seed", "workers_per_trial", "saving", "metric", "direction",
    "sampler",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a study's results depend on."""
    return {package: version(package) for package in ("torch", "ray", "optuna", "numpy", "pandas")}


def open_study(options: SearchOptions) -> Layout:
    """Return the folder of a new study, or of the same study, to which the search adds its trials.

    UserError: the folder cannot be written, holds other files, or holds a study with other settings.
    """
    workload = re.sub(r"[^A-Za-z0-9]+", "-", options.workload)
    space = re.sub(r"[^A-Za-z0-9_+]+", "-", options.space).strip("-")
    layout = Layout(options.folder / (options.name or f"{workload}-{space}-{datetime.now():%Y%m%d-%H%M%S}"))
    wanted = _wanted_info(options, layout)
    if wanted.storage:
        fetch_study(wanted.storage, layout)
    check_links(layout.root)
    is_new = not layout.info.exists()
    if not is_new:
        _check_same(layout, wanted)
    elif layout.root.exists() and any(layout.root.iterdir()):
        raise UserError(f"{layout.root} is not empty and holds no study: choose another --name")
    check_writable(layout.root)
    if is_new:
        layout.write_info(wanted)
    return layout


def _wanted_info(options: SearchOptions, layout: Layout) -> StudyInfo:
    """Return what is kept of the options of a study in a folder, before a trial was asked for."""
    kept: dict[str, Any] = {declared.name: getattr(options, declared.name) for declared in options_of(StudyOptions)}
    kept |= {
        "trials": 0,
        "epochs": options.trial_epochs,
        "script_epochs": options.epochs if options.is_script else None,
        "saving": options.ranked_by,
        "hold": dict(options.fixed),
        "workload_options": list(options.workload_options),
        "space_files": dict(options.space_files),
        "storage": str(joined(options.results, layout.root.name)) if is_uri(options.results) else "",
    }
    return StudyInfo(**kept, versions=package_versions(), method=options.loaded_space.method)


def _check_same(layout: Layout, wanted: StudyInfo) -> None:
    """Raise UserError if a folder holds a study of other settings than wanted."""
    held, place = layout.read_info(), layout.root.parent
    if held.storage != wanted.storage:
        raise UserError(
            f"{layout.root} holds a study whose results are in {held.storage or place}, not {wanted.storage or place}: "
            "choose another --name, or the same --results"
        )
    values = {field: (getattr(held, field), getattr(wanted, field)) for field in _SAME}
    there, asked = (list(what_is_trained(wanted.workload, options)) for options in values["workload_options"])
    values["workload_options"] = (there, asked)
    if there != asked and all(one in asked or one.startswith("files=") for one in there):
        check_unchanged(held.workload_options)
    differs = [f"with {field} {there!r}, not {asked!r}" for field, (there, asked) in values.items() if there != asked]
    if held.grid != wanted.grid:
        differs.append("of another grid")
    if held.hold != wanted.hold:
        differs.append(f"with {shown_hold(held.hold)} fixed, not {shown_hold(wanted.hold)}")
    differs += [
        f"with another text of {file}, which study.json keeps in space_files"
        for file, text in wanted.space_files.items()
        if held.space_files.get(file) != text
    ]
    if differs:
        raise UserError(
            f"{layout.root} holds a study {differs[0]}: choose another --name, or the same settings to add trials to it"
        )


def threads_in(journal: Path) -> dict[str, int]:
    """Return the threads of a study's trials as an option; empty before its baseline was begun.

    Another number adds numbers in another order, so trials would neither share training nor be comparable exactly.
    """
    with suppress(UserError):  # no study in it yet
        for record in read_journal(journal):
            if record["role"] == "baseline" and "threads" in record["config"]:
                return {"cpus_per_trial": record["config"]["threads"]}
    return {}


def find_study(results: Path | str, name: str) -> Layout:
    """Return the folder of an existing study, by name under the results folder, by path or by URI.

    Of one in object storage, what this machine lacks is copied into a folder of its name under ``results``. UserError:
    there is none; the message names those that exist.
    """
    if is_uri(results) and not is_uri(name):
        name = str(joined(results, name))
    results = results_here(results)
    if is_uri(name):
        check_place(name, "a study")
        layout = Layout(results / name.partition("?")[0].rstrip("/").rpartition("/")[2])
        if not fetch_study(name, layout):
            raise UserError(f"no study at {name}: give the URI of its folder, such as s3://bucket/studies/NAME")
        return layout
    for layout in (Layout(results / name), Layout(Path(name))):
        if layout.info.exists():
            check_links(layout.root)
            return layout
    there = sorted(info.parent.name for info in results.glob(f"*/{layout.info.name}"))
    known = f"studies there: {', '.join(there)}" if there else "there is no study there yet"
    raise UserError(f"no study {name!r} in {results}: {known}")


def check_links(root: Path) -> None:
    """Raise UserError for a link in a study that leads out of it, through which a search would write elsewhere.

    Folders of ended trials are left out, for nothing is written into them; so is Optuna's lock, a link that is made and
    removed alone.
    """
    home, optunas_lock = root.resolve(), Layout(root).journal.name + LOCK_FILE_SUFFIX
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and path.name != optunas_lock and not path.resolve().is_relative_to(home):
                raise UserError(
                    f"{path} is a link out of its study, which would be written to: replace it by what it leads to, "
                    "or remove it"
                )
        folders[:] = [name for name in folders if not name.startswith("trial-")]


def check_writable(folder: Path) -> None:
    """Create the folder; raise UserError if nothing can be written in it."""
    probe = folder / f".write-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise cannot_write(f"results to {folder}", error, "choose another --results") from None


def mend_journal(journal: Path) -> None:
    """Remove a last line that was cut off by a crash or a full disk; Optuna would append to it.

    The caller must hold the study's lock. A process that was killed while it wrote leaves Optuna's lock, a symbolic
    link; if the link is dangling, Optuna would wait for it without end. No running process holds the lock for seconds.
    """
    lock = journal.with_name(journal.name + LOCK_FILE_SUFFIX)
    with suppress(FileNotFoundError):
        if lock.is_symlink() and time.time() - lock.lstat().st_mtime > _LOCK_S:
            lock.unlink()
    if journal.is_file() and (kept := torn_end(journal)) is not None:
        os.truncate(journal, kept)


@contextmanager
def written(layout: Layout, again: str) -> Iterator[None]:
    """Convert disk and journal errors of the block into messages that advise the command to run again.

    DiskError: the disk cannot be written. UserError: the journal is damaged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_REFUSALS:
            raise
        raise DiskError(
            f"{layout.root} cannot be written ({error.strerror}): finished trials are kept; make room, then run "
            f"python -m tune_cac {again}"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is not UTF-8"
        raise UserError(
            f"the journal {layout.journal} is damaged ({reason}), so Optuna cannot go on with it: report "
            "reads what can be read; search under another --name"
        ) from error


def is_locked(layout: Layout) -> bool:
    """Return whether a search or a confirmation is running on the study."""
    try:
        with open(layout.lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Lock the study for one search until the process ends, however it ends. UserError: another process holds it."""
    with open(layout.lock, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UserError(
                f"{layout.root} is being searched or confirmed by process {holder}: wait for it, or choose another "
                "study"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
