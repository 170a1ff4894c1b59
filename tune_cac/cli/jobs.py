"""The command ``jobs``: look at the jobs of a Ray cluster, stop them, bring their studies back."""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis.io.study_options import RESULTS
from trainables.errors import UserError
from trainables.storage import is_uri, joined
from tune_cac import __version__
from tune_cac.cli.console import print_table
from tune_cac.cli.submit import add_address, followed
from tune_cac.messages import say

#: Most seconds until a study is packed on the head node.
_PACK_S = 600.0


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "jobs", parents=[debug], help="list, follow, stop and fetch the jobs of a Ray cluster",
        description="Look at the jobs of a Ray cluster that `submit` began, stop them, and bring their studies back.",
    )  # fmt: skip
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text, act in (
        ("list", "the jobs, the oldest first", _list),
        ("status", "a job's state, and its command's exit code as this command's", _status),
        ("logs", "what a job has printed", _logs),
        ("stop", "end a job; its study can be resumed", _stop),
        ("fetch", "bring a job's study here, to be looked at and resumed", _fetch),
    ):
        action = actions.add_parser(name, parents=[debug], help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_address(action)
        if name != "list":
            action.add_argument("job", metavar="ID", help="the job, as `jobs list` names it")
        if name == "logs":
            action.add_argument("--follow", action="store_true", help="go on until the job ends, with its exit code")
        if name == "fetch":
            action.add_argument("--into", default=RESULTS, help=f"folder for the study (default: {RESULTS})")
        action.set_defaults(run=run, act=act)


def run(arguments: argparse.Namespace) -> int:
    """Connect and do what is asked."""
    from tune_cac.jobs.cluster_jobs import connect

    code: int = arguments.act(connect(arguments.address), arguments)
    return code


def _list(client: Any, arguments: argparse.Namespace) -> int:
    from tune_cac.jobs.cluster_jobs import COMMAND, jobs

    rows = [["job", "state", "begun", "minutes", "command"]]
    for job in jobs(client):
        begun = job.start_time / 1e3 if job.start_time else None
        ended = job.end_time / 1e3 if job.end_time else time.time()
        rows.append(
            [
                str(job.submission_id),
                str(job.status.value),
                "" if begun is None else f"{datetime.fromtimestamp(begun):%Y-%m-%d %H:%M}",
                "" if begun is None else f"{(ended - begun) / 60:.1f}",
                (job.metadata or {}).get(COMMAND, job.entrypoint or ""),
            ]
        )
    print_table(rows)
    return 0


def _status(client: Any, arguments: argparse.Namespace) -> int:
    from tune_cac.jobs.cluster_jobs import details, exit_code

    job = details(client, arguments.job)
    ended = job.status.is_terminal()
    print(f"{job.status.value}{f', exit code {exit_code(job)}' if ended else ''}: {job.message or ''}".rstrip(": "))
    return exit_code(job) if ended else 0


def _logs(client: Any, arguments: argparse.Namespace) -> int:
    from tune_cac.jobs.cluster_jobs import details, follow

    details(client, arguments.job)
    if arguments.follow:
        return followed(client, arguments.job, follow)
    print(client.get_job_logs(arguments.job), end="")
    return 0


def _stop(client: Any, arguments: argparse.Namespace) -> int:
    from tune_cac.jobs.cluster_jobs import details

    job = details(client, arguments.job)
    if job.status.is_terminal():
        say(f"{arguments.job} has ended already ({job.status.value})")
        return 0
    client.stop_job(arguments.job)
    say(f"{arguments.job} is being stopped; its study can be fetched and resumed")
    return 0


def _fetch(client: Any, arguments: argparse.Namespace) -> int:
    from tune_cac.jobs import cluster_jobs
    from tune_cac.jobs.packing import from_lines, unpack
    from tune_cac.jobs.shipping import write_wheel
    from tune_cac.study.folder import find_study

    job = cluster_jobs.details(client, arguments.job)
    about = job.metadata or {}
    if cluster_jobs.STUDY not in about:
        raise UserError(f"{arguments.job} has no study that could be fetched: its command is {job.entrypoint}")
    if not job.status.is_terminal():
        say(f"{arguments.job} still runs: what it has now is fetched")
    results, study = about[cluster_jobs.RESULTS], about[cluster_jobs.STUDY]
    if is_uri(results) or is_uri(study):
        layout = find_study(Path(arguments.into), study if is_uri(study) else str(joined(results, study)))
        print(layout.root)
        return 0
    target = Path(arguments.into) / Path(study).name
    if target.exists():
        raise UserError(f"{target} exists already: move it away, or give another folder by --into")
    packing = f"{arguments.job}-fetch-{int(time.time())}"
    own = job.runtime_env or {}
    environment = {"pip": own["pip"]} if "pip" in own else {}
    place = f"{results}/{study}"
    with tempfile.TemporaryDirectory(prefix="tune_cac-") as here:
        if "py_modules" in own:  # shipped again: a cluster forgets what an ended job had
            environment["py_modules"] = [str(write_wheel(Path(here), __version__))]
        client.submit_job(
            entrypoint=f'exec {cluster_jobs.PYTHON} -m tune_cac.jobs.packing "{place}"',
            submission_id=packing,
            runtime_env=environment,
        )
    ends = time.monotonic() + _PACK_S
    while not client.get_job_info(packing).status.is_terminal():
        if time.monotonic() > ends:
            raise UserError(f"{place} was not packed within {_PACK_S:g} s: see python -m tune_cac jobs logs {packing}")
        time.sleep(0.5)
    log = client.get_job_logs(packing)
    if cluster_jobs.exit_code(client.get_job_info(packing)):
        last = (log.strip().splitlines() or ["it printed nothing"])[-1]
        raise UserError(f"{place} could not be packed on the cluster: {last}")
    unpack(from_lines(log), target)
    print(target)
    return 0
