"""What a search opens to others while it runs. tests/tune_cac/study/test_untrusted.py has untrusted study folders."""

from __future__ import annotations

import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

#: A method of each gRPC service of Ray; a server knows those of its own services alone.
METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
)
UNIMPLEMENTED, UNAUTHENTICATED = 12, 16
#: Processes that have ports, and how the titles of workers begin, between and in calls.
KINDS = {"driver", "gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent"}
WORKERS = ("ray::SearchTrial", "ray::IDLE")


@dataclass(frozen=True, kw_only=True)
class Searching:
    """A search that trains, and what its processes show."""

    folder: Path
    process: subprocess.Popen[str]
    ray: dict[str, list[tuple[str, int]]]
    """Address and port of each listening socket, by what the process is."""
    token: str
    titles: list[str]
    """Command lines of all processes of the machine."""


@pytest.fixture(scope="module")
def searching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searching]:
    folder = tmp_path_factory.mktemp("searching")
    command = [sys.executable, "-m", "tune_cac", "search", "--seeds", "1", "--trials", "2", "--epochs", "5000",
               "--no-sharing", "--no-controls", "--name", "s"]  # fmt: skip
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, text=True)
    try:
        yield _look(folder, process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _look(folder: Path, process: subprocess.Popen[str]) -> Searching:
    main = psutil.Process(process.pid)
    ends = time.monotonic() + 60
    while not list(folder.glob("results/s/ray/*/trial-*")):
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < ends
        time.sleep(0.2)
    while True:  # agents and workers that start beside the first trial
        found, token = _sockets(main)
        if found.keys() >= KINDS and any(name.startswith(WORKERS) for name in found):
            break
        assert time.monotonic() < ends, found
        time.sleep(0.5)
    titles = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    return Searching(folder=folder, process=process, ray=found, token=token, titles=titles)


def _sockets(main: psutil.Process) -> tuple[dict[str, list[tuple[str, int]]], str]:
    """The listening sockets of a search's processes by their names, and its token."""
    found: dict[str, list[tuple[str, int]]] = {}
    token = ""
    for child in (main, *main.children(recursive=True)):
        try:
            name = "driver" if child == main else _name(child)
            for socket_ in child.net_connections("inet"):
                if socket_.status == psutil.CONN_LISTEN:
                    found.setdefault(name, []).append((socket_.laddr.ip, socket_.laddr.port))
            token = token or (child.environ().get("RAY_AUTH_TOKEN", "") if child != main else "")
        except psutil.NoSuchProcess:
            continue
    return found, token


def _name(process: psutil.Process) -> str:
    """The title that Ray gives a process, or the name of its program."""
    words = " ".join(process.cmdline()).split()
    return words[0].rpartition("/")[2] if words else process.name()


def grpc_status(port: int, method: str, token: str | None = None) -> int | None:
    """Call a method with an empty message over plain HTTP/2; its gRPC status, None if there is none."""

    def text(value: str) -> bytes:
        size = len(value)
        prefix = bytes([size]) if size < 127 else b"\x7f" + bytes([size - 127])
        return prefix + value.encode()

    def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
        return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content

    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost", "te": "trailers",
               "content-type": "application/grpc"}  # fmt: skip
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    block = b"".join(b"\x00" + text(name) + text(value) for name, value in headers.items())
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(sent)
        while b"grpc-status" not in answer or len(answer.partition(b"grpc-status")[2]) < 3:
            try:
                part = connection.recv(65536)
            except OSError:
                break
            if not part:
                break
            answer += part
    told = re.search(rb"grpc-status[\x01\x02](\d+)", answer)
    return None if told is None else int(told[1])


def http_answer(port: int) -> bytes:
    """What a plain GET returns."""
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            return connection.recv(65536)
        except OSError:  # a gRPC server says nothing
            return b""


@pytest.mark.thorough
def test_every_socket_is_on_loopback_and_refuses_a_caller_without_the_token(searching: Searching) -> None:
    sockets = [(name, *socket_) for name, sockets in searching.ray.items() for socket_ in sockets]
    assert len(searching.ray["raylet"]) == 2  # node manager and object manager
    assert {ip for _, ip, _ in sockets} <= {"127.0.0.1", "::ffff:127.0.0.1"}
    for name, _, port in sockets:
        try:
            answer = http_answer(port)
        except ConnectionRefusedError:
            assert name.startswith(WORKERS), name  # an idle worker has ended meanwhile
            continue
        if answer.startswith(b"HTTP/"):
            assert b" 401 " in answer.splitlines()[0], (name, answer)
            continue
        found = {method: grpc_status(port, method) for method in METHODS}
        assert UNAUTHENTICATED in found.values(), (name, found)
        assert set(found.values()) <= {UNAUTHENTICATED, UNIMPLEMENTED}, (name, found)
        # The same calls with the token are let in, so it is the token that was missing.
        method = next(method for method, status in found.items() if status == UNAUTHENTICATED)
        assert grpc_status(port, method, searching.token) != UNAUTHENTICATED
        assert grpc_status(port, method, "0" * len(searching.token)) == UNAUTHENTICATED


@pytest.mark.thorough
def test_the_token_is_in_no_command_line_log_or_result(searching: Searching) -> None:
    assert len(searching.token) == 64
    assert not [title for title in searching.titles if searching.token in title]
    session = next(re.search(r"\S*/session_\d[^/ ]*", title) for title in searching.titles
                   if "session_" in title and "raylet" in title)  # fmt: skip
    assert session is not None
    files = [path for root in (searching.folder, Path(session[0].split("=")[-1])) for path in root.rglob("*")]
    read = [path for path in files if path.is_file() and searching.token.encode() in path.read_bytes()]
    assert len(files) > 20
    assert read == []
