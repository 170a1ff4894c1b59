"""Lines out of pieces of bytes, and the end of a log, against the whole text in memory."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainables.script.run import cut_lines, tail

#: Bytes that make line ends, broken and whole UTF-8.
MARKS = st.sampled_from([b"\r", b"\n", b"a", b"\xc3", b"\xa4"])
PIECES = st.lists(st.binary(max_size=5) | st.lists(MARKS).map(b"".join))


class Pieces(io.RawIOBase):
    """A pipe from which each read gives one piece."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = (piece for piece in pieces if piece)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = next(self.pieces, b"")
        buffer[: len(piece)] = piece
        return len(piece)


def split_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of a text file like the one that `subprocess` opens on the guard's output."""
    text = io.TextIOWrapper(io.BufferedReader(Pieces(pieces)), encoding="utf-8", errors="replace")
    return cut_lines(text.readline)


def lines_of(data: bytes) -> list[str]:
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n") if text else []


@given(PIECES)
def test_the_same_lines_wherever_the_pieces_end(pieces: list[bytes]) -> None:
    assert list(split_lines(pieces)) == lines_of(b"".join(pieces))


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=9)


@given(st.lists(TEXT), st.integers(0, 9))
def test_the_last_lines_of_a_file(lines: list[str], n: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())
        assert tail(path, n) == (lines[-n:] if n else [])
        start = len("".join(f"{line}\n" for line in lines[:3]).encode())
        assert tail(path, n, start=start) == (lines[3:][-n:] if n else [])


def test_a_progress_bar_shows_its_last_state(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"start\r\n 1%\r 2%\r 3%\nend\n50%\r100%\r")
    assert tail(path, 9) == ["start", " 3%", "end", "100%"]
    path.write_bytes(b"")
    assert tail(path, 9) == []
