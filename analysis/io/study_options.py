"""Declaration of a search's options, and the options that a study keeps.

The command line, the keywords of `tune_cac.search`, their documentation and `study.json` follow from it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainables.config import MOST_SEED
from trainables.gradskip.variables import EXAMPLE
from trainables.quality import DEFAULT_DROP, DEFAULT_RELATIVE_DROP, Quality, quality_named
from trainables.savings import SAVINGS
from trainables.storage import is_uri

#: Default of the folder that holds the studies.
RESULTS = "results"


def results_here(results: str | Path) -> Path:
    """Return the folder of this machine for studies of these results; of those in object storage the default one."""
    return Path(RESULTS if is_uri(results) else results)


#: Default of the number of trials.
TRIALS = 24

#: Default of the seeds on which an answer is trained.
SEEDS = 4

#: Full trainings for each further seed, and at least, that a study has executed before no setting follows one that was
#: refused over seeds, without a budget.
TRAININGS_PER_SEED, LEAST_TRAININGS = 5.0, 15.0


def most_trainings(seeds: int) -> float:
    """Return how much a study on so many seeds, its own among them, executes before no setting follows a refused one.

    >>> most_trainings(4), most_trainings(8)
    (15.0, 35.0)
    """
    return max(LEAST_TRAININGS, TRAININGS_PER_SEED * (seeds - 1))


def option(
    default: Any,
    meaning: str,
    *,
    flag: str = "",
    metavar: str | None = None,
    at_least: int | None = None,
    at_most: int | None = None,
    default_words: str = "",
    on_resume: bool = False,
    rare: bool = False,
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        default: its default; None where that is found out later, then perhaps in ``default_words``.
        meaning: its description for users.
        flag: its flag; empty for ``--name-of-the-field``.
        metavar: name of the value in the help; None for the flag's.
        at_least: smallest value of a number.
        at_most: largest value of a number.
        default_words: the default in words, where the value does not say it.
        on_resume: whether a resumed study takes it anew.
        rare: whether ``--help`` leaves it to ``--help-all``.
    """
    return field(
        default=default,
        metadata={
            "meaning": meaning, "flag": flag, "metavar": metavar, "at_least": at_least, "at_most": at_most,
            "default_words": default_words, "on_resume": on_resume, "rare": rare,
        },
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Option:
    """A declared option; attributes without a text are the arguments of `option`."""

    name: str  # its name in Python
    flag: str  # its flag on the command line
    type: type  # type of a value: str, int, float, bool, or Sequence or Mapping for a flag that may be repeated
    default: Any
    default_text: str  # its default in words; empty for none
    meaning: str
    metavar: str | None
    at_least: int | None
    at_most: int | None
    on_resume: bool
    rare: bool

    @property
    def text(self) -> str:
        """Return the meaning with the range and the default."""
        low = [] if self.at_least is None else [f">= {self.at_least}"]
        notes = [*low, *([f"default: {self.default_text}"] if self.default_text else [])]
        return f"{self.meaning} ({'; '.join(notes)})" if notes else self.meaning


@cache
def options_of(declared: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares with `option`, in order."""
    hints, found = get_type_hints(declared), []
    for one in fields(declared):
        if "meaning" not in one.metadata:
            continue
        given, hint, default = dict(one.metadata), hints[one.name], one.default
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        kinds = kinds if get_origin(hint) in (Union, types.UnionType) else [hint]
        text = given.pop("default_words")
        if not text and default is not None and default != () and default is not False:
            text = "on" if default is True else f"{default:g}" if isinstance(default, float) else str(default)
        found.append(
            Option(
                name=one.name,
                flag=given.pop("flag") or "--" + one.name.replace("_", "-"),
                type=str if str in kinds else get_origin(kinds[0]) or kinds[0],
                default=default,
                default_text=text,
                **given,
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options that a study keeps in `study.json`: every search that adds to it or finishes it has the same."""

    space: str = option(
        "auto_thresholds",
        "search space: a name that the command spaces lists, package.module:function or a YAML file of yours "
        "(a space, a grid, or a schedule with marked values), or several joined by +",
    )
    workload: str = option(
        "digits", "what is trained: a name that the command workloads lists, or package.module:function"
    )
    workload_options: Sequence[str] = option(
        (), "option of the workload, NAME=VALUE; may be repeated", flag="--option", metavar="NAME=VALUE"
    )
    trials: int | None = option(
        None,
        "trials, the baseline and the space's starting point among them",
        at_least=1,
        default_words=f"{TRIALS}; of a grid, all",
    )
    epochs: int | None = option(None, "epochs a trial", at_least=1, default_words="the workload's")
    seed: int = option(0, "seed of the trials and of the sampler", at_least=0, at_most=MOST_SEED)
    sampler: str = option(
        "auto",
        "what chooses the settings: auto (where the baseline's run predicts what a setting stops and saves, few "
        "distinct outcomes until none is worth its training; else TPE that learns from that run), or plain tpe, "
        "random, grid, gp or nsga2",
        metavar="NAME",
        rare=True,
    )
    lengths: str = option(
        "auto",
        "shares of the run that dense runs are cut to, and on which stops are searched, too, such as 1.0,0.8,0.6; "
        "auto: half, then 60 and 80 % while that loses too much, beside the other controls; 1.0: runs of full length",
        metavar="SHARES",
        rare=True,
    )
    seeds: int | None = option(
        None,
        "seeds, the study's own among them, on which what would be the answer is trained beside the baseline until "
        "that decides its mean loss; 1: the study's own alone",
        at_least=1,
        at_most=16,
        default_words=f"{SEEDS}; on --resume as the study was searched",
        on_resume=True,
    )
    grid: str | Path | Mapping[str, Any] | None = option(
        None,
        "grid file in YAML (any, join, all, value and then, exclude), searched in place of a space",
        metavar="FILE",
        rare=True,
    )
    metric: str | None = option(
        None,
        "metric by which trials are compared: what the workload's evaluation returns, val_loss for the mean loss on "
        "the validation split, or what a script reports",
        default_words="the workload's, as a rule accuracy",
        metavar="NAME",
    )
    direction: str | None = option(
        None,
        "min where a smaller metric is better, max where a larger one is",
        default_words="what the workload or the metric's name says",
        metavar="min|max",
        rare=True,
    )
    metric_unit: str | None = option(
        None, "unit of the metric in words; fraction: shown in percent and points", metavar="UNIT", rare=True
    )
    allowed_drop: float | str | None = option(
        None,
        "how much worse than the baseline's the metric may be, in its own unit or relative, such as 2%; an accuracy is "
        "a fraction in [0, 1): 0.005 is half a point",
        default_words=f"{DEFAULT_DROP}; of a metric that is no fraction {DEFAULT_RELATIVE_DROP}",
        metavar="DROP",
    )
    workers_per_trial: int = option(
        1,
        "processes that train each trial data-parallel, each with the processors and GPUs of a trial",
        at_least=1,
        rare=True,
    )
    gpus_per_trial: float = option(0.0, "GPUs a trial; a fraction shares one", at_least=0, on_resume=True)
    hold: Mapping[str, Any] | None = option(
        None,
        f"value of a variable that the space does not search, such as {EXAMPLE}, fixed in every trial but "
        "the baseline; may be repeated; it wins over what the space fixes",
        flag="--set",
        metavar="VARIABLE=VALUE",
    )
    saving: str | None = option(
        None,
        f"what trials are ranked by: {', '.join(SAVINGS)}",
        metavar="WHICH",
        default_words="what the space's methods save",
        rare=True,
    )
    controls: bool = option(
        True,
        "train beside the trials what a setting has to beat: dense runs of fewer epochs",
        rare=True,
    )
    sharing: bool | None = option(
        None,
        "train what trials have in common once; off: every trial alone, with equal rows (of outcomes others may be "
        "chosen, for no branch is recorded)",
        default_words="on; on --resume as the study was searched",
        on_resume=True,
        rare=True,
    )
    fresh_processes: bool = False
    """True to train each trial in a process of its own and share nothing: by the clock, or where training differs."""
    space_files: Mapping[str, str] = field(default_factory=dict)
    """Texts of the YAML files in `space`, as they were when the study began."""

    @property
    def quality(self) -> Quality:
        """Return the metric by which trials are compared."""
        return quality_named(self.metric, self.direction, self.metric_unit)
