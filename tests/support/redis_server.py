"""A Redis server of its own, from Debian's packages, in which Ray's head keeps its state."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[str]:
    """Its address, HOST:PORT."""
    program = shutil.which("redis-server")
    assert program is not None, "redis-server is missing: install it"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program, "--bind", "127.0.0.1", "--port", str(port), "--save", ""], cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    while b"Ready to accept connections" not in (line := process.stdout.readline()):
        assert line, "redis-server did not start"
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()
