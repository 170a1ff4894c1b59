"""A PostgreSQL server of its own, from Debian's packages."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Where Debian puts the server's programs, which are not in PATH.
_DEBIAN = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
USER, PASSWORD = "cac", "not-to-be-shown"


def _program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *map(str, _DEBIAN)]))
    assert found is not None, f"{name} is missing: install postgresql"
    return found


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """The URL of an empty database that asks for a password."""
    root = Path(tempfile.mkdtemp(prefix="cac-pg-"))  # pytest's own folders are closed to other users
    # The server refuses to run as root.
    who = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    if who:
        shutil.chown(root, **who)
    secret = root / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(*command: str) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=root, **who)  # type: ignore[call-overload]

    data = str(root / "data")
    run(_program("initdb"), "-D", data, "-U", USER, "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync")
    settings = f"-p {port} -c listen_addresses=127.0.0.1 -k {root} -c fsync=off"
    run(_program("pg_ctl"), "-D", data, "-w", "-o", settings, "-l", str(root / "log"), "start")
    try:
        yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
    finally:
        run(_program("pg_ctl"), "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(root, ignore_errors=True)
