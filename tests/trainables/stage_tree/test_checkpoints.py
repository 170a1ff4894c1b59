"""The checkpoint store: what it serves, and what it keeps under a budget."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

import pytest
from checkpoint_files import LARGE, content, object_bytes, object_files, object_of
from hypothesis import given
from hypothesis import strategies as st

from trainables.stage_tree.checkpoints import Checkpoints, Entry, StageWeight, to_drop

pytestmark = pytest.mark.usefixtures("each_test_is_a_process_of_its_own")


def test_what_is_put_is_read_and_listed_by_step(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, LARGE)
    for step, kind in [(20, "any"), (3, "any"), (1_000_000_000, "any"), (3, "gradskip-auto")]:
        assert store.put("stage", step, f"{kind} {step}".encode(), kind=kind)
    assert store.put("other", 7, b"")
    entries = Checkpoints(tmp_path, LARGE).entries("stage")  # as another process sees it
    assert [(entry.step, entry.kind) for entry in entries] == [
        (3, "any"),
        (3, "gradskip-auto"),
        (20, "any"),
        (1_000_000_000, "any"),
    ]
    for entry in entries:
        data = f"{entry.kind} {entry.step}".encode()
        assert entry.bytes == len(data)
        assert entry.sha256 == hashlib.sha256(data).hexdigest()
        assert store.read("stage", entry) == data
    assert store.read("other", store.entries("other")[0]) == b""
    assert store.entries("unknown") == []


def test_equal_content_is_stored_once_and_putting_again_changes_nothing(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, LARGE)
    assert store.put("a", 5, b"state")
    assert store.put("b", 5, b"state")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert len(object_files(tmp_path)) == 1
    assert store.put("a", 5, b"state")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_foreign_files_are_ignored(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 100)
    store.put("stage", 5, bytes(60))
    (entry,) = store.entries("stage")
    folder = tmp_path / "checkpoints" / "stage"
    good = f"000000007.any.60.{entry.sha256}"
    for name in (".nfs0001", good + ".tmp", "." + good, "7.any.60." + entry.sha256, good.upper(), good[:-1]):
        (folder / name).touch()
    (tmp_path / "checkpoints" / ".DS_Store").touch()
    (tmp_path / "checkpoints" / "README").touch()
    (tmp_path / "objects" / ".DS_Store").touch()
    (tmp_path / "objects" / "ab").touch()
    assert store.entries("stage") == [entry]
    assert store.put("stage", 8, b"1" * 60)  # thins, and scans all of it
    assert len(store.entries("stage")) == 1


@pytest.mark.parametrize("fault", ["truncated", "empty", "corrupt", "longer", "missing"])
def test_a_bad_content_is_never_served_and_can_be_put_again(tmp_path: Path, fault: str) -> None:
    store = Checkpoints(tmp_path, LARGE)
    bad, good = content("s", 1, 5000), content("s", 2, 5000)
    store.put("s", 1, bad)
    store.put("s", 2, good)
    path = object_of(tmp_path, bad)
    match fault:
        case "truncated":
            os.truncate(path, 4999)
        case "empty":
            os.truncate(path, 0)
        case "corrupt":
            path.write_bytes(bad[:2500] + bytes([bad[2500] ^ 1]) + bad[2501:])
        case "longer":
            path.write_bytes(bad + b"\0")
        case "missing":
            path.unlink()
    first, second = store.entries("s")
    assert store.read("s", first) is None
    assert store.entries("s") == [second]
    assert object_files(tmp_path) == [object_of(tmp_path, good)]
    assert store.read("s", first) is None
    assert store.read("s", second) == good
    assert store.put("s", 1, bad)
    assert store.read("s", store.entries("s")[0]) == bad


@given(
    budget=st.integers(0, 400),
    puts=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 120), st.integers(0, 3)), max_size=25
    ),
)
def test_the_budget_holds_and_all_that_is_listed_is_served(
    tmp_path_factory: pytest.TempPathFactory, budget: int, puts: list[tuple[str, int, int, int]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    store = Checkpoints(root, budget)
    known: dict[tuple[str, int], set[bytes]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of states larger than the budget
        for stage, step, size, variant in puts:
            data = bytes([variant]) * size
            known.setdefault((stage, step), set()).add(data)
            assert store.put(stage, step, data) is (size <= budget)
            assert object_bytes(root) <= budget
    named = set()
    for stage in "abc":
        for entry in store.entries(stage):
            data = store.read(stage, entry)
            assert data in known[stage, entry.step]
            named.add(entry.sha256)
    assert {path.name for path in object_files(root)} == named


def test_a_budget_smaller_than_a_checkpoint_keeps_none_and_says_so_once(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    store = Checkpoints(tmp_path, 99)
    assert not store.put("s", 1, bytes(100))
    assert not store.put("s", 2, bytes(100))
    (warning,) = recwarn.list
    assert "a checkpoint was not kept: it has 100 bytes and the budget is 99; training goes on" in str(warning.message)
    assert list(tmp_path.iterdir()) == []


def test_thinning_frees_a_tenth_and_keeps_what_is_worth_most(tmp_path: Path) -> None:
    weights = {
        "often": StageWeight(start=0, end=200, visits=20),
        "rare": StageWeight(start=0, end=200, visits=1),
    }
    store = Checkpoints(tmp_path, 2000, weights.__getitem__)
    for step in range(10, 110, 10):
        for stage in weights:
            assert store.put(stage, step, content(stage, step, 100))
    before = {stage: store.entries(stage) for stage in weights}
    assert object_bytes(tmp_path) == 2000  # full, and nothing thinned
    store.put("often", 110, content("often", 110, 100))
    before["often"].append(
        Entry(step=110, kind="any", bytes=100, sha256=object_of(tmp_path, content("often", 110, 100)).name)
    )
    dropped = to_drop(before, weights.__getitem__, 2100 - 1800)
    assert len(dropped) == 3
    assert {stage for stage, _ in dropped} == {"rare"}
    assert object_bytes(tmp_path) == 1800
    for stage, entries in before.items():
        assert store.entries(stage) == [entry for entry in entries if (stage, entry) not in dropped]


def test_the_last_name_of_a_shared_content_frees_it(tmp_path: Path) -> None:
    weights = {stage: StageWeight(start=0, end=100, visits=1) for stage in "abcd"}
    weights["d"] = StageWeight(start=0, end=100, visits=100)
    store = Checkpoints(tmp_path, 300, weights.__getitem__)
    shared = b"s" * 100
    for stage in "abd":
        store.put(stage, 50, shared)
    store.put("c", 50, b"c" * 100)
    store.put("c", 60, b"e" * 100)
    store.put("c", 70, b"f" * 100)  # thins: the shared one is worth most, for d
    assert [len(store.entries(stage)) for stage in "abd"] == [1, 1, 1]
    assert all(store.read(stage, store.entries(stage)[0]) == shared for stage in "abd")


@pytest.mark.slow
def test_what_others_write_counts(tmp_path: Path) -> None:
    """Four writers that know of each other only by the folder."""
    stores = [Checkpoints(tmp_path, 10_000) for _ in range(4)]
    for step in range(1, 301):
        stores[step % 4].put("s", step, content("s", step, 100))
        assert object_bytes(tmp_path) <= 10_000 + 4 * (500 + 100)
    assert object_bytes(tmp_path) > 8_000
