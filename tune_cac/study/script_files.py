"""Identity of a study's script: the content of the files that its command names."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from trainables.errors import UserError
from trainables.workload_options import read_options

#: A module's name, as in ``python -m``.
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def script_identity(options: Iterable[str]) -> tuple[str, ...]:
    """Return the options ``cwd`` and ``files`` of a command, unless they are given.

    UserError: Python shall run a file that is not there.
    """
    given = read_options(options)
    cwd = Path(given.get("cwd", Path.cwd()))
    program, *rest = _words(given.get("command", "")) or [""]
    script = next((word for word in rest if not word.startswith("-") or word == "-m"), "")
    if Path(program).name.startswith("python") and script.endswith(".py") and not (cwd / script).is_file():
        raise UserError(f"--script must name a file that is there, got {script}")
    found = {"cwd": str(cwd), "files": files_digest(given.get("command", ""), cwd)}
    return tuple(f"{name}={value}" for name, value in found.items() if name not in given)


def files_digest(command: str, cwd: Path) -> str:
    """Return a digest of the content of the files and of the modules that a command line names, behind any launcher.

    Modules that a script imports from its own folder belong to it, as in `trainables.workloads.user_code`; data does
    not.
    """
    from trainables.workloads.user_code import beside, module_sources

    digest = hashlib.sha256()
    for parts in [
        *({path, *beside(path)} for path in named_files(command, cwd)),
        *(module_sources(cwd, name) for name in named_modules(command, cwd)),
    ]:
        for part in sorted(parts):
            digest.update(part.name.encode())
            digest.update(part.read_bytes())
    return digest.hexdigest()[:16]


def named_files(command: str, cwd: Path) -> list[Path]:
    """Return the small files that a command line names, such as ``train.py``; not programs on the search path."""
    found = [cwd / word for word in _words(command) if not word.startswith("-")]
    return [path for path in found if path.is_file() and path.stat().st_size < 2**20]


def named_modules(command: str, cwd: Path) -> list[str]:
    """Return the modules of a folder that a command line runs, such as ``python -m package.train``.

    Launchers take options between ``-m`` and the module, and the module's own options follow it.
    """
    words = _words(command)
    flags = [number for number, word in enumerate(words) if word in ("-m", "--module")]
    names = [word for word in words[flags[0] + 1 :] if _MODULE.fullmatch(word)] if flags else []
    places = [(name, cwd.joinpath(*name.split("."))) for name in names]
    return [name for name, at in places if at.with_suffix(".py").is_file() or (at / "__main__.py").is_file()]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # quotes that only the shell understands
        return command.split()


def check_unchanged(options: Iterable[str]) -> None:
    """Raise UserError if a study's script has changed since the study was begun."""
    given = read_options(options)
    if "files" not in given or not Path(given["cwd"]).is_dir():
        return
    command, cwd = given["command"], Path(given["cwd"])
    if files_digest(command, cwd) != given["files"]:
        found = [*(path.name for path in named_files(command, cwd)), *named_modules(command, cwd)]
        raise UserError(
            f"{', '.join(found) or 'the script'} or what it imports has changed since the study was begun, so that its "
            "trials cannot be compared with new ones: search under another --name, delete the study (studies delete "
            "NAME), or put the files back"
        )
