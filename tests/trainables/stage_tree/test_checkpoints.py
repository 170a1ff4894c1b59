"""Checkpoints: what the store serves, and what it keeps under a budget and through crashes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
from checkpoint_files import LARGE, content, file_of, stored, stored_bytes
from hypothesis import given
from hypothesis import strategies as st

from trainables.stage_tree import checkpoints
from trainables.stage_tree.checkpoints import Checkpoints, Entry, StageWeight, to_drop


@pytest.fixture(autouse=True)
def _each_test_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the warnings that come once a process."""
    monkeypatch.setattr(checkpoints, "_warned", set())


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


def test_putting_again_changes_nothing(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, LARGE)
    assert store.put("a", 5, b"state")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
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
    assert store.entries("stage") == [entry]
    assert store.put("stage", 8, b"1" * 60)  # thins, and scans all of it
    assert len(store.entries("stage")) == 1


@pytest.mark.parametrize("fault", ["truncated", "empty", "corrupt", "longer", "missing"])
def test_a_bad_content_is_never_served_and_can_be_put_again(tmp_path: Path, fault: str) -> None:
    store = Checkpoints(tmp_path, LARGE)
    bad, good = content("s", 1, 5000), content("s", 2, 5000)
    store.put("s", 1, bad)
    store.put("s", 2, good)
    path = file_of(tmp_path, bad)
    first, second = store.entries("s")
    match fault:
        case "truncated":
            os.truncate(path, 4999)
        case "empty":
            os.truncate(path, 0)
        case "corrupt":
            path.write_bytes(bad[:2500] + bytes([bad[2500] ^ 1]) + bad[2501:])
        case "longer":
            path.write_bytes(bad + b"\0")
    if fault == "missing":
        path.unlink()
    assert store.read("s", first) is None
    assert store.entries("s") == [second]
    assert stored(tmp_path) == [file_of(tmp_path, good)]
    assert store.read("s", first) is None
    assert store.read("s", second) == good
    assert store.put("s", 1, bad)
    assert store.read("s", store.entries("s")[0]) == bad


@pytest.mark.thorough
@pytest.mark.slow
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
            assert stored_bytes(root) <= budget
    listed = [(stage, entry) for stage in "abc" for entry in store.entries(stage)]
    for stage, entry in listed:
        assert store.read(stage, entry) in known[stage, entry.step]
    assert len(stored(root)) == len(listed)


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
    assert stored_bytes(tmp_path) == 2000  # full, and nothing thinned
    store.put("often", 110, content("often", 110, 100))
    before["often"].append(
        Entry(step=110, kind="any", bytes=100, sha256=hashlib.sha256(content("often", 110, 100)).hexdigest())
    )
    dropped = to_drop(before, weights.__getitem__, 2100 - 1800)
    assert len(dropped) == 3
    assert {stage for stage, _ in dropped} == {"rare"}
    assert stored_bytes(tmp_path) == 1800
    for stage, entries in before.items():
        assert store.entries(stage) == [entry for entry in entries if (stage, entry) not in dropped]


def test_an_ended_study_keeps_a_part(tmp_path: Path) -> None:
    for step in range(10, 110, 10):
        Checkpoints(tmp_path, 2000).put("one", step, content("one", step, 100))
    Checkpoints(tmp_path, 350).thin()
    assert 0 < stored_bytes(tmp_path) <= 350
    kept = Checkpoints(tmp_path, 350).entries("one")
    Checkpoints(tmp_path, 350).thin()
    assert Checkpoints(tmp_path, 350).entries("one") == kept


# --- crashes, full disks and several processes ------------------------------------------------------------------------


def make_old(path: Path, age_s: float = 1000.0) -> None:
    os.utime(path, (time.time() - age_s,) * 2)


def test_leftovers_of_crashes_are_collected_when_thinning_and_only_the_old_ones(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1000)
    store.put("s", 10, content("s", 10, 300))
    folder = tmp_path / "checkpoints" / "s"
    old, young = (folder / f".{name}.1-2.tmp" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    make_old(old)
    cut = folder / f"000000020.any.5.{'0' * 64}"  # of a machine that crashed
    cut.touch()
    store.put("s", 30, content("s", 30, 300))
    assert old.exists()  # within the budget: nothing is looked for
    store.put("s", 40, content("s", 40, 400))
    assert not old.exists()
    assert young.exists()
    assert not cut.exists()
    assert stored_bytes(tmp_path) <= 1000 + len(b"half")


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_a_full_disk_costs_checkpoints_and_not_the_training(tmp_path: Path) -> None:
    """The size limit stands for it: the file system refuses in the middle of the file."""
    code = """
        import resource, sys
        from pathlib import Path
        from trainables.stage_tree.checkpoints import Checkpoints
        store = Checkpoints(Path(sys.argv[1]), 10**9)
        print(store.put("s", 1, b"a" * 1000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        print(store.put("s", 2, b"b" * 1_000_000), store.put("s", 3, b"c" * 1_000_000))
        print(store.put("s", 4, b"d" * 1000))
    """
    done = run_python(code, tmp_path)
    assert done.stdout.split() == ["True", "False", "False", "True"]
    assert done.stderr.count("a checkpoint was not kept: File too large") == 1
    assert "training goes on" in done.stderr
    store = Checkpoints(tmp_path, LARGE)
    assert [store.read("s", entry) for entry in store.entries("s")] == [b"a" * 1000, b"d" * 1000]
    assert stored_bytes(tmp_path) == 2000


#: Puts states that any reader can check, thinning all the time.
WRITER = """
import random, sys
from pathlib import Path
from trainables.stage_tree.checkpoints import Checkpoints
root, size, budget, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
store, order = Checkpoints(root, budget), random.Random(seed)
print("ready", flush=True)
while True:
    step = order.randrange(200)
    assert store.put("stage", step, random.Random(f"stage {step}").randbytes(size))
"""


def start_writer(root: Path, *, size: int, budget: int, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", WRITER, *map(str, (root, size, budget, seed))]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "ready\n"
    return writer


def whole(root: Path) -> list[Path]:
    return [path for path in stored(root) if not path.name.startswith(".")]


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    size = 2_000_000
    for attempt in range(6):
        before = whole(tmp_path)
        writer = start_writer(tmp_path, size=size, budget=LARGE, seed=attempt)
        while whole(tmp_path) == before:
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        store = Checkpoints(tmp_path, LARGE)
        entries = store.entries("stage")
        assert len(entries) >= attempt
        for entry in entries:
            assert store.read("stage", entry) == content("stage", entry.step, size)
    # A later thinning removes what the killed ones left.
    for path in stored(tmp_path):
        make_old(path)
    assert Checkpoints(tmp_path, 2 * size).put("stage", 1000, bytes(size))
    assert len(stored(tmp_path)) == len(store.entries("stage")) <= 2


@pytest.mark.thorough
@pytest.mark.slow
def test_several_processes_put_thin_and_read_at_once(tmp_path: Path) -> None:
    size, budget = 10_000, 200_000
    writers = [start_writer(tmp_path, size=size, budget=budget, seed=seed) for seed in range(2)]
    store = Checkpoints(tmp_path, budget)
    served = missed = 0
    steps: set[int] = set()
    try:
        while served < 2000 or len(steps) < 100:
            assert all(writer.poll() is None for writer in writers)
            for entry in store.entries("stage"):
                data = store.read("stage", entry)
                if data is None:  # thinned since it was listed
                    missed += 1
                else:
                    assert data == content("stage", entry.step, size)
                    served += 1
                    steps.add(entry.step)
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert stored_bytes(tmp_path) <= budget + 2 * (budget // 20 + size) + 2 * size
    assert served > missed


# --- what is dropped, against counting every fork step by step --------------------------------------------------------

Stages = dict[str, list[Entry]]


def entry(step: int, *, size: int = 1, kind: str = "any", content: str | None = None) -> Entry:
    return Entry(step=step, kind=kind, bytes=size, sha256=content or f"{kind}-{step}")


def retraining(steps: list[int], weight: StageWeight) -> Fraction:
    """What forks cost in the mean with checkpoints at these steps: each from the nearest one at or before it."""
    total = 0
    for fork in range(weight.start, weight.end):
        total += fork - max([step for step in steps if step <= fork], default=weight.start)
    return Fraction(total * weight.visits, weight.end - weight.start)


def greedy(stages: Stages, weights: dict[str, StageWeight], bytes_to_free: int) -> list[tuple[str, Entry]]:
    """The rule as one would write it down, with every value counted anew after each drop."""
    kept = sorted(
        ((stage, one) for stage, entries in stages.items() for one in entries),
        key=lambda item: (item[0], item[1].kind, item[1].step, item[1].sha256),
    )
    dropped: list[tuple[str, Entry]] = []

    def missed(stage: str, one: Entry) -> Fraction:
        steps = [other.step for at, other in kept if at == stage and other.kind == one.kind]
        without = steps.copy()
        without.remove(one.step)
        return (retraining(without, weights[stage]) - retraining(steps, weights[stage])) / one.bytes

    while kept and sum(one.bytes for _, one in dropped) < bytes_to_free:
        least = min(kept, key=lambda item: missed(*item))
        kept.remove(least)
        dropped.append(least)
    return dropped


@st.composite
def forests(draw: st.DrawFn) -> tuple[Stages, dict[str, StageWeight], int]:
    """Spans and sizes are such that no value needs rounding, so both sides see the same ties."""
    stages: Stages = {}
    weights: dict[str, StageWeight] = {}
    sizes = {content: draw(st.sampled_from([1, 2, 8])) for content in "abcdefgh"}
    for stage in ("root", "left", "right")[: draw(st.integers(1, 3))]:
        start, span = draw(st.integers(0, 9)), draw(st.sampled_from([1, 4, 16]))
        weights[stage] = StageWeight(start=start, end=start + span, visits=draw(st.integers(0, 5)))
        places = st.tuples(
            st.integers(start, start + span - 1), st.sampled_from(["any", "ema"]), st.sampled_from("abcdefgh")
        )
        stages[stage] = [
            entry(step, kind=kind, content=content, size=sizes[content])
            for step, kind, content in draw(st.lists(places, unique=True, max_size=8))
        ]
    return stages, weights, draw(st.integers(-1, 40))


@pytest.mark.slow
@pytest.mark.thorough
@given(forests())
def test_the_choice_is_the_greedy_one(forest: tuple[Stages, dict[str, StageWeight], int]) -> None:
    stages, weights, bytes_to_free = forest
    assert to_drop(stages, weights.__getitem__, bytes_to_free) == greedy(stages, weights, bytes_to_free)
