"""Errors shown to the user in one line: the rule, the value given and how to fix it."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

#: What takes the place of names that earlier versions had.
GONE = {
    "recommend": "it was off by more than the allowed loss: search, which takes 3 to 6 full trainings",
    "rank": "report NAME prints the same table, with the same options",
    "compare": "analysis.load reads each study, relative to its own baseline",
    "dashboard": "optuna-dashboard results/NAME/optuna.journal, of pip install 'tune-cac[dashboard]'",
    "jobs": "ray job list, status, logs and stop; submit with --results s3://... has its studies at hand",
    "--most-mb": "Ray refuses more than 500 MiB itself: leave it out",
    "--exclude": "what .gitignore names is not shipped",
    "--no-ship-package": "tune_cac is always shipped as it runs here: leave it out",
    "--prior": "a search from earlier studies cost as much as one without: leave it out",
    "--part": "a grid is one study, whose trials run at once: leave it out",
    "--study-storage": "the journal on a disk that all nodes see, or --results s3://..., takes its place",
    "--fresh-processes": "a search finds out by itself whether training repeats: leave it out",
    "--format": "export NAME --as torch takes its place",
    "--top": "report NAME --all prints every trial",
    "--early-ending": "it saved 0 to 1.7 % of a study: leave it out",
    **dict.fromkeys(("csv", "parquet"), "the study's folder has ranking.csv and trials.parquet"),
    **dict.fromkeys(("latex", "markdown"), "the study's report.md has the table"),
    **dict.fromkeys(
        ("--png", "--svg", "--html"),
        "report writes a page with all pictures, and with --picture FILE the trade-off as .svg, .png or .pdf",
    ),
    **dict.fromkeys(
        ("auto_thresholds_by_network", "gradskip_by_network"),
        "settings for each network saved 2.2 %: take auto_thresholds, with CAC_WATCH for one of them",
    ),
}

#: Names of other programs' commands and options, and ours for the same.
MEANT = {
    **dict.fromkeys(("best", "settings"), "export"), **dict.fromkeys(("plot", "show", "results", "view"), "report"),
    **dict.fromkeys(("list", "ls", "status", "delete", "rm"), "studies"), **dict.fromkeys(("run", "train"), "trial"),
    **dict.fromkeys(("tune", "optimize", "start", "resume"), "search"), "layers": "doctor", "models": "workloads",
}  # fmt: skip


class UserError(ValueError):
    """Invalid input. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class DiskError(UserError):
    """Write error of a full, over-quota or read-only disk; the user's input was valid."""

    exit_code = 3


#: Error numbers of a disk that is full, over quota, read-only or broken.
DISK_REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


def cannot_write(what: str, error: OSError, instead: str) -> UserError:
    """Return the error for a file that cannot be written: a `DiskError` where the disk is the cause.

    >>> print(cannot_write("--output x", OSError(errno.ENOSPC, "No space left on device"), "choose another file"))
    cannot write --output x: No space left on device; choose another file
    """
    kind = DiskError if error.errno in DISK_REFUSALS else UserError
    return kind(f"cannot write {what}: {error.strerror or error}; {instead}")


class TrainingDiverged(RuntimeError):
    """The loss or accuracy of a trial is not a number, so the trial cannot be ranked."""


class WorkerDied(RuntimeError):
    """A process of a trial ended without an error: killed, out of memory, or its node is gone."""


def check_model_first(given: object, call: str) -> None:
    """Raise UserError unless a call's first argument is a model, as every `torch.nn.Module`."""
    if not hasattr(given, "named_parameters"):
        raise UserError(f"the first argument must be the model, got {type(given).__name__}: {call}")


def nearest_name(given: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like a given one, or begins with it, whatever its case; None if none does.

    >>> nearest_name("STOP", ["stop_rules", "agp"])
    'stop_rules'
    """
    folded, text = {name.casefold(): name for name in names}, given.casefold()
    longer = [name for name in folded if text and name.startswith(text)]
    near = difflib.get_close_matches(text, list(folded), n=1) or longer
    return folded[near[0]] if near else None


def unknown_name(kind: str, given: str, valid: Iterable[str]) -> UserError:
    """Return the error for an unknown name, with the nearest valid name and the list of all.

    >>> print(unknown_name("space", "auto_treshold", ["auto_thresholds", "agp"]))
    unknown space 'auto_treshold': did you mean 'auto_thresholds'? Valid: agp, auto_thresholds
    """
    if given in GONE:
        return UserError(f"{kind} {given} is gone: {GONE[given]}")
    names = sorted(valid)
    meant = MEANT.get(given)
    near = meant if meant in names else nearest_name(given, names)
    hint = f"did you mean {near!r}? " if near else ""
    return UserError(f"unknown {kind} {given!r}: {hint}Valid: {', '.join(names)}")
