"""The way back of a study from a cluster's disk: packed on the head node into text of a job's log, unpacked here.

Ray Jobs bring no files back, but their logs: a job prints an archive in lines of base64, each with its number and a
checksum, because a log also has lines of Ray.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path, PurePosixPath

from analysis.io.layout import Layout
from trainables.errors import UserError
from trainables.runtime.checkpoint_folder import CHECKPOINT

_BYTES = 3 * 4096  # of a line
_LINE = re.compile(r"^tune_cac-file (\d+) (\d+) ([0-9a-f]{8}) ([A-Za-z0-9+/=]*)$", re.MULTILINE)


def study_files(study: Path) -> list[Path]:
    """Return a study's files, relative to it, without checkpoints and what belongs to a process."""
    layout = Layout(study)
    layout.read_info()
    left_out = {(layout.tree.name, "objects"), (layout.tree.name, "checkpoints")}  # of its confirmation, too
    found = []
    for path in sorted(study.rglob("*")):
        inside = path.relative_to(study)
        own = path.suffix in (".lock", ".tmp") or any(part.startswith(CHECKPOINT) for part in inside.parts)
        if path.is_file() and not path.is_symlink() and not own and not left_out & {*pairwise(inside.parts)}:
            found.append(inside)
    return found


def pack(study: Path) -> bytes:
    """Return the files of `study_files` as a compressed archive."""
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w:gz") as archive:
        for name in study_files(study):
            archive.add(study / name, name.as_posix(), recursive=False)
    return archived.getvalue()


def as_lines(data: bytes) -> Iterable[str]:
    """Yield the lines of an archive: number, lines in all, checksum, content."""
    parts = [data[at : at + _BYTES] for at in range(0, len(data), _BYTES)]
    for number, part in enumerate(parts):
        yield f"tune_cac-file {number} {len(parts)} {zlib.crc32(part):08x} {base64.b64encode(part).decode()}"


def from_lines(log: str) -> bytes:
    """Return the archive whose lines are in a log.

    Raises:
        UserError: lines are missing or damaged.
    """
    parts: dict[int, bytes] = {}
    wanted = 0
    for number, count, checksum, content in _LINE.findall(log):
        part = base64.b64decode(content)
        if zlib.crc32(part) == int(checksum, 16):
            parts[int(number)] = part
        wanted = int(count)
    if not wanted or len(parts) < wanted:
        raise UserError(
            f"the study came back in {len(parts)} of {wanted or 'no'} parts: fetch it again, or search with --results "
            "s3://... so that it need not go through a log"
        )
    return b"".join(parts[number] for number in range(wanted))


def unpack(data: bytes, folder: Path) -> None:
    """Write an archive's files into a folder.

    Raises:
        UserError: it has something else than files below the folder.
    """
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            if not member.isfile() or PurePosixPath(member.name).is_absolute() or ".." in member.name.split("/"):
                raise UserError(f"an archive of a study must have files below its folder, got {member.name}")
            archive.extract(member, folder, filter="data")


if __name__ == "__main__":
    try:
        for text in as_lines(pack(Path(os.path.expandvars(sys.argv[1])))):
            print(text)
    except UserError as problem:
        sys.exit(str(problem))
