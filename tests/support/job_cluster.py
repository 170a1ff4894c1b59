"""A Ray cluster with a job server and a token, in processes of its own: one node with two processors."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tune_cac.ray_backend.session import starting_alone

TOKEN = "c" * 64


def free_ports(count: int) -> list[int]:
    """Ports outside of the ranges from which Ray takes its own."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def job_cluster(home: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of a process that uses the cluster; all that it started ends with the block."""
    temporary = Path(tempfile.mkdtemp(prefix="cac-"))  # short, for sockets of Unix
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    with starting_alone(), (home / "ray.log").open("w") as log:
        gcs, dashboard, agent, client = free_ports(4)
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={gcs}",
            f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", f"--dashboard-agent-listen-port={agent}",
            f"--ray-client-server-port={client}", "--num-cpus=2", f"--temp-dir={temporary}", "--disable-usage-stats",
        ]  # fmt: skip
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=home)
        ends = time.monotonic() + 120
        for port in (gcs, dashboard):
            while True:
                assert process.poll() is None, (home / "ray.log").read_text()
                assert time.monotonic() < ends, f"no port {port}: {(home / 'ray.log').read_text()}"
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.1)
    try:
        yield {
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}", "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN, "HOME": str(home),
        }  # fmt: skip
    finally:
        for found in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                found.kill()
        process.wait()
        for found in psutil.process_iter(["cmdline"]):  # what Ray started apart
            if str(temporary) in " ".join(found.info["cmdline"] or []):
                found.kill()
        shutil.rmtree(temporary, ignore_errors=True)
