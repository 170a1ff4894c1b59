"""What a job gets from here, and how its study comes back through a log."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from studies import result_row, write_study

import analysis
from trainables.config import TrialConfig
from trainables.errors import UserError
from tune_cac import __version__
from tune_cac.jobs.packing import as_lines, from_lines, pack, unpack
from tune_cac.jobs.shipping import check_size, shipped_files, write_archive, write_wheel


def write(folder: Path, *names: str, size: int = 1) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))


def shipped(folder: Path, *left_out: str) -> list[str]:
    return [path.as_posix() for path in shipped_files(folder, left_out=left_out)]


def test_what_git_ignores_and_what_nobody_needs_is_not_shipped(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "sub/net.py", "sub/notes.txt", "data/a.bin", "logs/x.log", "keep.log", "a b/ä.py")
    write(tmp_path, "env/pyvenv.cfg", "env/lib/x.py", "results/s/study.json", "results/s/best.env", ".git/x")
    write(tmp_path, "sub/__pycache__/net.pyc", "results/.images/x")
    (tmp_path / ".gitignore").write_text("data/\n*.log\n!keep.log\n")
    (tmp_path / "sub" / ".gitignore").write_text("notes.txt\n")
    (tmp_path / "link").symlink_to("/etc/passwd")
    wanted = [".gitignore", "a b/ä.py", "keep.log", "sub/.gitignore", "sub/net.py", "train.py"]
    assert shipped(tmp_path) == wanted
    assert shipped(tmp_path, "results/", "*.py") == [".gitignore", "keep.log", "sub/.gitignore"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)  # the same where the folder is git's
    assert shipped(tmp_path) == wanted
    archive = tmp_path / "out.zip"
    write_archive(tmp_path, shipped_files(tmp_path), archive)
    assert zipfile.ZipFile(archive).namelist() == wanted


def test_too_much_is_refused_with_the_largest(tmp_path: Path) -> None:
    write(tmp_path, "small.py", "data/a", "data/b", size=300_000)
    write(tmp_path, "large.bin", size=1_500_000)
    files = shipped_files(tmp_path)
    assert check_size(tmp_path, files, 3) == 2_400_000
    with pytest.raises(
        UserError, match=r"at most 2 MB to ship, got 2 MB in 4 files \(large.bin 2 MB, data 1 MB, small"
    ):
        check_size(tmp_path, files, 2)


@pytest.mark.slow
def test_the_wheel_is_this_package(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, __version__)
    assert write_wheel(tmp_path, __version__) == wheel  # equal contents, equal name
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "import tune_cac, trainables, analysis, search_spaces; print(tune_cac.__file__, trainables.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True, check=True,
        env={"PATH": "", "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert all(name.startswith(str(tmp_path / "site")) for name in done.stdout.split())


def test_a_study_comes_back_through_a_log(tmp_path: Path) -> None:
    rows = [{"row": result_row(), "config": TrialConfig(method="none", epochs=2).to_dict()}]
    study = write_study(tmp_path / "s", rows).root
    write(study, "tree/objects/ab/x", "ray/run-000/trial-00000/checkpoint_000001/run.pt", "search.lock", size=9)
    (study / "noise").write_bytes(random.Random(0).randbytes(60_000))
    data = pack(study)
    lines = list(as_lines(data))
    assert len(lines) > 4
    log = "\n".join(["INFO of Ray", lines[1], lines[0], "between", *lines[2:], lines[0]])
    assert from_lines(log) == data
    for torn in (lines[1:], [lines[0][:-8], *lines[1:]], []):
        with pytest.raises(UserError, match="the study came back in"):
            from_lines("\n".join(torn))
    unpack(data, tmp_path / "back")
    assert len(analysis.load(tmp_path / "back")) == 1
    assert (tmp_path / "back" / "noise").read_bytes() == (study / "noise").read_bytes()
    assert not [p for p in (tmp_path / "back").rglob("*") if p.name in ("x", "run.pt", "search.lock")]


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out"])
def test_an_archive_writes_only_below_its_folder(name: str, tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(UserError, match="must have files below its folder, got"):
        unpack(made.getvalue(), tmp_path / "s")
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w:gz") as archive:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(member)
    with pytest.raises(UserError, match="must have files below its folder, got link"):
        unpack(link.getvalue(), tmp_path / "s")
    assert not (tmp_path / "out").exists()
