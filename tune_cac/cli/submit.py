"""The command ``submit``: run a command of this package as a job of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trainables.errors import UserError, unknown_name
from trainables.gradskip.variable_types import is_number
from trainables.storage import is_uri
from tune_cac import __version__
from tune_cac.cli.search import options_given
from tune_cac.jobs.shipping import HOME_RESULTS, MOST_MB, check_size, shipped_files
from tune_cac.messages import say

#: Variables that are not passed: Ray gives jobs its own, and shows what they were given.
_NOT_PASSED = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS")
#: Beginnings of words by which a variable's name says that it is secret.
_SECRET = ("SECRET", "TOKEN", "PASSWORD", "ACCESS_KEY")


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "submit", parents=[debug], help="run a command, such as a search, as a job of a Ray cluster",
        description="Ship the working directory to a Ray cluster, run `python -m tune_cac COMMAND` there as a job, and "
        "follow its log. The exit code is the command's. What .gitignore names is not shipped.",
    )  # fmt: skip
    add_address(parser)
    parser.add_argument("--pip", metavar="FILE", help="requirements file to install for the job (default: nothing)")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="variable for the job, with its value here unless given; may be repeated. Ray shows it with the job",
    )  # fmt: skip
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN",
        help="files or folders of the working directory that are not shipped; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--most-mb", type=float, default=MOST_MB, help=f"most megabytes to ship (default: {MOST_MB})"
    )  # fmt: skip
    parser.add_argument(
        "--no-ship-package", action="store_true",
        help="the cluster's environment has tune_cac; otherwise it is shipped as it runs here",
    )  # fmt: skip
    parser.add_argument("--no-wait", action="store_true", help="print the job's id and end")
    parser.add_argument(
        "job_command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as: -- search --name s"
    )
    parser.set_defaults(run=run, parsers=commands.choices)


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the option for a cluster's job server."""
    parser.add_argument(
        "--address", metavar="URL",
        help="job server of the cluster, http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS, else this machine's)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Check and submit the command; follow it."""
    given = list(arguments.job_command)
    command = given[1:] if given[:1] == ["--"] else given
    if not is_number(arguments.most_mb) or arguments.most_mb <= 0:
        raise UserError(f"--most-mb must be a number above 0, got {arguments.most_mb}")
    job = f"tune-cac-{datetime.now():%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"
    command, study, results = _checked(command, job, arguments.parsers)
    pip = None if arguments.pip is None else Path(arguments.pip)
    if pip is not None and not pip.is_file():
        raise UserError(f"--pip must be a requirements file, got {pip}: there is no such file")
    variables = dict(_variable(text) for text in arguments.env)
    here = Path.cwd()
    files = sorted(shipped_files(here, left_out=arguments.exclude))
    size = check_size(here, files, arguments.most_mb)

    from tune_cac.jobs import cluster_jobs

    client = cluster_jobs.connect(arguments.address)
    line = cluster_jobs.entrypoint(command, home_results=results is None)
    metadata = {
        cluster_jobs.COMMAND: " ".join(command),
        cluster_jobs.RESULTS: results or f"$HOME/{HOME_RESULTS}",
        **({cluster_jobs.STUDY: study} if study else {}),
    }
    say(f"shipping {len(files)} files, {size / 1e6:.1f} MB")
    cluster_jobs.submit(
        client, line, folder=here, files=files, pip=pip, variables=variables, metadata=metadata, job=job,
        version=None if arguments.no_ship_package else __version__,
    )  # fmt: skip
    say(f"job {job}: {line.removeprefix('exec ').replace(cluster_jobs.PYTHON, 'python')}")
    if arguments.no_wait:
        print(job)
        say(f"follow it with: python -m tune_cac jobs logs {job} --follow")
        return 0
    return followed(client, job, cluster_jobs.follow)


def followed(client: Any, job: str, follow: Callable[..., int]) -> int:
    """Print a job's log until it ends; return its exit code, 130 where the user leaves before."""
    try:
        code = follow(client, job, _print)
    except KeyboardInterrupt:
        say(f"\njob {job} goes on: python -m tune_cac jobs logs {job} --follow   or: jobs stop {job}")
        return 130
    say(f"job {job} ended with exit code {code}; bring its study here with: python -m tune_cac jobs fetch {job}")
    return code


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _checked(
    command: Sequence[str], job: str, parsers: Mapping[str, argparse.ArgumentParser]
) -> tuple[list[str], str | None, str | None]:
    """Return the command with a name for a new study, its study, and where it names its results.

    Raises:
        UserError: there is none, or it can't be run as a job.
    """
    if not command:
        raise UserError("submit needs a command after --, such as: submit -- search --space auto_thresholds")
    known = [name for name in parsers if name not in ("submit", "jobs", "dashboard")]
    if command[0] not in known:
        raise unknown_name("command of a job", command[0], known)
    arguments = parsers[command[0]].parse_args(command[1:])
    found = [*command]
    named = any(word.partition("=")[0] == "--results" for word in command)
    results = str(arguments.results) if named else None
    if results is not None and not is_uri(results) and not Path(results).is_absolute():
        raise UserError(
            f"--results of a job must be an absolute folder of the cluster or a URI, got {results}: a job's own folder "
            f"is removed; without it studies lie in ~/{HOME_RESULTS} of the head node"
        )
    study = getattr(arguments, "study", None)
    if command[0] == "search":
        options_given(arguments)  # wrong ones are refused here
        study = arguments.resume or arguments.name or job
        if arguments.resume is None and arguments.name is None:
            found += ["--name", job]
    elif not hasattr(arguments, "results"):
        results = "."  # nothing is kept
    return found, study, results


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if name in _NOT_PASSED:
        raise UserError(f"--env must not pass {name}, which a job gets from Ray itself: leave it out")
    if not given and name not in os.environ:
        raise UserError(f"--env must name a variable that is set here, or NAME=VALUE, got {text}")
    if any(word in name.upper() for word in _SECRET):
        say(f"warning: Ray shows {name} to whoever may see the cluster's jobs: better set it where `ray start` is run")
    return name, value if given else os.environ[name]
