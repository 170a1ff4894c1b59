"""Declaration of a search's options: name, default, range, meaning, flag; and those that a study keeps.

The command line, the keywords and documentation of `tune_cac.search`, `study.json` and the table in docs/commands.md
are generated from these declarations.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainables.config import MOST_SEED
from trainables.errors import UserError

#: Default of the folder that holds the studies.
RESULTS = "results"


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
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        default: its default; None where that is found out later.
        meaning: what it is, for the command line, Python and the docs.
        flag: its flag; empty for ``--name-of-the-field``.
        metavar: name of the value in the help.
        at_least: smallest value of a number.
        at_most: largest value of a number.
        default_words: the default in words, where the value does not say it.
        on_resume: whether a resumed study takes it anew.
    """
    return field(
        default=default,
        metadata={
            "meaning": meaning, "flag": flag, "metavar": metavar, "at_least": at_least, "at_most": at_most,
            "default_words": default_words, "on_resume": on_resume,
        },
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Option:
    """A declared option."""

    name: str
    """Its name in Python."""
    flag: str
    """Its flag on the command line."""
    type: type
    """Type of a value: str, int, float, bool, or Sequence or Mapping for a flag that may be repeated."""
    default: Any
    """Its default."""
    default_text: str
    """Its default in words; empty for none."""
    meaning: str
    """Its description for users."""
    metavar: str | None
    """Name of the value in the help; None for the flag's."""
    at_least: int | None
    """Smallest value of a number."""
    at_most: int | None
    """Largest value of a number."""
    on_resume: bool
    """True if a resumed study takes it anew."""

    @property
    def text(self) -> str:
        """Return the meaning with the range and the default."""
        low = [] if self.at_least is None else [f">= {self.at_least}"]
        notes = [*low, *([f"default: {self.default_text}"] if self.default_text else [])]
        return f"{self.meaning} ({'; '.join(notes)})" if notes else self.meaning


@cache
def options_of(declared: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares with `option`, in order."""
    hints = get_type_hints(declared)
    return tuple(_option_of(found, hints[found.name]) for found in fields(declared) if "meaning" in found.metadata)


def _option_of(found: Field[Any], hint: Any) -> Option:
    given = found.metadata
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if _is_union(hint) else [hint]
    default = found.default
    text = given["default_words"]
    if not text and default is not None and default != () and default is not False:
        text = "on" if default is True else f"{default:g}" if isinstance(default, float) else str(default)
    return Option(
        name=found.name,
        flag=given["flag"] or "--" + found.name.replace("_", "-"),
        type=str if str in kinds else get_origin(kinds[0]) or kinds[0],
        default=default,
        default_text=text,
        **{name: given[name] for name in ("meaning", "metavar", "at_least", "at_most", "on_resume")},
    )


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options that a study keeps in `study.json`: every search that adds to it or finishes it has the same."""

    space: str = option(
        "auto_thresholds",
        "search space: a name that the command spaces lists, package.module:function or a YAML file of yours, or "
        "several joined by +",
    )
    workload: str = option(
        "digits", "what is trained: a name that the command workloads lists, or package.module:function"
    )
    workload_options: Sequence[str] = option(
        (), "option of the workload, NAME=VALUE; may be repeated", flag="--option", metavar="NAME=VALUE"
    )
    trials: int = option(24, "trials, the baseline and the space's starting point among them", at_least=1)
    epochs: int | None = option(None, "epochs a trial", at_least=1, default_words="the workload's")
    seed: int = option(0, "seed of the trials and of the sampler", at_least=0, at_most=MOST_SEED)
    allowed_drop: float = option(
        0.005, "accuracy that may be lost against the baseline, a fraction in [0, 1): 0.005 is half a point"
    )
    workers_per_trial: int = option(
        1,
        "processes that train each trial data-parallel, each with the processors and GPUs of a trial",
        at_least=1,
    )
    gpus_per_trial: float = option(0.0, "GPUs a trial; a fraction shares one", at_least=0, on_resume=True)
    hold: Mapping[str, Any] | None = option(
        None,
        "value of a variable that the space does not search, such as CAC_VAR_START_THR=0.97, fixed in every trial but "
        "the baseline; may be repeated; it wins over what the space fixes",
        flag="--set",
        metavar="VARIABLE=VALUE",
    )
    saving: str | None = option(
        None,
        "compute that trials are ranked by: training, inference or the mean of both",
        metavar="WHICH",
        default_words="what the space's methods save",
    )
    controls: bool = option(
        True,
        "train beside the trials what a setting has to beat: dense runs of 90 to 50 % of the epochs, and random stops "
        "of the best setting's compute",
    )
    sharing: bool | None = option(
        None,
        "train what trials have in common once; off: every trial alone, with equal results",
        default_words="on; on --resume as the study was searched",
        on_resume=True,
    )
    fresh_processes: bool = option(
        False,
        "train every trial in a process of its own and share nothing, for training that depends on what its process "
        "trained before",
    )
    space_files: Mapping[str, str] = field(default_factory=dict)
    """Texts of the YAML files in `space`, as they were when the study began."""


def check_allowed_drop(allowed_drop: float) -> None:
    """Raise UserError unless the allowed accuracy loss is a fraction in [0, 1)."""
    if not 0 <= allowed_drop < 1:
        raise UserError(
            "the allowed accuracy loss must be a fraction in [0, 1), such as 0.005 for half a point, got "
            f"{allowed_drop}"
        )
