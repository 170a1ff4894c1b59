"""Definition of a space: ranges that may depend on the run, and the point at which every search starts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trainables.savings import BOTH_SPARSE, SPARSE, TRAINING


@dataclass(frozen=True, kw_only=True)
class SpaceContext:
    """Facts about the run that a space may use."""

    total_steps: int
    """Optimizer steps of the full run."""
    layer_names: tuple[str, ...] = ()
    """Names of the parameters, by layer number."""
    unit_ends: tuple[int, ...] = ()
    """Number of the last parameter of each unit, in order, without one whose stop would leave nothing to train."""
    watch: tuple[str, ...] = ()
    """`CAC_WATCH` under which the model has layers to stop, where the default finds none."""
    first_thresholds: tuple[float, float] | None = None
    """Thresholds of the first target that make a difference on this run; None where the run is not known."""
    later_thresholds: tuple[float, float] | None = None
    """The same for later targets, mountains and slopes."""
    epochs: int = 30
    """Epochs of the full run."""
    weight_names: tuple[str, ...] = ()
    """Names of the weights of convolutions and linear layers, in the model's order."""
    schedule: str | None = None
    """Text of the compression schedule whose marked values are searched."""
    latest_start_itr: int | None = None
    """The latest first decision with which the variance rule can still stop anything on this run; None where the run is
    not known."""
    recipe: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of the training recipe's fields that differ on this model and device, the default (None) first."""
    batch_size: int | None = None
    """The workload's own number of samples of a step; None where it is not known."""
    workload_options: tuple[str, ...] = ()
    """Options of the workload that are the same in all trials, as NAME=VALUE texts."""
    lengths: tuple[float, ...] = (2 / 3, 1 / 2)
    """Shorter runs that a space may try, as shares of the run, longest first."""
    has_norms: bool = False
    """True if the model has norms with running statistics of an earlier training."""
    kept_ends: tuple[int, ...] = ()
    """Those of `unit_ends` up to which outputs can be kept in a forward cache, such as ends of blocks."""
    forward_cache_mb: int = 0
    """Budget of a forward cache on this machine; 0 where inputs do not repeat, or it is not known whether they do."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the search fixes and that the space would vary (`Space.may_be_fixed`)."""


#: A run on which no range of a space has only one value.
ANY_RUN = SpaceContext(
    total_steps=300,
    layer_names=tuple(f"layer{n}" for n in range(12)),
    unit_ends=(2, 5, 8),
    weight_names=tuple(f"block{n}.weight" for n in range(3)),
    has_norms=True,
    forward_cache_mb=100,
    recipe={
        "precision": (None, "bfloat16"),
        "batch_size": (None, 32, 128),
        "fused_optimizer": (None, True),
        "channels_last": (None, True),
        "activation_checkpointing": (None, "cheap", "blocks"),
        "compile_mode": (None, "default"),
        "loader_workers": (None, 1, 2),
        "cudnn_benchmark": (None, True),
        "pin_memory": (None, False),
    },
)
#: Most combinations of choices of a space.
MOST_VISITS = 2000


class TooManyVisits(ValueError):
    """A space has more than `MOST_VISITS` combinations of choices."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A setting that a study trains or has trained, for a space that decides the next one itself."""

    parameters: Mapping[str, Any]
    """Its parameters."""
    epochs: int
    """Epochs of the run."""
    has_ended: bool = False
    """False while it is being trained."""
    saved: float = 0.0
    """Compute saved, a fraction of the baseline's."""
    lost: float = math.inf
    """Loss of the metric against the baseline; infinite as long as it is not known, and if the run failed."""
    is_within: bool = False
    """True if that is no more than the allowed loss, and the mean over further seeds not known to be more."""

    def among(self, tried: Iterable[Tried]) -> Tried | None:
        """Return the one of the same parameters and length; None if there is none."""
        return next((t for t in tried if (t.parameters, t.epochs) == (self.parameters, self.epochs)), None)


class Suggests(Protocol):
    """The part of an Optuna trial that a space uses."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return an integer in [low, high]."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number in [low, high]."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Return one of the choices."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """One parameter of a space: what a trial is asked for."""

    name: str
    """The parameter."""
    low: Any = None
    """Lower bound; None for a choice."""
    high: Any = None
    """Upper bound; None for a choice."""
    step: Any = None
    """Step of the values' grid, None for no grid."""
    log: bool = False
    """True if it is searched on a logarithmic scale."""
    choices: tuple[Any, ...] | None = None
    """The choices, None for a range."""
    integer: bool = False
    """True for a range of integers."""
    condition: str = ""
    """Condition under which it is asked for, such as ``CAC_RULE=linear``; empty for always."""

    @property
    def base_name(self) -> str:
        """Return the parameter's name without its branch: the variable that it searches, if it searches one."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        if self.choices is not None:
            return "one of " + ", ".join(map(str, self.choices))
        step = f" in steps of {self.step}" if self.step not in (None, 1) else ""
        return f"{self.low} .. {self.high}{step}{' (log)' if self.log else ''}"

    def joined(self, other: Range) -> Range:
        """Return one range that covers both."""
        if self.choices is not None and other.choices is not None:
            return replace(self, choices=tuple(dict.fromkeys(self.choices + other.choices)))
        return replace(self, low=min(self.low, other.low), high=max(self.high, other.high))

    def ask(self, trial: Suggests) -> Any:
        """Return a trial's answer."""
        if self.choices is not None:
            return trial.suggest_categorical(self.name, self.choices)
        if self.integer:
            return trial.suggest_int(self.name, self.low, self.high, step=self.step or 1, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)


class Answers(ABC):
    """Base of what stands for an Optuna trial where a space is called: `answer` gets each question as a `Range`."""

    @abstractmethod
    def answer(self, asked: Range) -> Any:
        """Return the value of a parameter."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Return an integer in [low, high]."""
        found: int = self.answer(Range(name=name, low=low, high=high, step=step, log=log, integer=True))
        return found

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number in [low, high]."""
        found: float = self.answer(Range(name=name, low=low, high=high, step=step, log=log))
        return found

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Return one of the choices."""
        return self.answer(Range(name=name, choices=tuple(choices)))


class Branch(Answers):
    """A trial whose parameter names are prefixed with the branch's name: ``linear.CAC_RULE_DEPTH``.

    Branches of a conditional space may ask for one variable in different ranges, and an Optuna parameter should have
    only one range.
    """

    def __init__(self, trial: Suggests, name: str) -> None:
        self._trial, self._name = trial, name

    def answer(self, asked: Range) -> Any:
        return replace(asked, name=branch_name(self._name, asked.name)).ask(self._trial)


def branch_name(branch: str, name: str) -> str:
    """Return the name of a parameter in a branch."""
    return f"{branch}.{name}"


def _nothing(context: SpaceContext) -> Sequence[Any]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Space:
    """A search space. Its functions are module-level, so that it can be sent between processes."""

    name: str
    """The file's stem; for a space of the user's, what ``--space`` gives."""
    method: str
    """The method of its trials (`trainables.registry.METHODS`)."""
    suggest: Callable[[Suggests, SpaceContext], dict[str, Any]]
    """Asks the trial for values; returns fields of `TrialConfig`, searched ones and fixed ones."""
    start: Callable[[SpaceContext], Mapping[str, Any]]
    """Parameters of the trial after the baseline: the method's published defaults, scaled to the run, where there are
    any."""
    further_starts: Callable[[SpaceContext], Sequence[Mapping[str, Any]]] = _nothing
    """Parameters of trials that follow it, where a search should not begin at random: as many as there is room for."""
    next_point: Callable[[SpaceContext, Sequence[Tried]], Tried | None] | None = None
    """Decides what to train after the starting point, given all settings that were begun; a sampler if None. Returns
    None if nothing is left, or one that is being trained decides it."""
    may_be_fixed: tuple[str, ...] = ()
    """Fields that it varies and that a search may fix; `suggest` reads them in `SpaceContext.fixed`."""
    free: tuple[str, ...] = ()
    """Choices on which no other parameter depends; then the number of their combinations has no limit."""
    start_is_published: bool = True
    """True if that trial has the published defaults and may be described so."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """Meanings of parameters that are not variables, by name without a branch."""
    notes: Callable[[SpaceContext], Sequence[str]] = _nothing
    """Lines that explain its ranges on this run."""
    uses_forward_cache: bool = False
    """True if `suggest` reads `SpaceContext.forward_cache_mb`."""
    saving: str = TRAINING
    """Compute that its trials save and are ranked by, of `SAVINGS`."""
    description: str = ""
    """Description in one line."""
    options: tuple[str, ...] = ()
    """Options of the workload that vary between its trials; `suggest` returns them in `workload_options`."""
    methods_of_points: tuple[str, ...] = ()
    """Methods of the points of a grid that has several; `suggest` returns each point's, and `method` names all."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the methods of its trials."""
        return self.methods_of_points or (self.method,)

    def meaning(self, parameter: str) -> str | None:
        """Return the meaning of a parameter that is not a variable, by its name without a branch; None if unknown.

        A meaning may also be given by the part of the name up to ``:``, for all parameters that share it.
        """
        prefix, colon, _ = parameter.partition(":")
        return self.meanings.get(parameter, self.meanings.get(prefix + colon) if colon else None)


class _Recorder(Answers):
    """Takes the forced choices and one end of each range, and records the ranges."""

    def __init__(self, forced: Mapping[str, Any], upper: bool, free: Iterable[str]) -> None:
        self._forced, self._upper, self._free = forced, upper, frozenset(free)
        self.ranges: dict[str, Range] = {}
        self.chosen: dict[str, Any] = {}
        self.values: dict[str, Any] = {}

    def answer(self, asked: Range) -> Any:
        self.ranges[asked.name] = asked
        ends = (asked.low, asked.high) if asked.choices is None else (asked.choices[0], asked.choices[-1])
        if asked.choices is None or asked.name in self._free:
            return ends[self._upper]
        self.chosen[asked.name] = self._forced.get(asked.name, ends[0])
        return self.chosen[asked.name]


def _visits(space: Space, context: SpaceContext, *, upper: bool = False) -> list[_Recorder]:
    """Run the space once for each combination of choices that it reaches."""
    waiting: list[dict[str, Any]] = [{}]
    complete = []
    while waiting:
        forced = waiting.pop()
        recorder = _Recorder(forced, upper, space.free)
        recorder.values = space.suggest(recorder, context)
        free = next((name for name in recorder.chosen if name not in forced), None)
        if free is None:
            complete.append(recorder)
        else:
            if len(complete) + len(waiting) > MOST_VISITS:
                raise TooManyVisits(space.name)
            # Reversed, so that branches are visited in the order of their choices.
            waiting.extend({**forced, free: choice} for choice in reversed(recorder.ranges[free].choices or ()))
    return complete


def describe(space: Space, context: SpaceContext) -> list[Range]:
    """Return the ranges of a space on a run, in all branches, each with the condition under which it is asked for."""
    visits = _visits(space, context)
    found: dict[str, Range] = {}
    for visit in visits:
        for name, seen in visit.ranges.items():
            found[name] = found[name].joined(seen) if name in found else seen
    return [replace(seen, condition=_condition(seen, visits)) for seen in found.values()]


def _condition(asked: Range, visits: Iterable[_Recorder]) -> str:
    """Return the choices made by every visit that asked for the parameter, where other choices were possible."""
    having = [visit for visit in visits if asked.name in visit.ranges]
    parts = []
    for name, choice in having[0].ranges.items():
        if name == asked.name:
            break
        if choice.choices is None or any(name not in visit.chosen for visit in having):
            continue
        taken = {visit.chosen[name] for visit in having}
        if taken != set(choice.choices):
            parts.append(f"{name}={' or '.join(str(c) for c in choice.choices if c in taken)}")
    return " and ".join(parts)


def searched_fields(space: Space, context: SpaceContext) -> set[str]:
    """Return the fields of `TrialConfig` that the space varies; its other returned fields are fixed."""
    values: dict[str, list[Any]] = {}
    for corner in corners(space, context):
        for name, value in corner.items():
            values.setdefault(name, []).append(value)
    return {name for name, seen in values.items() if any(value != seen[0] for value in seen)}


def corners(space: Space, context: SpaceContext) -> list[dict[str, Any]]:
    """Return the space's values at all lower and at all upper bounds, in each branch."""
    return [visit.values for upper in (False, True) for visit in _visits(space, context, upper=upper)]


def saving_of(method: str, names: Iterable[str]) -> str | None:
    """Return the compute that trials which set these fields save, where they prune; None where they do not."""
    if not any(name.startswith(("pruning_", "agp_")) for name in names):
        return None
    return BOTH_SPARSE if "gradskip" in method else SPARSE
