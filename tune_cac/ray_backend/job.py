"""A command as a job of a Ray cluster: connection to its job server, submission, log and exit code."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray.exceptions

from trainables.errors import UserError
from tune_cac.ray_backend.session import JOB_VARIABLE

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

#: Address of a cluster's job server on its head node.
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
#: Exit code of a job that was stopped.
STOPPED = 130
_LOOK_S = 1.0
#: Seconds until the head node of a cluster that has just begun takes jobs.
_AGENT_S = 60.0
#: Seconds in which a job's log may fail to be followed before that is an error.
_SILENCE_S = 60.0


def connect(address: str | None) -> JobSubmissionClient:
    """Return a client of a cluster's job server: ``http://HOST:8265``, ``RAY_API_SERVER_ADDRESS``, or this machine's.

    UserError: Ray Jobs are not installed, nothing answers there, or it asks for a token.
    """
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
    try:
        from ray.job_submission import JobSubmissionClient

        for name in ("dashboard_sdk", "job.sdk"):  # what is uploaded is said by us
            logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
        if not address.startswith(("http://", "https://")):  # for which Ray would look for a cluster, for 40 s
            raise ConnectionError("it has no http://")
        return JobSubmissionClient(address)
    except ImportError as error:
        raise UserError(f"jobs need ray[default] ({error}): pip install 'tune-cac[cluster]'") from None
    except getattr(ray.exceptions, "AuthenticationError", ()):  # Ray 2.50 has none, and no tokens
        given = "the token given is not its own" if os.environ.get("RAY_AUTH_MODE") == "token" else "none was given"
        raise UserError(
            f"the cluster at {address} asks for a token, and {given}: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or "
            "RAY_AUTH_TOKEN_PATH to a file with it (`ray get-auth-token` on the head node shows it)"
        ) from None
    except Exception as error:  # noqa: BLE001 - Ray raises several, also of its own server's texts
        raise UserError(
            f"--address must be that of a cluster's job server, such as {DEFAULT_ADDRESS}, got {address} "
            f"({_one_line(error, 200)}): it is the head node's, port 8265, which `ray start --head` with ray[default] "
            "opens; from elsewhere it may need a tunnel"
        ) from None


def _one_line(error: Exception, most: int) -> str:
    return " ".join(str(error).split())[:most]


def submit(
    client: JobSubmissionClient, command: str, job: str, *, environment: Mapping[str, Any], variables: Mapping[str, str]
) -> None:
    """Submit a command for a shell, under a job's id; UserError where the cluster refuses it."""
    given = {**environment, "env_vars": {"PYTHONUNBUFFERED": "1", **variables, JOB_VARIABLE: job}}
    ends = time.monotonic() + _AGENT_S
    while True:
        try:
            client.submit_job(entrypoint=command, submission_id=job, runtime_env=given)
            return
        except Exception as error:  # noqa: BLE001 - Ray's own are RuntimeError, ValueError and requests'
            if "No available agent" not in str(error) or time.monotonic() > ends:
                raise UserError(f"the cluster did not take the job: {_one_line(error, 500)}") from None
        time.sleep(_LOOK_S)


def follow(client: JobSubmissionClient, job: str, write: Callable[[str], None]) -> int:
    """Write a job's log as it grows, until the job ends; return its exit code, UserError without an answer."""
    written, answered = 0, time.monotonic()
    while True:
        try:
            details = client.get_job_info(job)
            log = client.get_job_logs(job)
            write(log[written:])
            written, answered = max(written, len(log)), time.monotonic()
            if details.status.is_terminal():
                return exit_code(details)
        except Exception as error:  # noqa: BLE001 - of requests, aiohttp and Ray, while a connection is lost
            if time.monotonic() - answered > _SILENCE_S:
                raise UserError(
                    f"the cluster does not answer any more ({_one_line(error, 200)}): the job may go on; look again "
                    f"with ray job logs --follow {job}"
                ) from None
        time.sleep(_LOOK_S)


def exit_code(job: JobDetails) -> int:
    """Return the exit code of an ended job: that of its command, 130 for a stopped one, 1 where it never began."""
    status = str(job.status.value)
    if status == "STOPPED":
        return STOPPED
    if job.driver_exit_code is None:
        return 0 if status == "SUCCEEDED" else 1
    return int(job.driver_exit_code)
