"""What crashes, full disks and several processes leave of a checkpoint store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from checkpoint_files import LARGE, content, object_bytes, object_files, object_of

from trainables.stage_tree.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("each_test_is_a_process_of_its_own")


def index_files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").rglob("*") if path.is_file())


def make_old(path: Path, age_s: float = 1000.0) -> None:
    os.utime(path, (time.time() - age_s,) * 2)


def test_leftovers_of_crashes_are_collected_when_thinning_and_only_the_old_ones(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path, 1000)
    store.put("s", 10, content("s", 10, 300))
    left = {name: object_of(tmp_path, name.encode() * 100) for name in ("A", "B")}
    for name, path in left.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode() * 100)
    temporaries = {name: left["A"].with_name(f".{name}.1-2.tmp") for name in ("old", "young")}
    for path in temporaries.values():
        path.write_bytes(b"half")
    make_old(left["A"])
    make_old(temporaries["old"])
    (tmp_path / "checkpoints" / "s" / f"000000020.any.5.{'0' * 64}").touch()  # named, with no content
    store.put("s", 30, content("s", 30, 300))
    assert left["A"].exists()  # within the budget: nothing is looked for
    store.put("s", 40, content("s", 40, 400))
    assert not left["A"].exists()
    assert left["B"].exists()
    assert not temporaries["old"].exists()
    assert temporaries["young"].exists()
    assert "000000020" not in " ".join(index_files(tmp_path))
    assert object_bytes(tmp_path) <= 1000 + len(b"half")


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
    assert object_bytes(tmp_path) == 2000


def test_a_folder_that_cannot_be_written_costs_checkpoints_and_not_the_training(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "store").touch()  # a file in the way refuses root too
    assert not Checkpoints(tmp_path / "store", LARGE).put("s", 1, b"state")
    assert not Checkpoints(tmp_path / "store", LARGE).put("s", 2, b"state")
    (warning,) = recwarn.list
    assert "a checkpoint was not kept: Not a directory" in str(warning.message)


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
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    size = 2_000_000
    for attempt in range(6):
        before = index_files(tmp_path)
        writer = start_writer(tmp_path, size=size, budget=LARGE, seed=attempt)
        while index_files(tmp_path) == before:
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        store = Checkpoints(tmp_path, LARGE)
        entries = store.entries("stage")
        assert len(entries) >= attempt
        for entry in entries:
            assert store.read("stage", entry) == content("stage", entry.step, size)
    # A later thinning removes what the killed ones left.
    for path in object_files(tmp_path):
        make_old(path)
    assert Checkpoints(tmp_path, 2 * size).put("stage", 1000, bytes(size))
    assert len(object_files(tmp_path)) == len(store.entries("stage")) <= 2


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
    assert object_bytes(tmp_path) <= budget + 2 * (budget // 20 + size) + 2 * size
    assert served > missed


def test_the_store_needs_neither_torch_nor_ray() -> None:
    code = """
        import sys
        import trainables.stage_tree.checkpoints, trainables.stage_tree.leases
        print(sorted({"torch", "ray", "numpy"} & set(sys.modules)))
    """
    assert run_python(code).stdout == "[]\n"
