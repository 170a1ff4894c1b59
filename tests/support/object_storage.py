"""An S3 server of this process: moto's, which answers as Amazon's does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: The bucket that is there.
BUCKET = "bucket"
#: The servers that run, for `outage`.
_servers: list[Any] = []
#: What the server takes from anybody, and every node of a cluster has to have.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Yield the environment of a process that uses the server."""
    import pyarrow.fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _servers.append(server)
    try:
        host, port = server.get_host_and_port()
        made = pyarrow.fs.S3FileSystem(
            access_key="testing", secret_key="testing", endpoint_override=f"{host}:{port}", scheme="http",
            region="us-east-1", allow_bucket_creation=True,
        )  # fmt: skip
        made.create_dir(BUCKET)
        yield {**CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    finally:
        _servers.pop().stop()


@contextmanager
def outage(environment: dict[str, str]) -> Iterator[None]:
    """Let nobody reach the server during the block; what it holds is in this process and stays."""
    from moto.server import ThreadedMotoServer

    port = int(environment["AWS_ENDPOINT_URL"].rpartition(":")[2])
    (server,) = [found for found in _servers if found.get_host_and_port()[1] == port]
    server.stop()
    _servers.remove(server)
    try:
        yield
    finally:
        _servers.append(ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False))
        _servers[-1].start()


@pytest.fixture(scope="session")
def s3_environment() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The URI of an empty folder in object storage, which this process and its children can reach."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{abs(hash(request.node.nodeid))}"
