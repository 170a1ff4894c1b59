"""Framed files under truncation, corruption, kills, failing disks and many writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables.stage_tree import store
from trainables.storage import DiskFiles, remove_what_was_read

#: A payload that says itself whether it is whole: one byte, repeated as often as its value says.
WRITER = """
import sys
from pathlib import Path
from trainables.stage_tree.store import write_checked
from trainables.storage import DiskFiles
path = Path(sys.argv[1])
files = DiskFiles(path.parent)
print("ready", flush=True)
while True:
    for value in range(1, 9):
        write_checked(files, path.name, bytes([value]) * (value * 500_000))
"""


def write_checked(path: Path, payload: bytes) -> None:
    store.write_checked(DiskFiles(path.parent), path.name, payload)


def read_checked(path: Path) -> bytes | None:
    return store.read_checked(DiskFiles(path.parent), path.name)


def start_writer(path: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def assert_whole(payload: bytes) -> None:
    assert payload == bytes([payload[0]]) * (payload[0] * 500_000)


@given(payload=st.binary(max_size=300))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, payload: bytes) -> None:
    path = tmp_path_factory.mktemp("framed") / "deeper" / "file"
    write_checked(path, payload)
    assert read_checked(path) == payload
    assert os.listdir(path.parent) == ["file"]


def test_every_truncation_and_every_changed_byte_is_found_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_checked(path, b"stage\n\x00state")
    good = path.read_bytes()
    bad = [good[:length] for length in range(len(good))]
    bad += [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in range(len(good))]
    bad += [good + b"\n", b"\0" * len(good)]
    for content in bad:
        path.write_bytes(content)
        assert read_checked(path) is None, content
        assert not path.exists(), content


def test_a_bad_file_that_was_replaced_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bad")
    with path.open("rb") as file:
        write_checked(path, b"good")
        remove_what_was_read(path, os.fstat(file.fileno()))
    assert read_checked(path) == b"good"


def test_a_write_that_fails_says_so_and_leaves_what_was_there(tmp_path: Path) -> None:
    """The size limit stands for a full disk: the file system refuses in the middle of the file."""
    write_checked(tmp_path / "file", b"old")
    code = """
        import errno, resource, sys
        from pathlib import Path
        from trainables.stage_tree.store import write_checked
        from trainables.storage import DiskFiles
        path = Path(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            write_checked(DiskFiles(path.parent), path.name, bytes(1_000_000))
        except OSError as error:
            print(errno.errorcode[error.errno])
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout == "EFBIG\n"
    assert os.listdir(tmp_path) == ["file"]
    assert read_checked(tmp_path / "file") == b"old"


def test_readers_see_whole_files_while_two_processes_write(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writers = [start_writer(path) for _ in range(2)]
    try:
        seen: set[int] = set()
        while len(seen) < 4:
            assert all(writer.poll() is None for writer in writers)
            if payload := read_checked(path):
                assert_whole(payload)
                seen.add(payload[0])
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for _ in range(5):
        writer = start_writer(path)
        before = path.stat().st_ino if path.exists() else None
        while not path.exists() or path.stat().st_ino == before:  # it has written at least once
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        payload = read_checked(path)
        assert payload is not None
        assert_whole(payload)
    write_checked(path, b"after")
    assert read_checked(path) == b"after"
    assert {name for name in os.listdir(tmp_path) if not name.startswith(".")} == {"file"}
