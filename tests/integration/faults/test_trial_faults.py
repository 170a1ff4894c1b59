"""Faults of a trial: it hangs, its loss is no number, its GPU has no memory, its process is killed for its node's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fault_checks import (
    assert_no_process,
    assert_nothing_lost,
    finished_rows,
    new_mark,
    records,
    running,
    started,
    wait_until,
)
from faulty_workload import begin_fault, holder_of_fault, write_faulty
from two_raylets import Raylets

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

#: Far more than any step here takes beside three other tests on two cores: only what hangs may reach it.
TRIAL_TIMEOUT_S = 40
SEARCH = ("search", "--space", "manual_layers", "--name", "s", "--no-controls", "--concurrency", "2")


def test_a_trial_that_hangs_one_without_numbers_and_one_without_memory_end_and_no_other(tmp_path: Path) -> None:
    """The one that hangs holds Python's lock in C, so only its process's end ends it."""
    mark, study = new_mark(), tmp_path / "results" / "s"
    workload = write_faulty(tmp_path)
    arguments = (*SEARCH, "--workload", workload, "--epochs", "15", "--trials", "7", "--no-sharing")
    process = started(tmp_path, mark, *arguments, "--trial-timeout", f"{TRIAL_TIMEOUT_S}s")
    wait_until(lambda: finished_rows(study), "the baseline's end", process=process)
    before = finished_rows(study)
    begin_fault(tmp_path, "hang")
    hung = wait_until(lambda: holder_of_fault(tmp_path, "hang"), "the hang", process=process)
    begin_fault(tmp_path, "nan")
    begin_fault(tmp_path, "cuda_memory")
    wait_until(lambda: not psutil.pid_exists(hung), "the end of what hangs", process=process)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    errors = [record["error"] for record in records(study) if record["status"] == "failed"]
    assert sorted(error.partition(":")[0] for error in errors) == [
        "OutOfMemoryError",
        "TrainingDiverged",
        f"it reported nothing for {TRIAL_TIMEOUT_S} s (--trial-timeout), so its process was ended",
    ], err
    assert any("with a larger --gpus-per-trial fewer trials share a GPU" in error for error in errors)
    assert sum(record["status"] == "completed" for record in records(study)) == 4
    (stacks,) = study.glob("ray/*/*/hung.txt")  # of trials that did not hang it is gone
    assert "faulty.py" in stacks.read_text()
    assert_nothing_lost(study, before)
    assert_no_process(mark)


@pytest.fixture
def small_nodes() -> Iterator[tuple[dict[str, str], str]]:
    """A cluster whose nodes end a process when 3 GiB more are used than now; its mark and its address."""
    memory = psutil.virtual_memory()
    most = (memory.total - memory.available + 3 * 2**30) / memory.total
    mark = new_mark()
    limits = {"RAY_memory_usage_threshold": f"{most:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    cluster = Raylets({**mark, **limits})
    try:
        yield mark, cluster.address
    finally:
        cluster.close()
    assert_no_process(mark)


def test_a_trial_that_uses_up_memory_is_begun_again_with_fewer_beside_it(
    small_nodes: tuple[dict[str, str], str], tmp_path: Path
) -> None:
    """Ray ended the trial, and Ray Tune then the whole search: "Caught unexpected exception"."""
    mark, address = small_nodes
    study = tmp_path / "results" / "s"
    workload = write_faulty(tmp_path)
    arguments = (*SEARCH, "--workload", workload, "--epochs", "25", "--trials", "4", "--no-sharing")
    process = started(tmp_path, {**mark, "RAY_ADDRESS": address}, *arguments)
    wait_until(lambda: finished_rows(study) and len(running(study)) == 2, "two at a time", process=process)
    before = finished_rows(study)
    begin_fault(tmp_path, "memory")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "memory ran out with 2 trials at a time: from here on at most 1 trial" in err
    assert "failed and is begun again: out of memory: its node's memory was used up, " in err
    assert "with --concurrency fewer trials share the memory" in err
    assert sum(record["status"] == "completed" for record in records(study)) == 4
    assert {record["status"] for record in records(study)} == {"completed", "interrupted"}
    assert_nothing_lost(study, before)
    assert not [pid for pid in (holder_of_fault(tmp_path, "memory"),) if pid in psutil.pids()]
