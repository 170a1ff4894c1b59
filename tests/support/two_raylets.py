"""A Ray cluster of a head and a worker node on this machine, each a raylet with its own temporary folder and ports.

As a program it holds the cluster and takes one command a line: ``kill worker``, ``kill head`` (SIGKILL of raylet
and GCS), ``kill gcs`` and ``start gcs`` (at the same port, with the state that Redis kept). It ends with its input.
`Raylets` runs it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tune_cac.ray_backend.session import starting_alone

#: Prefix of answers, since Ray may print of its own.
_ANSWER = "raylets: "


class Raylets:
    """Start the cluster and tell it what happens.

    Args:
        environment: additional variables of all of its processes.
        cpus: of each node.
    """

    def __init__(self, environment: dict[str, str], cpus: int = 1) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(cpus)],
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.address = self._answer()
        """Address of the head, for ``RAY_ADDRESS``."""

    def tell(self, command: str) -> str:
        """Send a command and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                return line.removeprefix(_ANSWER).strip()
        raise AssertionError("the cluster did not start")

    def close(self) -> None:
        """End the cluster."""
        self._process.communicate(timeout=60)


def _answer(text: str) -> None:
    print(f"{_ANSWER}{text}", flush=True)


def _kill(node: Any) -> None:
    """SIGKILL a node's raylet, and the head's GCS: no process of it can say goodbye."""
    for kind in ("gcs_server", "raylet"):
        for started in node.all_processes.get(kind, []):
            started.process.send_signal(signal.SIGKILL)
            started.process.wait()
    node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def _hold(cpus: int) -> None:
    from ray.cluster_utils import Cluster

    folders: list[str] = []

    def folder() -> str:
        folders.append(tempfile.mkdtemp(prefix="rl", dir="/tmp"))  # short, for the paths of sockets are limited
        return folders[-1]

    os.environ["RAY_TMPDIR"] = folder()  # where Ray notes the address of the cluster that began last
    Path(folders[-1], "ray").mkdir()

    head = {"num_cpus": cpus, "include_dashboard": False, "temp_dir": folder()}
    with starting_alone():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        worker = cluster.add_node(num_cpus=cpus, temp_dir=folder())
        cluster.wait_for_nodes()
    _answer(cluster.address)
    try:
        for line in sys.stdin:
            match line.split():
                case ["kill", "worker"]:
                    _kill(worker)
                    cluster.worker_nodes.discard(worker)
                case ["kill", "head"]:
                    _kill(cluster.head_node)
                    cluster.head_node = None
                case ["kill", "gcs"]:
                    cluster.head_node.all_processes["gcs_server"][0].process.kill()
                    cluster.head_node.kill_gcs_server(check_alive=False)
                case ["start", "gcs"]:
                    cluster.head_node.start_gcs_server()
            _answer("done")
    finally:
        for node in [*cluster.worker_nodes, *([cluster.head_node] if cluster.head_node else [])]:
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    _hold(int(sys.argv[1]))
