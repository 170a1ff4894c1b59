"""Ray session of a search: an existing cluster, or one started on this machine; what its nodes see."""

from __future__ import annotations

import atexit
import fcntl
import functools
import importlib
import logging
import os
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
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

from analysis.io.study_files import Layout
from trainables.errors import UserError
from trainables.runtime.processors import processors
from trainables.storage import files_of, is_uri
from tune_cac.interrupts import sigterm_is_an_interrupt
from tune_cac.messages import say

#: Ray's errors for processes and nodes that died, except that of an actor, which may have raised.
DEATHS = (OutOfMemoryError, WorkerCrashedError, NodeDiedError, LocalRayletDiedError, ObjectLostError)
#: Most seconds until an existing cluster answers, and then until this process has joined it.
_ANSWER_S, _JOIN_S = 5.0, 60.0
#: Most seconds until a cluster that is started here is up, which takes some 4 s, on a loaded machine 30. Ray itself
#: waits without a limit, as when one of its processes is killed.
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


class RayNotStarted(UserError):
    """Ray, started on this machine, was not up in time."""

    exit_code = 1


class _RayThread(threading.Thread):
    """Thread that initialises Ray (``how``), lives as long as it, and shuts it down.

    In the main thread Ray replaces the handler of SIGTERM by one that exits: in the middle of whatever runs. Ray forks,
    and an exception right after a fork is dropped and leaves `logging` locked for ever. It ignores signals while it
    tries to connect, for minutes. And the kernel ends Ray's processes with the thread that started them.
    """

    #: The last one. If it is ending, the next session waits for it: where it was interrupted, Ray may still start.
    last: _RayThread | None = None

    def __init__(self, variables: Mapping[str, str], patched: AbstractContextManager[None], **how: Any) -> None:
        super().__init__(name="Ray's parent", daemon=True)
        self._variables, self._patched, self._how = variables, patched, how
        self._up, self.ending = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        _RayThread.last = self

    def run(self) -> None:
        """Hold Ray until the thread is told to end."""
        with _environment(self._variables):
            try:
                with self._patched:
                    ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **self._how)
            except BaseException as error:  # noqa: BLE001 - raised by `started`
                self._error = error
            self._up.set()
            self.ending.wait()
            ray.shutdown()

    @contextmanager
    def started(self, most_s: float, meanwhile: Sequence[str] = ()) -> Iterator[None]:
        """Start it, and end it with the block; an interrupt does not wait for a Ray that is not up yet.

        Modules to import ``meanwhile`` must not import Ray, which another thread would see half initialized.
        TimeoutError: Ray is not up within so many seconds. BaseException: what `ray.init` raised.
        """
        try:
            self.start()
            ends = time.monotonic() + most_s
            for name in meanwhile:
                with suppress(Exception):  # whoever needs it says what is wrong with it
                    importlib.import_module(name)
            while not self._up.wait(0.1):
                if time.monotonic() > ends:
                    raise TimeoutError(f"it did not answer as one within {most_s:g} s")
            if self._error is not None:
                raise self._error
            yield
        finally:
            self.ending.set()
            if self._up.is_set():
                self.join()
            else:  # it shuts Ray down when it is up, or the kernel ends Ray with this process
                atexit.unregister(ray.shutdown)


@contextmanager
def ray_session(
    *, cpus: int, modules: Sequence[Path] = (), address: str | None = None, meanwhile: Sequence[str] = ()
) -> Iterator[None]:
    """Connect to Ray, and shut it down at the end if this call started it; one that is initialised is used as it is.

    The services of a cluster started here listen on the loopback interface alone, and ask every caller for a token that
    only this process and its children know.

    Args:
        cpus: least number of processors of a cluster started here.
        modules: the user's files and package folders that workers import; sent to the nodes of a cluster.
        address: of a cluster that runs already; None for that in ``RAY_ADDRESS``, or one on this machine alone.
        meanwhile: modules to import while Ray's processes start here.
    """
    if _RayThread.last is not None and _RayThread.last.ending.is_set():
        _RayThread.last.join(_START_S)
    address = address or os.environ.get("RAY_ADDRESS")
    logger = logging.getLogger("ray")
    level = logger.level
    # A failed trial is reported in one line; its traceback is in the trial's error.txt.
    logger.setLevel(logging.CRITICAL)
    try:
        if ray.is_initialized():
            cluster = _environment(_ENVIRONMENT)
        elif address:
            cluster = _joined_cluster(address, modules)
        else:
            cluster = _cluster_here(cpus, meanwhile)
        with cluster, sigterm_is_an_interrupt():
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, for the block; restore them, and the one that Ray sets."""
    before = {name: os.environ.get(name) for name in (*variables, "RAY_AUTH_MODE")}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name, earlier in before.items():
            os.environ.pop(name, None)
            if earlier is not None:
                os.environ[name] = earlier


@contextmanager
def _cluster_here(cpus: int, meanwhile: Sequence[str]) -> Iterator[None]:
    # With this token, Ray writes none of its own under the home folder, which may not be writable.
    token = {} if os.environ.get("RAY_AUTH_MODE") else {"RAY_AUTH_TOKEN": _TOKEN}
    here = _RayThread(
        {**_ENVIRONMENT, **token},
        _kept_to_itself(),
        address="local",  # not a cluster whose address another process has left
        num_cpus=max(cpus, processors()),
        include_dashboard=False,
    )
    with ExitStack() as stack:
        try:
            with starting_alone():
                stack.enter_context(here.started(_START_S, meanwhile))
        except Exception as error:
            if isinstance(error, TimeoutError) or re.search("timed ?out|deadline exceeded", str(error), re.IGNORECASE):
                raise RayNotStarted(
                    "Ray did not start in time: a process of it was stopped or killed meanwhile (another user's `ray "
                    "stop` ends every Ray on a machine), or the machine is too busy; run the command again"
                ) from error
            raise
        yield


@contextmanager
def starting_alone(*, most_s: float = 120.0) -> Iterator[None]:
    """Let one process start a cluster at a time: Ray finds free ports and uses them later, so two may take the same.

    Another one may hang in its start, so after ``most_s`` seconds this process starts anyway.
    """
    path = Path(tempfile.gettempdir()) / f"tune_cac-{os.getuid()}-ray.lock"
    ends = time.monotonic() + most_s
    with ExitStack() as stack:
        # Another user's file, no space, a file system without locks: a collision of ports is unlikely.
        with suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, file)
            while time.monotonic() < ends:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
        yield


@contextmanager
def _kept_to_itself() -> Iterator[None]:
    """Have Ray's services listen on 127.0.0.1 alone, and its processes run outside of this one's group.

    Ray replaces a loopback address that `ray.init` is given by the machine's, unless clusters of several machines are
    switched off. A terminal or a batch system signals a whole group: Ray would end before this process, which then
    could neither close it nor tell an interrupt from a cluster that is gone.
    """
    several, popen = ray_constants.ENABLE_RAY_CLUSTER, services.ConsolePopen
    ray_constants.ENABLE_RAY_CLUSTER = False
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER, services.ConsolePopen = several, popen


@contextmanager
def _joined_cluster(address: str, modules: Sequence[Path]) -> Iterator[None]:
    """Connect to HOST:PORT, ``auto`` or ``ray://HOST:PORT`` for the block; UserError where no cluster answers."""
    if re.search(r"[^/]:\d+$", address):  # Ray itself checks other forms
        try:
            _connect(address, _ANSWER_S)
        except (OSError, OverflowError) as error:
            raise UserError(_no_cluster(address, getattr(error, "strerror", None) or str(error))) from None
    there = _RayThread(_ENVIRONMENT, nullcontext(), address=address, runtime_env=_runtime_environment(modules))
    with ExitStack() as stack:
        try:
            with _no_standard_error():  # Ray writes a line there for each try
                stack.enter_context(there.started(_JOIN_S))
        except (ConnectionError, RuntimeError, TimeoutError, ValueError, RayError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
            raise UserError(_no_cluster(address, reason)) from error
        yield


def _runtime_environment(modules: Sequence[Path]) -> dict[str, Any] | None:
    """Return what a cluster's workers get from here; no credentials, which Ray would show to whoever may ask it.

    A job's workers have its working directory and variables already, and Ray refuses to set these twice.
    """
    if JOB_VARIABLE in os.environ:
        return None
    variables = {name: os.environ[name] for name in _SENT if name in os.environ}
    sent = {"env_vars": variables, "py_modules": [str(path) for path in modules]}
    return {name: given for name, given in sent.items() if given} or None


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Discard everything that this process writes to file descriptor 2, unless it is closed."""
    with ExitStack() as stack:
        with suppress(OSError):
            kept = os.dup(2)
            stack.callback(os.close, kept)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            stack.callback(os.dup2, kept, 2)
        yield


def _no_cluster(address: str, reason: str) -> str:
    return (
        f"--address (or RAY_ADDRESS) must be the address of a Ray cluster that runs, got {address} ({reason}): start "
        "one with `ray start --head`, give RAY_AUTH_MODE=token and RAY_AUTH_TOKEN if it asks for a token, or leave the "
        "address out to search on this machine alone"
    )


# --- The end of a search whose Ray head is gone -----------------------------------------------------------------------

#: Seconds without an answer after which the head is gone. Ray itself ends the process after 60; a head whose state was
#: kept in Redis may be back before.
GONE_S = 30.0
_WATCH_S = 2.0


@contextmanager
def ends_with_head(go_on: str) -> Iterator[None]:
    """End this process if Ray's head does not answer any more while the block runs, and say what continues.

    Ray's calls wait in C then, where no exception reaches them, so the process ends at once. Finished trials are in the
    journal; a line that was being written is mended when the search goes on.
    """
    done = threading.Event()
    address = ray.get_runtime_context().gcs_address

    def watch() -> None:
        answered = time.monotonic()
        while not done.wait(_WATCH_S):
            with suppress(OSError):
                _connect(address, _WATCH_S)
                answered = time.monotonic()
            if time.monotonic() - answered > GONE_S and not done.is_set():
                say(
                    f"the Ray cluster at {address} does not answer any more: finished trials are kept; on this machine "
                    f"or another cluster go on with: {go_on}"
                )
                with suppress(OSError, ValueError):
                    sys.stdout.flush()
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _connect(address: str, most_s: float) -> None:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=most_s).close()


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
    there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    said: list[str] = ray.get([look.options(scheduling_strategy=one).remote(place) for one in there], timeout=_LOOK_S)
    return [(node["NodeManagerAddress"], why) for node, why in zip(nodes, said, strict=True) if why]


def _why_unseen(place: str) -> str:
    if not is_uri(place):
        return "" if Path(place).exists() else "no such file"
    probe = f".seen-{secrets.token_hex(4)}"
    try:
        files_of(place).write(probe, (b"",))
        files_of(place).remove(probe)
    except (OSError, UserError) as error:
        return str(error).splitlines()[0][:300]
    return ""
