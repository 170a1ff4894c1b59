"""The command ``submit``: run a command of this package as a job of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import tune_cac
from trainables.errors import UserError, unknown_name
from trainables.storage import is_uri
from tune_cac.cli.command import argument, command
from tune_cac.cli.search import options_given
from tune_cac.messages import say
from tune_cac.own_packages import NAMES

#: Folder of studies in the home folder of the job's user, for a job's own folder is removed.
HOME_RESULTS = "tune_cac_results"
#: The Python of the environment in which Ray was started, for a shell. Ray runs a job by a login shell, whose profile
#: may put another one first in PATH.
PYTHON = '"${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python"'
#: Variables that are not passed: Ray gives jobs its own, and shows what they were given.
_NOT_PASSED = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS")
#: Parts of a variable's name by which it says that it is secret.
_SECRET = ("SECRET", "TOKEN", "PASSWORD", "ACCESS_KEY")


@command(
    argument(
        "--address", metavar="URL",
        help="job server of the cluster, http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS, else this machine's)",
    ),
    argument("--pip", metavar="FILE", help="requirements file to install for the job (default: nothing)"),
    argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="variable for the job, with its value here unless given; may be repeated. Ray shows it with the job",
    ),
    argument("--no-wait", action="store_true", help="print the job's id and end"),
    argument("job_command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as: -- search --name s"),
    help="run a command, such as a search, as a job of a Ray cluster",
    description="Ship the working directory to a Ray cluster, run `python -m tune_cac COMMAND` there as a job, and "
    "follow its log. The exit code is the command's. What .gitignore names is not shipped, nor is results/.",
)  # fmt: skip
def run(arguments: argparse.Namespace) -> int:
    """Check and submit the command; follow it."""
    given = arguments.job_command
    job = f"tune-cac-{datetime.now():%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"
    line = _entrypoint_of(given[1:] if given[:1] == ["--"] else given, job, arguments.parsers)
    environment: dict[str, Any] = {"working_dir": str(Path.cwd()), "excludes": ["/results/"]}
    if arguments.pip is not None:
        if not Path(arguments.pip).is_file():
            raise UserError(f"--pip must be a requirements file, got {arguments.pip}: there is no such file")
        environment["pip"] = arguments.pip
    home = Path(tune_cac.__file__).resolve().parents[1]
    environment["py_modules"] = [str(home / name) for name in ("tune_cac", *NAMES)]
    variables = dict(_variable(text) for text in arguments.env)

    from tune_cac.ray_backend import job as ray_job

    client = ray_job.connect(arguments.address)
    ray_job.submit(client, line, job, environment=environment, variables=variables)
    say(f"job {job}: {line.removeprefix('exec ').replace(PYTHON, 'python')}")
    if arguments.no_wait:
        print(job)
        say(f"follow it with: ray job logs --follow {job}")
        return 0
    try:
        code = ray_job.follow(client, job, partial(print, end="", flush=True))
    except KeyboardInterrupt:
        say(f"\njob {job} goes on: ray job logs --follow {job}   or: ray job stop {job}")
        return 130
    say(f"job {job} ended with exit code {code}")
    return code


def _entrypoint_of(command: Sequence[str], job: str, parsers: dict[str, argparse.ArgumentParser]) -> str:
    """Return a checked command for a shell; a new study has the job's name, unless it is given one."""
    known = [name for name in parsers if name != "submit"]
    if not command:
        raise UserError("submit needs a command after --, such as: submit -- search --space auto_thresholds")
    if command[0] not in known:
        raise unknown_name("command of a job", command[0], known)
    arguments = parsers[command[0]].parse_args(command[1:])
    results_given = any(word.partition("=")[0] == "--results" for word in command)
    if results_given and not is_uri(arguments.results) and not Path(arguments.results).is_absolute():
        raise UserError(
            f"--results of a job must be an absolute folder of the cluster or a URI, got {arguments.results}: a job's "
            f"own folder is removed; without it studies lie in ~/{HOME_RESULTS} of the head node"
        )
    named = [*command]
    if command[0] == "search":
        options_given(arguments)  # wrong ones are refused here
        if arguments.resume is None and arguments.name is None:
            named += ["--name", job]
    return entrypoint(named, home_results=not results_given and hasattr(arguments, "results"))


def entrypoint(command: Sequence[str], *, home_results: bool) -> str:
    """Return a command of this package for a shell, its studies in the home folder of the job's user if asked.

    >>> entrypoint(["search", "--name", "s"], home_results=True)
    'exec "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python" -m tune_cac search --name s --results "$HOME"/tune_cac_results'
    """
    line = shlex.join(["-m", "tune_cac", *command])
    return f"exec {PYTHON} {line}" + (f' --results "$HOME"/{HOME_RESULTS}' if home_results else "")


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if name in _NOT_PASSED:
        raise UserError(f"--env must not pass {name}, which a job gets from Ray itself: leave it out")
    if not given and name not in os.environ:
        raise UserError(f"--env must name a variable that is set here, or NAME=VALUE, got {text}")
    if any(word in name.upper() for word in _SECRET):
        say(f"warning: Ray shows {name} to whoever may see the cluster's jobs: better set it where `ray start` is run")
    return name, value if given else os.environ[name]
