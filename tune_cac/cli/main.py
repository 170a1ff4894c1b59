"""The command line: parse arguments, run one command, return its exit code.

Loads torch, ray and pandas only when a command needs them. Exit codes: 0 done; 1 some trials failed, or nothing could
be ranked; 2 wrong arguments; 3 the disk could not be written; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from analysis.io.study_options import RESULTS
from trainables.compression.distillation_flags import add_distillation_args
from trainables.errors import DISK_REFUSALS, DiskError, UserError, cannot_write
from tune_cac.cli import (
    confirm,
    doctor,
    export,
    export_model,
    replay,
    report,
    schedule,
    search,
    sensitivity,
    shim,
    spaces,
    studies,
    submit,
    tree,
    trial,
    workloads,
)
from tune_cac.cli.command import Parser
from tune_cac.interrupts import sigterm_is_an_interrupt
from tune_cac.messages import close_unread, say, warnings_as_messages

#: Commands in the order in which help lists them.
COMMANDS = (
    search, trial, confirm, report, export, export_model, studies, tree, replay, spaces, doctor, schedule, sensitivity,
    workloads, submit, shim,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; every command sets ``run`` to its function of the parsed arguments."""
    parser = Parser(
        prog="tune_cac",
        description="Find out how much of a PyTorch training run can be skipped without losing accuracy.",
        epilog="Start with: python -m tune_cac search --space auto_thresholds",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in COMMANDS:
        module.run.add_to(commands)
    add_distillation_args(commands.choices["trial"])
    commands.choices["submit"].set_defaults(parsers=commands.choices)  # of the command that a job runs
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
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
        shown = nullcontext() if arguments.debug else warnings_as_messages()
        with shown, sigterm_is_an_interrupt():  # before anything is loaded, which takes half a second
            from tune_cac.study.decoded_images import kept_beside

            with kept_beside(getattr(arguments, "results", None) or RESULTS):
                code: int = arguments.run(arguments)
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
    except BrokenPipeError:  # the output has no reader any more, as in `... | head`
        close_unread(sys.stdout)
        return 0
    except OSError as error:
        if error.errno not in DISK_REFUSALS or arguments.debug:
            raise
        close_unread(sys.stdout)  # it may be what could not be written
        what = error.filename or "what was printed or written"
        say(f"tune_cac: error: {cannot_write(str(what), error, 'make room, or write elsewhere')}")
        return DiskError.exit_code
