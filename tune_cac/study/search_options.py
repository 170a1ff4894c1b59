"""Options of a search, checked before torch or ray is loaded."""

from __future__ import annotations

import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import search_spaces
from analysis.io.study_files import StudyInfo
from analysis.io.study_options import (
    LEAST_TRAININGS,
    RESULTS,
    SEEDS,
    TRAININGS_PER_SEED,
    TRIALS,
    StudyOptions,
    option,
    options_of,
    results_here,
)
from search_spaces import _FILES, Space, first_options
from search_spaces.grid_file import COMBINATIONS, GRID
from search_spaces.joined import compiled
from search_spaces.yaml_space import text_of
from trainables.config import check_integer
from trainables.errors import UserError, unknown_name
from trainables.gradients.fields import estimator_in
from trainables.gradskip.variables import is_number
from trainables.metrics import check_metric
from trainables.quality import ACCURACY, Quality, default_drop, quality_named, read_drop
from trainables.registry import SCRIPT, WORKLOADS, check_workload, is_factory
from trainables.runtime.processors import processors
from trainables.savings import SAVINGS, TIME, of_zeros
from trainables.script.placeholders import names
from trainables.storage import check_place, is_uri
from trainables.workload_options import canonical, read_options
from trainables.workloads import default_epochs
from tune_cac.ray_backend.loggers import check_loggers
from tune_cac.study.fixed_params import SAMPLERS, check_hold, check_points, grid_of, with_schedule

_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_options(declared: type, *, on_resume: bool = False) -> Callable[[_Function], _Function]:
    """Return a decorator that gives a function the options of a dataclass as its keywords.

    The function takes them, or only those that a resumed study takes anew, as ``**given``; its signature and, in place
    of the line ``given: ...``, its docstring list them. An unknown keyword raises UserError with the nearest one.
    """
    options = {found.name: found for found in options_of(declared) if found.on_resume or not on_resume}
    keywords = inspect.signature(declared).parameters
    listed = "\n".join(
        textwrap.fill(f"{name}: {found.text}.", 112, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, found in options.items()
    )

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [found for found in signature.parameters.values() if found.kind is not found.VAR_KEYWORD]

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in options and name not in signature.parameters:
                    raise unknown_name("option", name, options)
            return function(*args, **given)

        checked.__signature__ = signature.replace(parameters=[*own, *map(keywords.get, options)])  # type: ignore
        text = inspect.cleandoc(function.__doc__ or "")
        checked.__doc__ = re.sub(r"^    given: .*$", lambda _: listed, text, count=1, flags=re.MULTILINE)
        return cast(_Function, checked)

    return decorate


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_DURATION = re.compile(r"\s*".join(rf"(?:(?P<{unit}>\d+(?:\.\d+)?)\s*{unit})?" for unit in _SECONDS))
#: The value of ``--lengths`` that lets the search choose the lengths by what they show.
AUTO_LENGTHS = "auto"
#: Devices of trials.
DEVICES = ("auto", "cpu", "cuda")


def read_duration(value: float | str, flag: str = "--time-budget") -> float:
    """Return a positive number of seconds from a number, or from text such as ``1h30m``; UserError for another."""
    text, seconds = str(value).strip().lower(), 0.0
    if is_number(value) or re.fullmatch(r"\d+(\.\d+)?", text):
        seconds = float(value)
    elif found := _DURATION.fullmatch(text):
        seconds = sum(_SECONDS[unit] * float(number) for unit, number in found.groupdict().items() if number)
    if not seconds > 0:
        raise UserError(
            f"{flag} must be a positive number of seconds, or a duration such as 90m or 1h30m, got {value!r}"
        )
    return seconds


def read_bytes(value: int | str) -> int:
    """Return a number of bytes >= 0 from a number, or from text such as ``1.5MB``; UserError for another."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or found is None or found[2].upper() not in _UNITS:
        raise UserError(
            f"--checkpoint-budget must be a number of bytes >= 0 with or without a unit, such as 20GB, got {value!r}"
        )
    return round(float(found[1]) * _UNITS[found[2].upper()])


def read_lengths(text: str) -> tuple[float, ...]:
    """Return the shares in (0, 1] of a text such as ``1.0,0.8,0.6``; UserError for another."""
    try:
        found = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < share <= 1 for share in found):
        raise UserError(
            f"--lengths must be {AUTO_LENGTHS} or shares of the full run in (0, 1], such as 1.0,0.8,0.6 (1.0 alone: "
            f"only runs of full length), got {text!r}"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class SearchOptions(StudyOptions):
    """The options of a search: those that the study keeps, and how this call runs it.

    UserError: an unknown space or workload, a number out of range, or a value that cannot be fixed.
    """

    script: str | None = option(
        None,
        "train with a command of yours, such as 'python train.py': CAC_* variables are set for it, {CAC_VAR_SAMPLES} "
        "is filled in, and it prints its metrics (tune_cac.report, or JSON lines)",
        metavar="COMMAND",
    )
    schedule: str | Path | None = option(
        None,
        "compression schedule in YAML for the space schedule: values marked !search {low: 0.1, high: 0.9} are searched",
        metavar="FILE",
        rare=True,
    )
    compatible: bool = option(False, "warn of what Distiller silently accepted in a schedule instead of refusing it")
    name: str | None = option(
        None, "name of the study; an existing one gets more trials", default_words="from workload, space and time"
    )
    results: str | Path = option(
        RESULTS,
        "folder that holds the studies, or its URI in object storage, such as s3://bucket/studies: then trials share "
        "training there, and the study's other files lie in results/NAME and are copied there every 30 s",
        on_resume=True,
        rare=True,
    )
    address: str | None = option(
        None,
        "Ray cluster to search on: HOST:PORT, or auto for the one that runs on this machine",
        default_words="RAY_ADDRESS, else this machine alone",
        on_resume=True,
    )
    concurrency: int | None = option(
        None,
        "trials at a time",
        at_least=1,
        default_words="what the assigned processors allow",
        on_resume=True,
        rare=True,
    )
    device: str = option(
        "auto",
        "cpu, cuda, or auto: the one that trains faster, by 20 steps on each; a study keeps its own",
        metavar="DEVICE",
        on_resume=True,
    )
    log: Sequence[str] = option(
        (),
        "mlflow or wandb, beside TensorBoard's events: one run a trial, into the study's folder unless "
        "MLFLOW_TRACKING_URI or WANDB_MODE says otherwise",
        metavar="LOGGER",
        on_resume=True,
        rare=True,
    )
    cpus_per_trial: int = option(
        1, "processors and threads a trial; --resume keeps them", at_least=1, on_resume=True, rare=True
    )
    checkpoint_every_s: float = option(
        60.0,
        "seconds from one checkpoint of a running trial to the next; 0: every epoch",
        flag="--checkpoint-every",
        metavar="SECONDS",
        at_least=0,
        on_resume=True,
        rare=True,
    )
    checkpoint_budget: int | str = option(
        "20GB",
        "most bytes of checkpoints that sharing keeps, fewer on a disk that is nearly full: a number, or text such as "
        "500MB (10^6) or 512MiB (2^20)",
        metavar="BYTES",
        on_resume=True,
        rare=True,
    )
    time_budget: float | str | None = option(
        None,
        "time after which the search ends, and --resume goes on with the trials that were running: seconds, or text "
        "such as 90m or 1h30m",
        metavar="DURATION",
        on_resume=True,
    )
    cost_budget: float | None = option(
        None,
        "compute in full trainings after which this search begins no further trial; running ones finish. Without it no "
        f"setting follows a refused one on further seeds once {LEAST_TRAININGS:g} ({TRAININGS_PER_SEED:g} a seed) are "
        "executed in all",
        metavar="N",
        on_resume=True,
        rare=True,
    )
    trial_timeout: float | str | None = option(
        None,
        "time without a row, such as 30m, after which a trial's process is ended and the trial has failed; longer than "
        "the slowest epoch",
        metavar="DURATION",
        on_resume=True,
        rare=True,
    )
    retries: int = option(
        1,
        "times that a trial whose worker died goes on from its last checkpoint",
        metavar="N",
        at_least=0,
        on_resume=True,
        rare=True,
    )

    def __post_init__(self) -> None:
        self._take_file()
        self._take_schedule()
        self._take_script()
        self._take_grid()
        options = read_options(self.workload_options)
        self._set(
            space_files=search_spaces.read_files(self.space, self.space_files), workload_options=canonical(options)
        )
        space = self.loaded_space
        check_workload(self.workload, self.workload_options)
        self._check_values(options)
        self._set(hold=with_schedule(self.hold or {}, self.schedule, compatible=self.compatible))
        self._check_space(space, options)
        self._check_compression(space)
        self._check_workers()
        if self.ranked_by == TIME:  # times are those of a trial alone, on a machine that does nothing else
            self._set(fresh_processes=True, concurrency=self.concurrency or 1)
        # Without shared processes there is no training state that trials could share.
        alone = self.is_script or self.workers_per_trial > 1 or self.fresh_processes
        self._set(sharing=not alone and self.sharing is not False, hold=check_hold(space, self.fixed))
        self._set(seeds=SEEDS if self.seeds is None else self.seeds)
        if self.points is not None:
            check_points(self.points, self.fixed)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _take_file(self) -> None:
        """Set the option for the kind of file that is given as the space: a schedule, a grid, or a space in YAML."""
        file = Path(self.space)
        if file.suffix not in _FILES or not file.is_file():
            return
        keys = set(re.findall(r"^([a-z]+):", text_of(str(file)), re.MULTILINE))
        if "policies" in keys:
            self._set(schedule=file, space="schedule")
        elif keys & set(COMBINATIONS):
            self._set(grid=file, space=GRID)

    def _take_schedule(self) -> None:
        """Make a schedule that is given alone the space."""
        if self.schedule is not None and self.grid is None and self.space == SearchOptions.space:
            self._set(space="schedule")

    def _take_script(self) -> None:
        """Make a command of the user the workload; the options of a study have it as the workload already."""
        if self.script is None:
            return
        if self.workload_options or self.workload not in (SearchOptions.workload, SCRIPT):
            raise UserError(
                f"--script trains with a command of yours, so it takes no --workload and no options of one, got "
                f"{' '.join([self.workload, *self.workload_options])}"
            )
        if not self.script.strip():
            raise UserError("--script must be a command, such as 'python train.py', got an empty one")
        self._set(workload=SCRIPT, workload_options=(f"command={self.script}",))

    def _take_grid(self) -> None:
        """Make a grid file's points the space; the options of a study have them as the space already."""
        if self.grid is not None:
            if self.space not in (SearchOptions.space, GRID):
                raise UserError(
                    f"--grid is searched in place of a space, so it takes no --space, got {self.space}: leave one out"
                )
            sampler = "grid" if self.sampler == SearchOptions.sampler else self.sampler
            self._set(grid=grid_of(self.grid), space=GRID, sampler=sampler)
        if self.trials is None and self.sampler != "grid":  # a grid's number of points depends on the run
            self._set(trials=TRIALS)

    def _check_values(self, options: Mapping[str, str]) -> None:
        """Raise UserError for an option whose value is none by itself; make numbers of those that are text."""
        for declared in options_of(SearchOptions):
            low, value = declared.at_least, getattr(self, declared.name)
            if low is None or value is None:
                continue
            if declared.type is int:
                check_integer(declared.flag, value, low, declared.at_most)
            elif not is_number(value) or value < low:
                raise UserError(f"{declared.flag} must be a number >= {low}, got {value!r}")
        valid: dict[str, tuple[str | None, ...]] = {"device": DEVICES, "sampler": SAMPLERS, "saving": (None, *SAVINGS)}
        for name, known in valid.items():
            if getattr(self, name) not in known:
                raise unknown_name(f"--{name}", str(getattr(self, name)), filter(None, known))
        check_loggers(self.log)
        if self.lengths != AUTO_LENGTHS:
            read_lengths(self.lengths)
        # A factory's own metric, its direction and its unit are known only later (`with_metric`).
        if self.allowed_drop is not None and not is_factory(self.workload):
            own = WORKLOADS[self.workload].quality if self.workload in WORKLOADS else ACCURACY
            quality = quality_named(self.metric, self.direction, self.metric_unit, own=own)
            self._set(allowed_drop=read_drop(self.allowed_drop, quality))
        self._set(checkpoint_budget=read_bytes(self.checkpoint_budget))
        for name, flag in (("time_budget", "--time-budget"), ("trial_timeout", "--trial-timeout")):
            if (given := getattr(self, name)) is not None:
                self._set(**{name: read_duration(given, flag)})
        if (cost := self.cost_budget) is not None and not (is_number(cost) and cost > 0):
            raise UserError(f"--cost-budget must be a positive number of full trainings, such as 12.5, got {cost!r}")
        if self.is_script and self.epochs is None and "epochs" in names(options["command"]):
            raise UserError("--epochs must be given where the command has {epochs}, got none")
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UserError(
                f"--name must be letters, digits, '.', '_' and '-', beginning with a letter or digit, got {self.name!r}"
            )
        if is_uri(self.results):
            check_place(str(self.results), "--results")

    def _check_space(self, space: Space, options: Mapping[str, str]) -> None:
        if space.method == "none" and self.points is None:
            raise UserError(
                f"space {self.space} searches nothing that saves compute ({', '.join(space.options)}): join it with a "
                f"space of a method, such as --space auto_thresholds+{self.space}"
            )
        for name in space.options:
            if name in options:
                raise UserError(
                    f"{name} is searched by space {self.space}, so it can't be given, got {name}={options[name]}: "
                    "leave it out"
                )
        if space.options:  # they would be trained with the options of one combination alone
            self._set(controls=False)

    def _check_compression(self, space: Space) -> None:
        parts, schedule = search_spaces.parts_of(self.space), self.fixed.get("schedule")
        if "schedule" in parts:
            from trainables.compression.schedule import read_marks

            if not schedule:
                raise UserError("space schedule searches a schedule of yours: give its file by --schedule, got none")
            if not read_marks(schedule).marks:
                raise UserError(
                    "space schedule searches marked values, and the schedule has none: mark some, such as "
                    "!search {low: 0.1, high: 0.9}, or search another space"
                )
        if schedule and not self.compresses:
            raise UserError(f"--schedule needs a space of compression, such as schedule, got --space {self.space}")
        if "distillation" in parts and not (self.fixed.get("distill_teacher") or self.fixed.get("distill_checkpoint")):
            raise UserError(
                "space distillation needs a teacher: --set distill_teacher=NAME, --set distill_checkpoint=FILE, or "
                "both, got neither"
            )
        if self.is_script and (self.compresses or self.estimates):
            does = "compresses" if self.compresses else "estimates its gradients"
            raise UserError(f"a script {does} by itself: space {self.space} needs a workload, got --script")

    def _check_workers(self) -> None:
        if self.workers_per_trial == 1:
            return
        if self.compresses or self.estimates:
            raise UserError(
                f"space {self.space} trains in one process, got --workers-per-trial {self.workers_per_trial}"
            )
        if is_uri(self.results):
            raise UserError(
                f"--workers-per-trial must be 1 with results in object storage, got {self.workers_per_trial}: give "
                "--results on a disk that all nodes see"
            )
        if megabytes := self.fixed.get("forward_cache_mb"):
            raise UserError(
                "forward_cache_mb must be 0 with several workers a trial, for the rows that one has change from epoch "
                f"to epoch, got {megabytes}"
            )

    @classmethod
    def of_study(cls, info: StudyInfo, **how: Any) -> SearchOptions:
        """Return the options with which a study was searched, and others of this call."""
        kept = {declared.name: getattr(info, declared.name) for declared in options_of(StudyOptions)}
        return cls(**{**kept, "space_files": info.space_files, **how})

    def with_metric(self, own: Quality) -> SearchOptions:
        """Return these options with metric and allowed drop settled, given the workload's own metric.

        UserError: a direction that is not the metric's, or an allowed drop out of its range.
        """
        quality = quality_named(self.metric, self.direction, self.metric_unit, own=own)
        check_metric(quality)
        drop = default_drop(quality) if self.allowed_drop is None else read_drop(self.allowed_drop, quality)
        named = quality.fields() if quality == own == ACCURACY else quality.all_fields()
        settled = {"metric": None, "direction": None, "metric_unit": None, **named}
        return replace(self, script=None, allowed_drop=drop, **settled)  # type: ignore[arg-type]

    @property
    def searched_lengths(self) -> str:
        """Return the shares of the run that dense runs are cut to, or ``auto``; empty for runs of full length alone."""
        if self.lengths == AUTO_LENGTHS:
            return self.lengths if self.controls else ""
        return self.lengths if min(read_lengths(self.lengths)) < 1 else ""

    @property
    def drop(self) -> float | str:
        """Return the allowed drop; the metric's default where none was given."""
        return default_drop(self.quality) if self.allowed_drop is None else self.allowed_drop

    @property
    def folder(self) -> Path:
        """Return the folder of this machine that holds the studies."""
        return results_here(self.results)

    @property
    def is_on_cluster(self) -> bool:
        """Return whether the search joins a cluster that runs already."""
        return bool(self.address or os.environ.get("RAY_ADDRESS"))

    @property
    def loaded_space(self) -> Space:
        """Return the space: the one of that name, or the grid file's."""
        space = search_spaces.load(self.space, self.space_files, self.points)
        return compiled(space) if self.fixed.get("compile_mode") and self.grid is None else space

    @property
    def points(self) -> Mapping[str, Any] | None:
        """Return what `grid_file.read_grid` found in the grid file; None for a space."""
        return self.grid if isinstance(self.grid, Mapping) else None

    @property
    def first_options(self) -> tuple[str, ...]:
        """Return the workload's options of the first trials: the given ones, and the space's starting point."""
        return first_options(self.loaded_space, self.workload_options)

    @property
    def compresses(self) -> bool:
        """Return whether a compression schedule is searched."""
        return "compression" in self.loaded_space.method

    @property
    def estimates(self) -> bool:
        """Return whether a gradient estimator is searched."""
        return estimator_in(self.loaded_space.method) is not None

    @property
    def ranked_by(self) -> str:
        """Return the compute that trials are ranked by."""
        saving = self.saving or self.loaded_space.saving
        if self.saving is None and (schedule := self.fixed.get("schedule")) is not None:
            from trainables.compression.schedule import read_marks

            marked = read_marks(schedule)
            read = marked.read(marked.middles(), compatible=bool(self.fixed.get("schedule_compatible")))
            if all(policy.kind != "extension" for policy in read.policies):  # nothing is removed
                return of_zeros(saving)
        return saving

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Return `hold`, with what the schedule's file says."""
        return self.hold or {}

    @property
    def trial_epochs(self) -> int:
        """Return the epochs per trial."""
        return self.epochs or default_epochs(self.workload, self.first_options)

    @property
    def is_script(self) -> bool:
        """Return whether trials run a command of the user."""
        return self.workload == SCRIPT

    @property
    def processors_per_trial(self) -> int:
        """Return the processors of a trial over all of its workers."""
        return self.cpus_per_trial * self.workers_per_trial

    @property
    def trials_at_a_time(self) -> int:
        """Return how many trials train at a time on this machine; `run.trials_at_a_time` counts a cluster's."""
        return self.concurrency or max(1, processors() // self.processors_per_trial)
