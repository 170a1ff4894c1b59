"""Ray for one search: the cluster that is there, or one of our own on this machine."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

#: Set for the length of a search, unless the user has set them.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no report leaves the machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # CPU trials beside GPUs: keep what the user sees
    "RAY_AIR_NEW_OUTPUT": "0",  # its banner ignores verbose=0; the progress line is ours
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    # Several epochs of a short trial travel in one message; a result waits at most this long.
    "TUNE_RESULT_BUFFER_LENGTH": "1000",
    "TUNE_RESULT_BUFFER_MIN_TIME_S": "0.5",
    "TUNE_RESULT_BUFFER_MAX_TIME_S": "0.5",
    # All of an experiment's trials are written again each time, and a search is resumed from its journal.
    "TUNE_GLOBAL_CHECKPOINT_S": "600",
}

#: Ray keeps the first token that it sees in a process, so every search of this process uses the same.
_TOKEN = secrets.token_hex(32)
_token_given = False


@contextmanager
def ray_session(*, cpus: int, modules: Sequence[Path] = ()) -> Iterator[None]:
    """A connected Ray. One that this call starts ends with it.

    Ray's own services listen on every interface (it replaces a loopback address by the machine's), so our cluster
    asks every caller for a token that only this process and its children know. An address in ``RAY_ADDRESS``, or a
    Ray that is already initialised, is used as it is.

    Args:
        cpus: processors that our own cluster should offer at least.
        modules: files and package folders of the user's that workers import; sent to the nodes of a cluster.
    """
    global _token_given
    environment = dict(_ENVIRONMENT)
    if not os.environ.get("RAY_ADDRESS") and (_token_given or not os.environ.get("RAY_AUTH_MODE")):
        # Given here, Ray writes no token of its own under the home folder, which may not be writable.
        environment["RAY_AUTH_TOKEN"] = _TOKEN
        _token_given = True
    before = {name: os.environ.get(name) for name in environment}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    logger = logging.getLogger("ray")
    level = logger.level
    ours = not ray.is_initialized()
    try:
        if ours and os.environ.get("RAY_ADDRESS"):
            # Processes of our own cluster look where this one does; those of another machine cannot.
            sent = {"py_modules": [str(path) for path in modules]} if modules else None
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, runtime_env=sent)
        elif ours:
            with starting_alone():
                ray.init(
                    address="local",  # not one that another process has left its address of
                    num_cpus=max(cpus, os.cpu_count() or 1),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                )
        # A failed trial is reported in one line; its traceback is in the trial's error.txt.
        logger.setLevel(logging.CRITICAL)
        with _terminate_gracefully():
            yield
    finally:
        logger.setLevel(level)
        if ours:
            ray.shutdown()
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


@contextmanager
def starting_alone(*, most_s: float = 120.0) -> Iterator[None]:
    """While a cluster starts: Ray finds free ports and uses them later, so two that start at once may take the same.

    Args:
        most_s: seconds after which one starts all the same, for another process may hang in its start.
    """
    path = Path(tempfile.gettempdir()) / f"tune_cac-{os.getuid()}-ray.lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:  # somebody else's, or no room: a collision of ports is unlikely enough
        yield
        return
    try:
        ends = time.monotonic() + most_s
        while time.monotonic() < ends:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield
    finally:
        os.close(file)


@contextmanager
def _terminate_gracefully() -> Iterator[None]:
    """End a search on SIGTERM (`kill`, a batch system) as on Ctrl-C; Ray's own handler exits at once."""

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
