"""Ray session of a search: an existing cluster, or one started on this machine; what its nodes see."""

from __future__ import annotations

import atexit
import fcntl
import functools
import logging
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from analysis.io.layout import Layout
from trainables.errors import UserError
from trainables.runtime.processors import processors
from tune_cac.interrupts import sigterm_is_an_interrupt
from tune_cac.messages import say

#: Ray's errors for processes and nodes that died, except that of an actor, which may have raised.
DEATHS = (OutOfMemoryError, WorkerCrashedError, NodeDiedError, LocalRayletDiedError, ObjectLostError)
#: Most seconds until an existing cluster answers, and then until this process has joined it.
_ANSWER_S, _JOIN_S = 5.0, 60.0
#: Most seconds until a cluster that is started here is up. It takes some 4 s, on a loaded machine 30; Ray itself gives
#: up after 30 s of some of its waits, and waits without a limit in others, as when one of its processes is killed.
_START_S = 180.0
#: Variable of a job's environment that holds its id.
JOB_VARIABLE = "TUNE_CAC_JOB"
#: Variables of object storage that a cluster's workers get from here.
_SENT = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
#: Environment variables during a search, unless the user has set them.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no report leaves the machine
    "RAY_enable_metrics_collection": "0",  # its port answers whoever asks, without the token
    "AUTOSCALER_METRIC_PORT": "65536",  # the same; no such port can be, and its process goes on without one
    "DASHBOARD_METRIC_PORT": "65536",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # CPU trials beside GPUs: keep what the user sees
    "RAY_AIR_NEW_OUTPUT": "0",  # its banner ignores verbose=0; the progress line is ours
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    # Several epochs of a short trial are sent in one message; a result waits at most this long.
    "TUNE_RESULT_BUFFER_LENGTH": "1000",
    "TUNE_RESULT_BUFFER_MIN_TIME_S": "0.5",
    "TUNE_RESULT_BUFFER_MAX_TIME_S": "0.5",
    # All of an experiment's trials are written again each time, and a search is resumed from its journal.
    "TUNE_GLOBAL_CHECKPOINT_S": "600",
}

#: Ray keeps the first token that it sees in a process, so every search of this process uses the same.
_TOKEN = secrets.token_hex(32)
_token_given = False

#: The thread of a start that was given up; the next start waits for its end.
_given_up: threading.Thread | None = None


class RayNotStarted(UserError):
    """Ray, started on this machine, was not up in time.

    Args:
        how_long: for the message.
    """

    exit_code = 1

    def __init__(self, how_long: str) -> None:
        super().__init__(
            f"Ray did not start {how_long}: a process of it was stopped or killed meanwhile (another "
            "user's `ray stop` ends every Ray on a machine), or the machine is too busy; run the command again"
        )


@contextmanager
def ray_session(*, cpus: int, modules: Sequence[Path] = (), address: str | None = None) -> Iterator[None]:
    """Connect to Ray, and shut it down at the end if this call started it.

    The services of a cluster started here listen on the loopback interface alone, and ask every caller for a token that
    only this process and its children know. A Ray that is already initialised
    is used as it is.

    Args:
        cpus: least number of processors of a cluster started here.
        modules: the user's files and package folders that workers import; sent to the nodes of a cluster.
        address: of a cluster that runs already; None for that in ``RAY_ADDRESS``, or one on this machine alone.
    """
    global _given_up, _token_given
    if _given_up is not None:
        _given_up.join(_START_S)
        _given_up = None
    environment = dict(_ENVIRONMENT)
    address = address or os.environ.get("RAY_ADDRESS")
    if not address and (_token_given or not os.environ.get("RAY_AUTH_MODE")):
        # With this token, Ray writes none of its own under the home folder, which may not be writable.
        environment["RAY_AUTH_TOKEN"] = _TOKEN
        _token_given = True
    before = {name: os.environ.get(name) for name in (*environment, "RAY_AUTH_MODE")}  # which Ray sets
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    logger = logging.getLogger("ray")
    level = logger.level
    # A failed trial is reported in one line; its traceback is in the trial's error.txt.
    logger.setLevel(logging.CRITICAL)
    try:
        with _cluster(cpus, modules, address), sigterm_is_an_interrupt():
            yield
    finally:
        logger.setLevel(level)
        if _given_up is None:
            _restore(before)
        else:  # Ray still starts, with these variables
            _given_up = threading.Thread(target=_restore, args=(before, _given_up), daemon=True)
            _given_up.start()


def _restore(variables: Mapping[str, str | None], after: threading.Thread | None = None) -> None:
    """Set environment variables, or remove those that are None, after a thread has ended."""
    if after is not None:
        after.join()
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _cluster(cpus: int, modules: Sequence[Path], address: str | None) -> Iterator[None]:
    if ray.is_initialized():
        yield
    elif address:
        try:
            # Workers of a local cluster import from the same folders as this process; other machines cannot.
            join_cluster(address, _runtime_environment(modules))
            yield
        finally:
            ray.shutdown()
    else:
        if other := running_here():
            say(
                f"a Ray cluster runs on this machine ({other}): it is left alone, and this search starts Ray of its "
                "own; --address auto searches on that cluster"
            )
        with _cluster_here(cpus):
            yield


def _runtime_environment(modules: Sequence[Path]) -> dict[str, Any] | None:
    """Return what a cluster's workers get from here; no credentials, which Ray would show to whoever may ask it.

    A job's workers have its working directory and variables already, and Ray refuses to set these twice.
    """
    if JOB_VARIABLE in os.environ:
        return None
    variables = {name: os.environ[name] for name in _SENT if name in os.environ}
    sent: dict[str, Any] = {"env_vars": variables} if variables else {}
    return {**sent, **({"py_modules": [str(path) for path in modules]} if modules else {})} or None


def running_here() -> str:
    """Return the address of the cluster that ``ray start`` began on this machine; an empty text if none answers."""
    try:
        address = (Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray/ray_current_cluster").read_text()
        _check_answers(address.strip())
    except (OSError, UserError, UnicodeDecodeError):
        return ""
    return address.strip()


@contextmanager
def starting_alone(*, most_s: float = 120.0) -> Iterator[None]:
    """Let one process start a cluster at a time: Ray finds free ports and uses them later, so two may take the same.

    Args:
        most_s: seconds after which this process starts anyway, because another one may hang in its start.
    """
    path = Path(tempfile.gettempdir()) / f"tune_cac-{os.getuid()}-ray.lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:  # another user's file, or no space: a collision of ports is unlikely
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
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(file)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Ray take 127.0.0.1 for this machine's address, on which its services listen then, and on no other one.

    It replaces a loopback address that `ray.init` is given by the machine's, unless clusters of several machines are
    switched off; the variable for that, ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER``, is read when Ray is imported.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _in_sessions_of_their_own() -> Iterator[None]:
    """Have Ray start its processes outside of this one's group.

    `timeout`, a terminal or a batch system signals a whole group: Ray would end before this process, which then could
    neither close it nor tell an interrupt from a cluster that is gone.
    """
    before = services.ConsolePopen
    services.ConsolePopen = functools.partial(before, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = before


@contextmanager
def _cluster_here(cpus: int) -> Iterator[None]:
    """Start a cluster for the block; an interrupt meanwhile does not wait for it.

    A thread starts it, because in the main thread Ray replaces the handler of SIGTERM by one that exits: in the middle
    of whatever runs. Ray forks, and an exception right after a fork is dropped and leaves `logging` locked for ever.
    The thread lives as long as the cluster, whose processes the kernel ends with the thread that started them.
    """
    global _given_up
    failed: list[BaseException] = []
    up, done, given_up = threading.Event(), threading.Event(), threading.Event()
    deciding = threading.Lock()  # whether it is up or given up

    def start() -> None:
        try:
            with _on_loopback(), _in_sessions_of_their_own():
                ray.init(
                    address="local",  # not a cluster whose address another process has left
                    num_cpus=max(cpus, processors()),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                )
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)
        with deciding:
            up.set()
        if given_up.is_set():
            ray.shutdown()
        else:
            done.wait()

    starting = threading.Thread(target=start, name="Ray's parent", daemon=True)
    try:
        with starting_alone():
            ends = time.monotonic() + _START_S
            starting.start()
            while not up.wait(0.1) and time.monotonic() < ends:
                pass
        # Ray holds the interpreter's lock in some of its waits, so they may be over when this thread goes on.
        waited_in_vain = failed and re.search("timed ?out|deadline exceeded", str(failed[0]), re.IGNORECASE)
        if not up.is_set() or (waited_in_vain and time.monotonic() >= ends):
            raise RayNotStarted(f"within {_START_S:g} s")
        if waited_in_vain:
            raise RayNotStarted("in the time that it allows itself") from failed[0]
        if failed:
            raise failed[0]
        yield
    finally:
        with deciding:
            if starting.ident is not None and not up.is_set():
                given_up.set()
        if given_up.is_set():  # the thread shuts Ray down when it is up, or the kernel ends Ray with this process
            atexit.unregister(ray.shutdown)
            _given_up = starting
        else:
            ray.shutdown()
        done.set()


def join_cluster(address: str, runtime_env: dict[str, Any] | None = None) -> None:
    """Connect to a running Ray cluster.

    If there is no answer, Ray tries for minutes and ignores signals, so it connects in a thread of its own.

    Args:
        address: HOST:PORT, ``auto`` or ``ray://HOST:PORT``.
        runtime_env: Ray's, for the workers.

    Raises:
        UserError: no cluster answers there, or it asks for a token that is not given.
    """
    _check_answers(address)
    outcome: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, runtime_env=runtime_env)
        except BaseException as error:  # noqa: BLE001  # told by the thread that waits
            outcome.append(error)

    thread = threading.Thread(target=connect, name="joining a Ray cluster", daemon=True)
    with _no_standard_error():  # Ray writes a line there for each try
        thread.start()
        ends = time.monotonic() + _JOIN_S
        while thread.is_alive() and time.monotonic() < ends:
            thread.join(0.2)
    if thread.is_alive():
        raise UserError(_no_cluster(address, f"it did not answer as one within {_JOIN_S:g} s"))
    if outcome:
        reason = (str(outcome[0]).strip() or type(outcome[0]).__name__).splitlines()[0].partition(". ")[0]
        if not isinstance(outcome[0], (ConnectionError, RuntimeError, ValueError, RayError)):
            raise outcome[0]
        raise UserError(_no_cluster(address, reason)) from outcome[0]


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Discard everything that this process writes to file descriptor 2."""
    try:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # closed by the parent process
        yield
        return
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _check_answers(address: str) -> None:
    """Raise UserError if nothing listens at HOST:PORT; Ray itself checks other forms of an address."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(_no_cluster(address, getattr(error, "strerror", None) or str(error))) from None


def _no_cluster(address: str, reason: str) -> str:
    return (
        f"--address (or RAY_ADDRESS) must be the address of a Ray cluster that runs, got {address} ({reason}): start "
        "one with `ray start --head`, give RAY_AUTH_MODE=token and RAY_AUTH_TOKEN if it asks for a token, or leave the "
        "address out to search on this machine alone"
    )


# --- Nodes of a Ray cluster: whether each of them sees the study's place ----------------------------------------------

#: Most seconds until every node has looked; a node that is busy starting workers may take long.
_LOOK_S = 60.0


def check_seen_by_all(layout: Layout) -> None:
    """Raise UserError where a node of the cluster does not see the study's folder, or its place in object storage."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if storage := layout.read_info().storage:
        for address, reason in seen_from(nodes, storage):
            raise UserError(
                f"--results must be storage that every node can write, got {storage}, which {address} cannot "
                f"({reason}): give credentials where `ray start` is run, or a role to the nodes"
            )
    elif len(nodes) > 1:
        probe = (layout.root / f".seen-{secrets.token_hex(4)}").resolve()
        probe.touch()
        try:
            blind = [address for address, _ in seen_from(nodes, str(probe))]
        finally:
            probe.unlink(missing_ok=True)
        if blind:
            raise UserError(
                "--results must be a folder that every node of the cluster sees, or a URI such as s3://bucket/studies, "
                f"got {layout.root.parent}, which {', '.join(blind)} does not see"
            )


def seen_from(nodes: list[Mapping[str, Any]], place: str) -> list[tuple[str, str]]:
    """Return the addresses of nodes that do not see a file or a URI, each with the reason."""
    look = ray.remote(num_cpus=0)(_why_unseen)
    asked = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(place)
        for node in nodes
    ]
    said: list[str] = ray.get(asked, timeout=_LOOK_S)
    return [(node["NodeManagerAddress"], why) for node, why in zip(nodes, said, strict=True) if why]


def _why_unseen(place: str) -> str:
    from trainables.storage import files_of, is_uri

    if not is_uri(place):
        return "" if Path(place).exists() else "no such file"
    probe = f".seen-{secrets.token_hex(4)}"
    try:
        files = files_of(place)
        files.write(probe, (b"",))
        files.remove(probe)
    except (OSError, UserError) as error:
        return str(error).splitlines()[0][:300]
    return ""
