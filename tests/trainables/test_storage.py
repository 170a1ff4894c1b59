"""Files of a study: one contract for a disk and for a real S3 server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from object_storage import s3, s3_environment  # noqa: F401 - fixtures

from trainables.errors import UserError
from trainables.stage_tree.store import read_checked, write_checked
from trainables.storage import Files, check_place, files_of


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    return tmp_path / "study" if request.param == "disk" else str(request.getfixturevalue("s3"))


@pytest.fixture
def files(place: str | Path) -> Files:
    return files_of(place)


def test_what_is_written_is_listed_and_read(files: Files) -> None:
    files.write("tree/a/b", [b"one", b"two"])
    files.write("tree/c", [])
    assert files.read("tree/a/b") == b"onetwo"
    assert files.read("tree/c") == b""
    assert sorted(files.names("tree")) == ["a", "c"]
    assert files.names("tree/a") == ["b"]
    assert (files.size("tree/a/b"), files.size("tree/a"), files.size("no")) == (6, files.size("tree/a"), None)
    found = {file.name: file for file in files.scan("tree")}
    assert {name: file.bytes for name, file in found.items()} == {"tree/a/b": 6, "tree/c": 0}
    assert all(abs(time.time() - file.changed_s) < 60 for file in found.values())
    files.write("tree/c", [b"new"])
    assert files.read("tree/c") == b"new"


def test_what_is_not_there(files: Files) -> None:
    assert files.names("no/folder") == []
    assert list(files.scan("no/folder")) == []
    files.remove("no")
    for read in (lambda: files.read("no"), lambda: files.read_if("no", bool)):
        with pytest.raises(FileNotFoundError):
            read()


def test_a_file_that_is_not_right_is_removed(files: Files) -> None:
    write_checked(files, "root.json", b"{}")
    assert read_checked(files, "root.json") == b"{}"
    files.write("root.json", [b"torn"])
    assert read_checked(files, "root.json") is None
    assert files.names("") == []


def test_an_empty_file_and_its_time(files: Files) -> None:
    files.write("index/x", ())
    assert files.size("index/x") == 0
    assert files.names("index") == ["x"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://key:secret@bucket/x", r"--results must have no credentials in it, got s3://...@bucket/x: set them"),
        ("s3://bucket/x?secret_key=a", "must have no credentials"),
        ("s3:///x", "--results must be a folder or a URI such as s3://bucket/studies, got s3:///x"),
        ("s3://bucket/../x", "must be a folder or a URI"),
    ],
)
def test_places_that_are_refused(place: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        check_place(place, "--results")
    assert "secret@" not in str(raised.value)


def test_a_storage_that_is_unknown() -> None:
    with pytest.raises(
        UserError, match="storage must be a URI that pyarrow can open, such as s3://bucket/studies, got f"
    ):
        files_of("foo://bar/x")
