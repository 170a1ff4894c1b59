"""A command as a job of a Ray cluster: connection to its job server, submission, log and exit code."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainables.errors import UserError
from tune_cac.ray_backend.session import JOB_VARIABLE

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

#: Address of a cluster's job server on its head node.
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
#: Exit code of a job that was stopped.
STOPPED = 130
_ANSWER_S, _LOOK_S = 5.0, 1.0
#: Seconds until the head node of a cluster that has just begun takes jobs.
_AGENT_S = 60.0
#: Seconds in which a job's log may fail to be followed before that is an error.
_SILENCE_S = 60.0


def connect(address: str | None) -> JobSubmissionClient:
    """Return a client of a cluster's job server.

    Args:
        address: ``http://HOST:8265``; None for that in ``RAY_API_SERVER_ADDRESS``, or on this machine.

    Raises:
        UserError: Ray Jobs are not installed, nothing answers there, or it asks for a token.
    """
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--address must be that of a cluster's job server, such as {DEFAULT_ADDRESS}, got {address}")
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname, port), timeout=_ANSWER_S).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--address must be that of a cluster's job server, got {address} ({reason}): it is the head node's, port "
            "8265, which `ray start --head` with ray[default] opens; from elsewhere it may need a tunnel"
        ) from None
    try:
        from ray.job_submission import JobSubmissionClient

        for name in ("dashboard_sdk", "job.sdk"):  # what is uploaded is said by us
            logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
        return JobSubmissionClient(address)
    except ImportError as error:
        raise UserError(f"jobs need ray[default] ({error}): pip install 'tune-cac[cluster]'") from None
    except Exception as error:  # noqa: BLE001 - Ray raises several, also of its own server's texts
        raise UserError(_refused(address, error)) from None


def _refused(address: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    if any(word in said.lower() for word in ("401", "403", "unauthorized", "forbidden", "token")):
        given = "the token given is not its own" if os.environ.get("RAY_AUTH_MODE") == "token" else "none was given"
        return (
            f"the cluster at {address} asks for a token, and {given}: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or "
            "RAY_AUTH_TOKEN_PATH to a file with it (`ray get-auth-token` on the head node shows it)"
        )
    return f"no job server of Ray answers at {address}: {said[:200]}"


def submit(
    client: JobSubmissionClient,
    command: str,
    *,
    environment: Mapping[str, Any],
    variables: Mapping[str, str],
    metadata: Mapping[str, str],
    job: str,
) -> None:
    """Submit a command of this package.

    Args:
        client: of the cluster.
        command: for a shell (`entrypoint`).
        environment: Ray's runtime environment, without variables.
        variables: the job's environment variables.
        metadata: kept with the job.
        job: its id.

    Raises:
        UserError: the cluster refuses it.
    """
    variables = {"PYTHONUNBUFFERED": "1", **variables, JOB_VARIABLE: job}
    ends = time.monotonic() + _AGENT_S
    while True:
        try:
            client.submit_job(
                entrypoint=command, submission_id=job, runtime_env={**environment, "env_vars": variables},
                metadata=dict(metadata),
            )  # fmt: skip
            return
        except Exception as error:  # noqa: BLE001 - Ray's own are RuntimeError, ValueError and requests'
            said = " ".join(str(error).split())
            if "No available agent" not in said or time.monotonic() > ends:
                raise UserError(f"the cluster did not take the job: {said[:500]}") from None
        time.sleep(_LOOK_S)


def follow(client: JobSubmissionClient, job: str, write: Callable[[str], None]) -> int:
    """Write a job's log as it grows, until the job ends; return its exit code.

    Raises:
        UserError: the cluster does not answer any more.
    """
    written = 0
    silent_since: float | None = None
    while True:
        try:
            ended = client.get_job_info(job).status.is_terminal()
            log = client.get_job_logs(job)
            write(log[written:])
            written = max(written, len(log))
            silent_since = None
        except Exception as error:  # noqa: BLE001 - of requests, aiohttp and Ray, while a connection is lost
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > _SILENCE_S:
                raise UserError(
                    f"the cluster does not answer any more ({' '.join(str(error).split())[:200]}): the job may go on; "
                    f"look again with ray job logs --follow {job}"
                ) from None
            ended = False
        if ended:
            return exit_code(client.get_job_info(job))
        time.sleep(_LOOK_S)


def exit_code(job: JobDetails) -> int:
    """Return the exit code of an ended job: that of its command, 130 for a stopped one, 1 where it never began."""
    status = str(job.status.value)
    if status == "STOPPED":
        return STOPPED
    code = job.driver_exit_code
    if code is None:
        return 0 if status == "SUCCEEDED" else 1
    return int(code)
