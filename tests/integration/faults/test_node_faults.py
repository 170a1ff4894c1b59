"""Faults of nodes: a worker node is killed in a trial, then the head in the next search."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from fault_checks import assert_no_process, assert_nothing_lost, finished_rows, new_mark, running, started, wait_until
from redis_server import redis_server as redis_server
from runs import assert_equals_alone
from studies import study_of
from two_raylets import Raylets

import analysis
from trainables.runtime.checkpoint_folder import CHECKPOINT_FILE
from trainables.stage_tree.coordinator import RayLeases, start_coordinator
from tune_cac.ray_backend.session import ray_session

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

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


def two_folders(study: Path) -> list[str]:
    """Return the folders of two running trials; a trial runs a moment before its folder is written down."""
    if len(numbers := running(study)) != 2:
        return []
    trials = study_of(study).trials
    folders = [trials[number].user_attrs.get("folder") for number in numbers]
    return folders if all(folders) else []


def test_killed_nodes_cost_no_finished_trial(cluster: tuple[Raylets, dict[str, str]], tmp_path: Path) -> None:
    raylets, mark = cluster
    environment = {**mark, "RAY_ADDRESS": raylets.address}
    first, second = tmp_path / "results" / "first", tmp_path / "results" / "second"
    process = started(
        tmp_path, environment, *SEARCH, "--name", "first", "--trials", "4", "--epochs", "40", "--no-sharing"
    )

    def two_with_checkpoints() -> bool:
        """Of trials that run now; a folder may be there before its file."""
        folders = two_folders(first)
        return bool(folders) and all(list((first / f).glob(f"checkpoint_*/{CHECKPOINT_FILE}")) for f in folders)

    wait_until(lambda: finished_rows(first) and two_with_checkpoints(), "two at a time", process=process)
    before = finished_rows(first)
    raylets.tell("kill worker")
    _, err = process.communicate(timeout=300)
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
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert "the Ray cluster" in err.splitlines()[-1]
    assert "search --resume results/second" in err.splitlines()[-1]
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = started(tmp_path, {**alone, **mark}, "search", "--resume", "second")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert_nothing_lost(second, before)
    assert (analysis.load(second)["status"] == "completed").sum() == 4


def assert_coordinator_outlives_its_node(raylets: Raylets) -> None:
    """Kill the worker node with a coordinator on it: it is started on the head, without claims, and is asked again."""

    def node_of(actor: Any) -> str:
        return str(ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())))

    with ray_session(cpus=1, address=raylets.address):
        head = ray.get_runtime_context().get_node_id()
        for number in range(100):  # Ray places them at random
            actor = start_coordinator(f"coordinator-{number}")
            if node_of(actor) != head:
                break
        leases = RayLeases(f"coordinator-{number}")
        assert leases.claim("stage", "first", 3600.0)
        assert not leases.claim("stage", "second", 3600.0)
        raylets.tell("kill worker")
        wait_until(lambda: node_of(actor) == head, "the coordinator's move")
        assert leases.claim("stage", "second", 3600.0)
        assert not leases.claim("stage", "first", 3600.0)


def test_a_head_that_keeps_its_state_in_redis_comes_back_and_the_search_goes_on(
    redis_server: str, tmp_path: Path
) -> None:
    mark, study = new_mark(), tmp_path / "results" / "s"
    raylets = Raylets({**mark, "RAY_REDIS_ADDRESS": redis_server})
    try:
        environment = {**mark, "RAY_ADDRESS": raylets.address}
        process = started(tmp_path, environment, *SEARCH, "--name", "s", "--trials", "4", "--epochs", "25")
        wait_until(lambda: finished_rows(study) and running(study), "a trial after the baseline", process=process)
        before = finished_rows(study)
        raylets.tell("kill gcs")
        time.sleep(5)  # less than a search waits for it
        raylets.tell("start gcs")
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert_nothing_lost(study, before)
        trials = analysis.load(study)
        assert trials["status"].tolist() == ["completed"] * 4
        for _, row in trials.iterrows():
            assert_equals_alone(row)
        assert_coordinator_outlives_its_node(raylets)
    finally:
        raylets.close()
    assert_no_process(mark)
