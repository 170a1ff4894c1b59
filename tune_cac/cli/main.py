"""The command line: arguments in, one call, exit code out. Loads torch, ray and pandas only when a command needs them.

Exit codes: 0 done; 1 some trials failed, or nothing could be ranked; 2 wrong arguments; 3 the disk refused to be
written; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trainables.errors import DISK_REFUSALS, DiskError, UserError, cannot_write
from tune_cac.cli.schedule import add_compatible, add_schedule
from tune_cac.cli.sensitivity import add_sensitivity
from tune_cac.cli.workload_arguments import add_workload_options
from tune_cac.interrupts import sigterm_is_an_interrupt
from tune_cac.messages import close_unread, say

#: Options of ``search`` that say what is searched; a resumed study has its own.
_STUDY_FLAGS = (
    "space", "workload", "script", "data", "model", "option", "workers_per_trial", "trials", "epochs", "seed",
    "allowed_drop", "name", "set", "schedule", "compatible", "saving", "controls",
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """The parser; every command sets ``run`` to its function in `tune_cac.cli.trial`."""
    parser = argparse.ArgumentParser(
        prog="tune_cac",
        description="Find out how much of a PyTorch training run can be skipped without losing accuracy.",
        epilog="Start with: python -m tune_cac search --space auto_thresholds",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    search = commands.add_parser(
        "search", parents=[debug], help="search a space on a workload", description="Search a space on a workload with "
        "Ray and Optuna. The first trial is the baseline (method off), the second the space's starting point, as a "
        "rule the published defaults scaled to the run's length. Accuracies and drops are fractions: 0.005 is half a "
        "point.",
    )  # fmt: skip
    # Defaults are None so that --resume can tell what was given; SearchOptions holds the real ones.
    search.add_argument("--space", help="search space (default: auto_thresholds); see the command spaces")
    search.add_argument(
        "--workload", help="what is trained (default: digits): see the command workloads, or package.module:function"
    )
    add_workload_options(search)
    search.add_argument(
        "--script", metavar="COMMAND", help="train with a command of yours, such as 'python train.py': CAC_* variables "
        "are set for it, {CAC_VAR_START_THR} is filled in, and it prints its metrics (tune_cac.report, or JSON lines)",
    )  # fmt: skip
    search.add_argument("--trials", type=int, help="trials, the baseline among them (default: 24)")
    search.add_argument("--epochs", type=int, help="epochs a trial (default: the workload's)")
    search.add_argument("--seed", type=int, help="seed of the trials and of the sampler (default: 0)")
    search.add_argument(
        "--set", action="append", metavar="VARIABLE=VALUE", help="hold a variable that the space does not search, "
        "such as CAC_VAR_START_THR=0.97, in every trial but the baseline; may be repeated",
    )  # fmt: skip
    search.add_argument(
        "--schedule", metavar="FILE", help="compression schedule in YAML for the space schedule: values marked "
        "!search {low: 0.1, high: 0.9} are searched",
    )  # fmt: skip
    add_compatible(search)
    search.add_argument(
        "--saving", metavar="WHICH", help="compute that trials are ranked by: training, inference or both (default: "
        "what the space's methods save)",
    )  # fmt: skip
    search.add_argument("--allowed-drop", type=float, help="accuracy that may be lost, as a fraction (default: 0.005)")
    search.add_argument("--concurrency", type=int, help="trials at a time (default: what the processors allow)")
    search.add_argument("--cpus-per-trial", type=int, default=1, help="processors a trial (default: 1)")
    search.add_argument("--gpus-per-trial", type=float, default=0.0, help="GPUs a trial (default: 0)")
    search.add_argument(
        "--workers-per-trial", type=int, help="processes that train each trial data-parallel, each with the processors "
        "and GPUs of a trial (default: 1)",
    )  # fmt: skip
    _add_results(search)
    search.add_argument(
        "--name", help="name of the study (default: from workload, space and time); an existing one gets more trials"
    )
    search.add_argument("--resume", metavar="NAME", help="finish the remaining trials of a study")
    search.add_argument(
        "--checkpoint-every", type=float, default=60.0, metavar="SECONDS", help="seconds between a trial's checkpoints"
    )
    search.add_argument(
        "--controls", action=argparse.BooleanOptionalAction, help="train beside the trials what a setting has to beat: "
        "dense runs of 90 to 50 %% of the epochs, and random stops of the best setting's compute (default: on)",
    )  # fmt: skip
    search.add_argument(
        "--no-sharing", action="store_true", help="train every trial alone instead of sharing training prefixes"
    )
    search.add_argument(
        "--checkpoint-budget", default="20GB", metavar="BYTES",
        help="most bytes of checkpoints that sharing keeps, such as 500MB (default: 20GB)",
    )  # fmt: skip
    search.add_argument(
        "--retries", type=int, default=1, metavar="N", help="times that a trial whose worker died goes on from its "
        "last checkpoint, and that a baseline that failed is tried again (default: 1)",
    )  # fmt: skip
    search.set_defaults(run="search", compatible=None)

    trial = commands.add_parser(
        "trial", parents=[debug], help="train one configuration here, without Ray",
        description="Train one configuration in this process. CAC_* variables of the environment count; --set wins.",
    )  # fmt: skip
    trial.add_argument("--workload", default="digits", help="what is trained (default: digits)")
    add_workload_options(trial)
    trial.add_argument("--epochs", type=int, help="epochs (default: the workload's)")
    trial.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    trial.add_argument("--method", help="method (default: gradskip, with --schedule compression); none is the baseline")
    trial.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    trial.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    trial.add_argument(
        "--set", action="append", default=[], metavar="VARIABLE=VALUE", dest="assignments",
        help="a variable, such as CAC_VAR_START_THR=0.97; may be repeated",
    )  # fmt: skip
    trial.add_argument("--schedule", metavar="FILE", help="a compression schedule to train with")
    add_compatible(trial)
    trial.add_argument("--save", metavar="FILE", help="write the trained weights, such as for a teacher")
    trial.set_defaults(run="trial")

    confirm = commands.add_parser(
        "confirm", parents=[debug], help="retrain a study's best settings and its baseline on fresh seeds",
        description="Retrain the settings of a study that save most within the allowed drop, and its baseline, on "
        "seeds that the search has not seen; say which of them hold there, on the test split, with intervals. Asked "
        "again, it goes on where it was interrupted, or adds what more is asked for.",
    )  # fmt: skip
    confirm.add_argument("--top", type=int, default=5, help="settings to retrain (default: 5)")
    confirm.add_argument("--seeds", type=int, default=5, help="fresh seeds (default: 5)")
    confirm.add_argument("--concurrency", type=int, help="runs at a time (default: what the processors allow)")
    confirm.add_argument(
        "--checkpoint-budget", default="20GB", metavar="BYTES",
        help="most bytes of checkpoints that sharing keeps, such as 500MB (default: 20GB)",
    )  # fmt: skip
    _of_a_study(confirm, "confirm")

    for name, text in (
        ("report", "print the answer of a study and write it as a page to look at, report.html"),
        ("rank", "print a study's ranked table"),
    ):
        command = commands.add_parser(name, parents=[debug], help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("--allowed-drop", type=float, help="accuracy that may be lost (default: the study's)")
        command.add_argument("--top", type=int, default=20, help="rows to show (default: 20)")
        command.add_argument(
            "--price", type=float, metavar="SHARE", help="rank by worth: the share of the training compute that a "
            "point of accuracy is worth, such as 0.1",
        )  # fmt: skip
        if name == "report":
            command.add_argument("--output", metavar="FILE", help="the page (default: report.html in the study)")
            command.add_argument("--png", metavar="FOLDER", help="write every plot as a picture, too")
        _of_a_study(command, name)

    compare = commands.add_parser(
        "compare", parents=[debug], help="several studies of the same training side by side",
        description="Compare studies of one workload and length that searched different spaces: what each saves within "
        "the drop, front against front, hypervolume, and what the searches cost.",
    )  # fmt: skip
    compare.add_argument("studies", nargs="+", metavar="STUDY", help="folders of studies, or names under --results")
    compare.add_argument("--allowed-drop", type=float, help="accuracy that may be lost (default: the studies')")
    compare.add_argument("--top", type=int, default=20, help="rows of the joint front to show (default: 20)")
    compare.add_argument("--svg", metavar="FILE", help="write the picture as SVG")
    compare.add_argument("--png", metavar="FILE", help="write the picture as PNG")
    _add_results(compare)
    compare.set_defaults(run="compare")

    export = commands.add_parser(
        "export", parents=[debug], help="a trial's settings or the ranking in other programs' formats",
        description="Write one trial's settings (env, yaml, json; the best's without --trial) or the ranking (csv, "
        "parquet, latex, markdown).",
    )  # fmt: skip
    export.add_argument(
        "--format", default="env", help="env (default), yaml, json, schedule, csv, parquet, latex or markdown"
    )
    export.add_argument("--trial", type=int, help="number of the trial (default: the best)")
    export.add_argument("--output", metavar="FILE", help="write there instead of printing")
    export.add_argument("--top", type=int, help="rows of the ranking (default: all)")
    export.add_argument("--allowed-drop", type=float, help="accuracy that may be lost (default: the study's)")
    _of_a_study(export, "export")

    dashboard = commands.add_parser(
        "dashboard", parents=[debug], help="look at a study in optuna-dashboard, also while it is searched",
        description="Serve optuna-dashboard on a study's journal, to this machine alone, until Ctrl-C.",
    )  # fmt: skip
    dashboard.add_argument("--port", type=int, default=8080, help="port (default: 8080)")
    dashboard.add_argument("--no-browser", action="store_true", help="print the address only")
    _of_a_study(dashboard, "dashboard")

    tree = commands.add_parser(
        "tree", parents=[debug], help="draw a study's stage tree: what its trials trained, shared stretches once",
        description="Draw a study's stage tree, one line a stage: the iteration at which trials did something, what, "
        "up to which iteration it was trained, how many trials go through, and the result of those that end there.",
    )  # fmt: skip
    tree.add_argument("--depth", type=int, help="interventions to go down to (default: all)")
    tree.add_argument("--top", type=int, default=40, help="stages to show, the most visited (default: 40)")
    tree.add_argument("--svg", metavar="FILE", help="write the picture, too")
    _of_a_study(tree, "tree")

    replay = commands.add_parser(
        "replay", parents=[debug], help="predict what settings stop and save, from a study's recorded training",
        description="Predict what settings stop and save on a study's run without training: exact as far as trials "
        "were trained so, an estimate from the run without a method after it. CAC_* variables of the environment "
        "count; --set wins. With --random, the distinct outcomes of random settings of a space.",
    )  # fmt: skip
    replay.add_argument(
        "--set", action="append", default=[], metavar="VARIABLE=VALUE", dest="assignments",
        help="a variable, such as CAC_VAR_START_THR=0.97; may be repeated",
    )  # fmt: skip
    replay.add_argument("--random", type=int, metavar="N", help="replay so many random settings of a space")
    replay.add_argument("--space", help="that space (default: the study's)")
    replay.add_argument("--seed", type=int, default=0, help="of the random settings (default: 0)")
    replay.add_argument("--top", type=int, default=20, help="outcomes to show, the most frequent (default: 20)")
    replay.add_argument("--root", help="id of the recorded run, or how it begins, where the study has several")
    _of_a_study(replay, "replay")

    spaces = commands.add_parser("spaces", parents=[debug], help="list the search spaces, or show one with its ranges")
    spaces.add_argument("space", nargs="?", metavar="SPACE", help="show this one")
    spaces.add_argument("--workload", default="digits", help="whose run the ranges are for (default: digits)")
    add_workload_options(spaces)
    spaces.add_argument("--epochs", type=int, help="epochs of that run (default: the workload's)")
    spaces.set_defaults(run="spaces")

    doctor = commands.add_parser(
        "doctor", parents=[debug], help="a short dry run: layers, FLOPs, memory, times, and whether it repeats exactly",
        description="A short dry run of a training: layers with numbers, names and FLOPs, memory, time of a step, how "
        "long a search would take, and whether training repeats bit for bit on this machine.",
    )  # fmt: skip
    doctor.add_argument("--workload", default="digits", help="what is trained (default: digits)")
    add_workload_options(doctor)
    doctor.add_argument("--epochs", type=int, help="epochs of a run (default: the workload's)")
    doctor.add_argument("--trials", type=int, default=24, help="trials of the search that is estimated (default: 24)")
    doctor.add_argument("--all-layers", action="store_true", help="show every parameter of a large model")
    doctor.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    doctor.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    doctor.set_defaults(run="doctor")

    add_schedule(commands, debug)
    add_sensitivity(commands, debug)

    workloads = commands.add_parser("workloads", parents=[debug], help="list the workloads")
    workloads.set_defaults(run="workloads")
    return parser


def _of_a_study(parser: argparse.ArgumentParser, run: str) -> None:
    """A command on one study."""
    parser.add_argument("study", metavar="STUDY", help="a study's folder, or its name under --results")
    _add_results(parser)
    parser.set_defaults(run=run)


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", default="results", help="folder that holds the studies (default: results)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.version:
        from tune_cac import __version__

        print(f"tune_cac {__version__}")
        return 0
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        with sigterm_is_an_interrupt():  # before anything is loaded, which takes half a second
            if arguments.command == "search" and arguments.resume is not None:
                _refuse_study_flags(arguments)
            import tune_cac.cli.trial
            from tune_cac.study.decoded_images import kept_beside

            with kept_beside(getattr(arguments, "results", "results")):
                code: int = getattr(tune_cac.cli.trial, arguments.run)(arguments)
            sys.stdout.flush()
        return code
    except UserError as error:
        if arguments.debug:
            raise
        say(f"tune_cac: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        say("tune_cac: interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `... | head`
        close_unread(sys.stdout)
        return 0
    except OSError as error:
        if error.errno not in DISK_REFUSALS or arguments.debug:
            raise
        close_unread(sys.stdout)  # it may be what could not be written
        what = error.filename or "what was printed or written"
        say(f"tune_cac: error: {cannot_write(str(what), error, 'make room, or write elsewhere')}")
        return DiskError.exit_code


def _refuse_study_flags(arguments: argparse.Namespace) -> None:
    given = [f"--{name.replace('_', '-')}" for name in _STUDY_FLAGS if getattr(arguments, name) is not None]
    if given:
        raise UserError(
            f"--resume finishes a study as it was begun, so it takes no {', '.join(given)}: leave that out, "
            "or use --name without --resume to add trials"
        )
