"""Faults of nodes: a worker node is killed in a trial, then the head in the next search."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_checks import assert_no_process, assert_nothing_lost, finished_rows, new_mark, running, started, wait_until
from runs import assert_equals_alone
from studies import study_of
from two_raylets import Raylets

import analysis

pytestmark = pytest.mark.slow

SEARCH = ("search", "--no-controls", "--concurrency", "2", "--checkpoint-every", "0")


@pytest.fixture
def cluster() -> Iterator[tuple[Raylets, dict[str, str]]]:
    mark = new_mark()
    raylets = Raylets(mark)
    try:
        yield raylets, mark
    finally:
        raylets.close()
    assert_no_process(mark)


def test_killed_nodes_cost_no_finished_trial(cluster: tuple[Raylets, dict[str, str]], tmp_path: Path) -> None:
    raylets, mark = cluster
    environment = {**mark, "RAY_ADDRESS": raylets.address}
    first, second = tmp_path / "results" / "first", tmp_path / "results" / "second"
    process = started(
        tmp_path, environment, *SEARCH, "--name", "first", "--trials", "4", "--epochs", "25", "--no-sharing"
    )
    wait_until(lambda: finished_rows(first) and len(running(first)) == 2, "two at a time", process=process)
    folders = [study_of(first).trials[number].user_attrs["folder"] for number in running(first)]
    wait_until(lambda: all(list((first / f).glob("checkpoint_*")) for f in folders), "checkpoints", process=process)
    before = finished_rows(first)
    raylets.tell("kill worker")
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert err.count("failed and is begun again: its worker died") == 1
    assert_nothing_lost(first, before)
    assert any("checkpoint_" in trial.user_attrs.get("resume_from", "") for trial in study_of(first).trials)
    trials = analysis.load(first)
    assert (trials["status"] == "completed").sum() == 4
    for _, row in trials[trials["status"] == "completed"].iterrows():
        assert_equals_alone(row)
    # The head: the search ends in one sentence, and goes on without the cluster.
    process = started(tmp_path, environment, *SEARCH, "--name", "second", "--trials", "4", "--epochs", "25")
    wait_until(lambda: finished_rows(second) and running(second), "a trial after the baseline", process=process)
    before = finished_rows(second)
    raylets.tell("kill head")
    _, err = process.communicate(timeout=150)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert "the Ray cluster" in err.splitlines()[-1]
    assert "search --resume results/second" in err.splitlines()[-1]
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = started(tmp_path, {**alone, **mark}, "search", "--resume", "second")
    _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert_nothing_lost(second, before)
    assert (analysis.load(second)["status"] == "completed").sum() == 4
