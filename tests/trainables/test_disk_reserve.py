"""Checkpoints on a disk that is nearly full, a real one of 20 MB: they leave what the journal needs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainables.runtime.checkpoint_folder import has_room
from trainables.stage_tree.checkpoints import Checkpoints
from trainables.storage import lacking_bytes

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk can be mounted by root alone: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_the_reserve_is_a_tenth_of_a_small_disk_and_256_mib_of_a_large_one(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lacking_bytes(small_disk / "not" / "there", 18 * MIB - 4096) == 0
    assert MIB <= lacking_bytes(small_disk, 19 * MIB) < MIB + 100_000
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Disk", (), {"total": 10**12, "free": 2**28 + 5}))
    assert lacking_bytes(tmp_path, 5) == 0
    assert lacking_bytes(tmp_path, 7) == 2


def fill(path: Path) -> None:
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(MIB // 4))


def test_a_tree_gives_its_checkpoints_back_before_it_takes_the_reserve(
    small_disk: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainables.stage_tree.checkpoints._warned", set())
    store = Checkpoints(small_disk / "tree", 10**9)
    for step in range(40):  # twice what fits
        assert store.put("s", step, bytes([step]) * MIB)
        assert lacking_bytes(small_disk, 0) == 0
    kept = store.entries("s")
    assert 12 <= len(kept) <= 18
    assert all(store.read("s", entry) == bytes([entry.step]) * MIB for entry in kept)
    (small_disk / "optuna.journal").write_bytes(bytes(MIB))  # what the reserve is for
    assert store.put("s", 50, b"small")
    assert lacking_bytes(small_disk, 0) == 0
    assert 1 < len(store.entries("s")) <= len(kept)
    # Another program takes all of the disk, again and again: checkpoints go, and training goes on without.
    stored = []
    for step in range(60, 70):
        fill(small_disk / "other")
        stored.append(store.put("s", step, bytes(4 * MIB)))
        assert lacking_bytes(small_disk, 0) == 0 or not stored[-1]
    assert stored == sorted(stored, reverse=True)
    assert stored[0]
    assert store.entries("s") == []
    (warning,) = recwarn.list
    assert "a checkpoint was not kept: the disk of" in str(warning.message)


def test_a_trial_of_its_own_keeps_no_checkpoint_on_a_full_disk(small_disk: Path) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    assert has_room(model, small_disk)
    (small_disk / "other").write_bytes(bytes(7 * MIB))
    with pytest.warns(UserWarning, match="a checkpoint was not kept, training goes on: the disk of .* is nearly full"):
        assert not has_room(model, small_disk)
