"""A search on several nodes that share the study's storage. The nodes are Ray's own, all on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands_run import Run
from ray.cluster_utils import Cluster
from runs import assert_equals_alone
from studies import result_row, write_study

import analysis
from trainables.config import TrialConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of two nodes with a processor each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def manual(*stops: int) -> dict[str, Any]:
    return TrialConfig(epochs=12, CAC_STOP_LAYER_NUM=(2, 5), CAC_STOP_LAYER_ITR=stops).to_dict()


def test_trials_on_two_nodes_share_training(two_nodes: str, tune_cac_command: Run, tmp_path: Path) -> None:
    """A confirmation: its first two runs begin at once, so that both nodes are used from the start."""
    layout = write_study(
        tmp_path / "results" / "s",
        [
            {"row": result_row(), "config": TrialConfig(method="none", epochs=12).to_dict()},
            *({"row": result_row(saved=0.3), "config": manual(60, last)} for last in (70, 80)),
        ],
    )
    done = tune_cac_command(
        "confirm", "s", "--top", "2", "--seeds", "3", "--concurrency", "2", RAY_ADDRESS=two_nodes
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    study = layout.confirmation.root
    trials = analysis.load(study)
    assert trials["status"].tolist() == ["completed"] * 9
    assert trials["search_flops"].sum() < 0.7 * trials["executed_flops"].sum()
    for _, row in trials.iterrows():
        assert_equals_alone(row)
    # A node has one processor, so two processes are on two nodes.
    results = [json.loads(path.read_text().splitlines()[-1]) for path in study.glob("ray/*/*/result.json")]
    assert len({row["pid"] for row in results}) == 2
