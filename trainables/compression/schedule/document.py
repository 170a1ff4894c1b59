"""A schedule's text, file or mapping as plain values with line numbers. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainables.compression.schedule.positions import TEXT, Document, NotYaml, compose
from trainables.compression.schedule.problems import ScheduleError

#: Largest accepted file, in bytes.
MOST_BYTES = 10_000_000


def open_document(given: str | os.PathLike[str] | Mapping[str, Any], source: str | None = None) -> Document:
    """Read a schedule's YAML.

    Args:
        given: a file's path; or the text itself, if it has several lines or begins with ``{``; or a mapping.
        source: name used in messages; by default the file's name.

    Raises:
        ScheduleError: the file cannot be read, is larger than `MOST_BYTES`, not UTF-8, or not YAML.
    """
    if isinstance(given, Mapping):
        return Document(source or TEXT, plain(given))
    if isinstance(given, str) and ("\n" in given or given.lstrip().startswith("{")):
        source, text = source or TEXT, given
    else:
        source = source or str(given)
        text = _text_of(Path(given), source)
    try:
        return compose(text, source)
    except NotYaml as error:
        raise ScheduleError([f"{source}{'' if error.line is None else f':{error.line}'}: {error.text}"]) from None


def _text_of(path: Path, source: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ScheduleError([f"cannot read schedule {source}: {error.strerror or error}"]) from None
    except ValueError as error:  # a zero byte in the name
        raise ScheduleError([f"cannot read schedule {source!r}: {error}"]) from None
    if len(content) > MOST_BYTES:
        raise ScheduleError([f"{source}: a schedule must not be larger than {MOST_BYTES // 10**6} MB"])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ScheduleError([f"{source}:{line}: must be UTF-8 text, got byte 0x{content[error.start]:02x}"]) from None


def plain(value: Any) -> Any:
    """Convert mappings to dicts with text keys and sequences to lists, recursively."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
