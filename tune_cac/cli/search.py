"""The command ``search``: search a space, or finish a study."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from trainables.errors import UserError
from tune_cac.cli.console import print_table
from tune_cac.cli.options import add_checkpoint_budget, add_compatible, add_results
from tune_cac.cli.workload_arguments import add_workload_options, take_script, workload_options
from tune_cac.messages import say
from tune_cac.study.fixed_params import read_assignments, with_schedule

#: Options of ``search`` that define a study; a resumed study has its own.
_STUDY_FLAGS = (
    "space", "workload", "script", "data", "model", "option", "workers_per_trial", "trials", "epochs", "seed",
    "allowed_drop", "name", "set", "schedule", "compatible", "saving", "controls",
)  # fmt: skip


def add_parser(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "search", parents=[debug], help="search a space on a workload", description="Search a space on a workload with "
        "Ray and Optuna. The first trial is the baseline (method off), the second the space's starting point, as a "
        "rule the published defaults scaled to the run's length. Accuracies and accuracy losses are fractions: 0.005 "
        "is half a point.",
    )  # fmt: skip
    # Defaults are None so that --resume can tell what was given; SearchOptions holds the real ones.
    parser.add_argument("--space", help="search space (default: auto_thresholds); see the command spaces")
    parser.add_argument(
        "--workload", help="what is trained (default: digits): see the command workloads, or package.module:function"
    )
    add_workload_options(parser)
    parser.add_argument(
        "--script", metavar="COMMAND", help="train with a command of yours, such as 'python train.py': CAC_* variables "
        "are set for it, {CAC_VAR_START_THR} is filled in, and it prints its metrics (tune_cac.report, or JSON lines)",
    )  # fmt: skip
    parser.add_argument("--trials", type=int, help="trials, the baseline among them (default: 24)")
    parser.add_argument("--epochs", type=int, help="epochs a trial (default: the workload's)")
    parser.add_argument("--seed", type=int, help="seed of the trials and of the sampler (default: 0)")
    parser.add_argument(
        "--set", action="append", metavar="VARIABLE=VALUE", help="fix a variable that the space does not search, "
        "such as CAC_VAR_START_THR=0.97, in every trial but the baseline; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--schedule", metavar="FILE", help="compression schedule in YAML for the space schedule: values marked "
        "!search {low: 0.1, high: 0.9} are searched",
    )  # fmt: skip
    add_compatible(parser)
    parser.add_argument(
        "--saving", metavar="WHICH", help="compute that trials are ranked by: training, inference or both (default: "
        "what the space's methods save)",
    )  # fmt: skip
    parser.add_argument("--allowed-drop", type=float, help="accuracy that may be lost, as a fraction (default: 0.005)")
    parser.add_argument("--concurrency", type=int, help="trials at a time (default: what the processors allow)")
    parser.add_argument("--cpus-per-trial", type=int, default=1, help="processors a trial (default: 1)")
    parser.add_argument("--gpus-per-trial", type=float, default=0.0, help="GPUs a trial (default: 0)")
    parser.add_argument(
        "--workers-per-trial", type=int, help="processes that train each trial data-parallel, each with the processors "
        "and GPUs of a trial (default: 1)",
    )  # fmt: skip
    add_results(parser)
    parser.add_argument(
        "--name", help="name of the study (default: from workload, space and time); an existing one gets more trials"
    )
    parser.add_argument("--resume", metavar="NAME", help="finish the remaining trials of a study")
    parser.add_argument(
        "--checkpoint-every", type=float, default=60.0, metavar="SECONDS", help="seconds between a trial's checkpoints"
    )
    parser.add_argument(
        "--controls", action=argparse.BooleanOptionalAction, help="train beside the trials what a setting has to beat: "
        "dense runs of 90 to 50 %% of the epochs, and random stops of the best setting's compute (default: on)",
    )  # fmt: skip
    parser.add_argument(
        "--no-sharing", action="store_true", help="train every trial alone instead of sharing training prefixes"
    )
    add_checkpoint_budget(parser)
    parser.add_argument(
        "--retries", type=int, default=1, metavar="N", help="times that a trial whose worker died goes on from its "
        "last checkpoint, and that a baseline that failed is tried again (default: 1)",
    )  # fmt: skip
    parser.set_defaults(run=run, compatible=None)


def run(arguments: argparse.Namespace) -> int:
    """Search a space or resume a study; print the ranked table."""
    if arguments.resume is not None:
        _refuse_study_flags(arguments)
    from analysis.io.layout import Layout
    from tune_cac.study.options import SearchOptions

    how = {
        "results": Path(arguments.results),
        "concurrency": arguments.concurrency,
        "cpus_per_trial": arguments.cpus_per_trial,
        "gpus_per_trial": arguments.gpus_per_trial,
        "checkpoint_every_s": arguments.checkpoint_every,
        "checkpoint_budget": arguments.checkpoint_budget,
        "retries": arguments.retries,
    }
    take_script(arguments)
    given = {
        name: getattr(arguments, name)
        for name in ("space", "workload", "trials", "epochs", "seed", "allowed_drop", "name")
        if getattr(arguments, name) is not None
    }
    options = workload_options(arguments)
    if options is not None:
        given["workload_options"] = options
    if arguments.workers_per_trial is not None:
        given["workers_per_trial"] = arguments.workers_per_trial
    if arguments.no_sharing:
        how["sharing"] = False
    if arguments.controls is not None:
        given["controls"] = arguments.controls
    if arguments.set is not None:
        given["hold"] = read_assignments(arguments.set)
    if arguments.saving is not None:
        given["saving"] = arguments.saving
    hold = with_schedule(given.get("hold", {}), arguments.schedule, compatible=bool(arguments.compatible))
    SearchOptions(**how, **{**given, "hold": hold})  # wrong arguments raise here, before torch or ray is loaded
    from tune_cac.tuning.study_search import resume as resume_study
    from tune_cac.tuning.study_search import search as search_study

    resuming = arguments.resume is not None
    if resuming:
        found = resume_study(arguments.resume, **how)
    else:
        found = search_study(**how, **given, schedule=arguments.schedule, compatible=bool(arguments.compatible))
    if sys.stdout.isatty():
        print()
    if len(found.ranking):
        print_table(found.table(top=15))
        print()
    print(found.headline)
    print(found.cost_line)
    kept = [file.name for file in (Layout(found.folder).best_schedule, Layout(found.folder).best) if file.exists()]
    if kept:
        print(f"Settings: {found.folder / kept[0]}   report: python -m tune_cac report {found.folder}")
    failures = found.failures
    for _, failure in failures.iterrows():
        say(f"trial {failure['trial']} failed: {failure['error']}")
    if len(failures):
        say(f"{len(failures)} of {len(found.trials)} trials failed")
    if found.interrupted:
        say(f"Interrupted. Finish the remaining trials with: {_resume_line(found.folder, arguments)}")
        return 130
    return 1 if len(failures) or len(found.ranking) == 0 else 0


def _refuse_study_flags(arguments: argparse.Namespace) -> None:
    given = [f"--{name.replace('_', '-')}" for name in _STUDY_FLAGS if getattr(arguments, name) is not None]
    if given:
        raise UserError(
            f"--resume finishes a study as it was begun, so it takes no {', '.join(given)}: leave that out, "
            "or use --name without --resume to add trials"
        )


def _resume_line(folder: Path, arguments: argparse.Namespace) -> str:
    results = "" if arguments.results == "results" else f" --results {arguments.results}"
    name = folder.name if folder.parent == Path(arguments.results) else str(folder)
    return f"python -m tune_cac search --resume {name}{results}"
