"""Lines of a script's output, and the end of a log, against the whole text in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainables.script.run import GrowingFile, tail

#: Bytes that make line ends, broken and whole UTF-8.
MARKS = st.sampled_from([b"\r", b"\n", b"a", b"\xc3", b"\xa4"])


def lines_of(data: bytes) -> list[str]:
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n") if text else []


@given(st.lists(st.binary(max_size=9) | st.lists(MARKS).map(b"".join), max_size=4))
def test_the_lines_of_any_bytes(parts: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(b"before\n")
        file, found = GrowingFile(path, 7), []
        for part in parts:
            with path.open("ab") as end:
                end.write(part)
            found += file.lines(to_the_end=False)
        found += file.lines(to_the_end=True)
        file.close()
    # A line end that comes in two parts makes an empty line more.
    assert list(filter(None, found)) == list(filter(None, lines_of(b"".join(parts))))


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
