"""Which script a study trains with: the files that its command names, told apart by their content."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from trainables.errors import UserError
from trainables.workload_options import read_options


def script_identity(options: Iterable[str]) -> tuple[str, ...]:
    """The options ``cwd`` and ``files`` of a command, where they are not given."""
    given = read_options(options)
    cwd = Path(given.get("cwd", Path.cwd()))
    found = {"cwd": str(cwd), "files": files_digest(given.get("command", ""), cwd)}
    return tuple(f"{name}={value}" for name, value in found.items() if name not in given)


def files_digest(command: str, cwd: Path) -> str:
    """A digest of the content of the files that a command line names, and of Python's beside them.

    What a script imports from beside itself belongs to it, as in `trainables.workloads.user_code`; data does not.
    """
    from trainables.workloads.user_code import beside

    digest = hashlib.sha256()
    for path in named_files(command, cwd):
        for part in sorted({path, *beside(path)}):
            digest.update(part.name.encode())
            digest.update(part.read_bytes())
    return digest.hexdigest()[:16]


def named_files(command: str, cwd: Path) -> list[Path]:
    """Small files that a command line names, such as ``train.py``; programs on the search path are not looked for."""
    try:
        words = shlex.split(command)
    except ValueError:  # quotes that only the shell understands
        words = command.split()
    found = [cwd / word for word in words if not word.startswith("-")]
    return [path for path in found if path.is_file() and path.stat().st_size < 2**20]


def check_unchanged(options: Iterable[str]) -> None:
    """Raise UserError where a study's script is not what it was when the study was begun."""
    given = read_options(options)
    if "files" not in given or not Path(given["cwd"]).is_dir():
        return
    if files_digest(given["command"], Path(given["cwd"])) != given["files"]:
        names = ", ".join(path.name for path in named_files(given["command"], Path(given["cwd"]))) or "the script"
        raise UserError(
            f"{names} or what it imports has changed since the study was begun, so that its trials cannot be compared "
            "with new ones: search under another --name, or put the files back"
        )
