"""What a job gets from here: the working directory's files, and this package as a wheel."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainables.errors import UserError
from tune_cac.own_packages import NAMES

#: Most megabytes (10^6 bytes) that are shipped unless specified. Ray itself refuses more than 500 MiB.
MOST_MB = 100
#: Folder of studies in the home folder of the job's user, for jobs whose command names none.
HOME_RESULTS = "tune_cac_results"
#: Files that say that a folder is a virtual environment; folders that are never shipped.
_ENVIRONMENT, _NEVER = (
    "pyvenv.cfg",
    {".git", "__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".images"},
)
#: Largest entries that a refusal names.
_NAMED = 5
#: Date of files in archives, so that equal contents are equal archives, which Ray uploads once.
_DATE = (2020, 1, 1, 0, 0, 0)


def shipped_files(folder: Path, *, left_out: Iterable[str] = ()) -> list[Path]:
    """Return the files of a folder that are shipped, relative to it, in order.

    Left out are what ``.gitignore`` files name, version control, caches, virtual environments, studies and symbolic
    links.

    Args:
        folder: the working directory.
        left_out: patterns of relative names, as of `fnmatch`, or names of folders.
    """
    patterns = [pattern.rstrip("/") for pattern in left_out]
    found = []
    for path in _not_ignored(folder):
        parents = [Path(*path.parts[: n + 1]) for n in range(len(path.parts) - 1)]
        own = set(path.parts[:-1]) & _NEVER or any((folder / p / _ENVIRONMENT).is_file() for p in parents)
        named = any(fnmatch.fnmatch(str(part), pattern) for part in (path, *parents) for pattern in patterns)
        whole = folder / path
        if not (own or named or _is_study(folder, parents) or whole.is_symlink()) and whole.is_file():
            found.append(path)
    return sorted(found)


def _is_study(folder: Path, parents: Sequence[Path]) -> bool:
    return any((folder / parent / "study.json").is_file() for parent in parents)


def _not_ignored(folder: Path) -> list[Path]:
    """Return the files that git would add, in a folder that need not be git's; all files where there is no git."""
    with tempfile.TemporaryDirectory(prefix="tune_cac-") as own:
        git = ["git", f"--git-dir={own}/git", f"--work-tree={folder}"]
        listed = ["ls-files", "-z", "--others", "--exclude-standard"]
        try:
            subprocess.run(["git", "init", "--quiet", "--bare", f"{own}/git"], check=True, capture_output=True)
            done = subprocess.run([*git, *listed], cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return [Path(at, name).relative_to(folder) for at, _, names in os.walk(folder) for name in names]
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name and not name.endswith(b"/")]


def check_size(folder: Path, files: Sequence[Path], most_mb: float) -> int:
    """Return the bytes of the files.

    Raises:
        UserError: they are more than ``most_mb``; the largest are named.
    """
    sizes: dict[str, int] = {}
    for path in files:
        sizes[path.parts[0]] = sizes.get(path.parts[0], 0) + (folder / path).stat().st_size
    total = sum(sizes.values())
    if total > most_mb * 1e6:
        largest = sorted(sizes.items(), key=lambda entry: -entry[1])[:_NAMED]
        raise UserError(
            f"the working directory must have at most {most_mb:g} MB to ship, got {total / 1e6:.0f} MB in "
            f"{len(files)} files ({', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in largest)}): name what the "
            "job does not need in .gitignore or by --exclude, put data where every node sees it, or raise --most-mb"
        )
    return total


def write_archive(folder: Path, files: Iterable[Path], target: Path) -> None:
    """Write the files into a zip archive."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            _add(archive, path.as_posix(), (folder / path).read_bytes(), executable=os.access(folder / path, os.X_OK))


def write_wheel(folder: Path, version: str) -> Path:
    """Write this package, as it runs here, as a wheel without dependencies into a folder; return its path.

    Its name depends on its contents, for Ray uploads a name once.
    """
    home = Path(__file__).resolve().parents[2]
    found = [path for package in ("tune_cac", *NAMES) for path in sorted((home / package).rglob("*")) if path.is_file()]
    contents = {
        path.relative_to(home).as_posix(): path.read_bytes() for path in found if path.parent.name != "__pycache__"
    }
    about = f"tune_cac-{version}.dist-info"
    contents |= {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: tune-cac\nVersion: {version}\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tune_cac\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digest = hashlib.sha256()
    for name, data in contents.items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    listed = [*contents, f"{about}/RECORD"]
    contents[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in listed).encode()
    target = folder / f"tune_cac-{version}-0{digest.hexdigest()[:12]}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            _add(archive, name, data)
    return target


def _add(archive: zipfile.ZipFile, name: str, data: bytes, *, executable: bool = False) -> None:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.external_attr = (0o755 if executable else 0o644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)
