"""Identity of a study's script: the content of the files that its command names."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from trainables.errors import UserError
from trainables.workload_options import read_options


def script_identity(options: Iterable[str]) -> tuple[str, ...]:
    """Return the options ``cwd`` and ``files`` of a command, unless they are given."""
    given = read_options(options)
    cwd = Path(given.get("cwd", Path.cwd()))
    found = {"cwd": str(cwd), "files": files_digest(given.get("command", ""), cwd)}
    return tuple(f"{name}={value}" for name, value in found.items() if name not in given)


def files_digest(command: str, cwd: Path) -> str:
    """Return a digest of the content of the files that a command line names.

    Modules that a script imports from its own folder belong to it, as in `trainables.workloads.user_code`; data does
    not.
    """
    from trainables.workloads.user_code import beside

    digest = hashlib.sha256()
    for path in named_files(command, cwd):
        for part in sorted({path, *beside(path)}):
            digest.update(part.name.encode())
            digest.update(part.read_bytes())
    return digest.hexdigest()[:16]


def named_files(command: str, cwd: Path) -> list[Path]:
    """Return the small files that a command line names, such as ``train.py``; not programs on the search path."""
    try:
        words = shlex.split(command)
    except ValueError:  # quotes that only the shell understands
        words = command.split()
    found = [cwd / word for word in words if not word.startswith("-")]
    return [path for path in found if path.is_file() and path.stat().st_size < 2**20]


def check_unchanged(options: Iterable[str]) -> None:
    """Raise UserError if a study's script has changed since the study was begun."""
    given = read_options(options)
    if "files" not in given or not Path(given["cwd"]).is_dir():
        return
    if files_digest(given["command"], Path(given["cwd"])) != given["files"]:
        names = ", ".join(path.name for path in named_files(given["command"], Path(given["cwd"]))) or "the script"
        raise UserError(
            f"{names} or what it imports has changed since the study was begun, so that its trials cannot be compared "
            "with new ones: search under another --name, or put the files back"
        )
