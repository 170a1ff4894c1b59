"""What a space is: ranges that may depend on the run, and points that every search begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class SpaceContext:
    """What a space may ask about the run that it varies."""

    total_steps: int
    """Optimizer steps of the full run."""
    layer_names: tuple[str, ...] = ()
    """Names of the parameters, by layer number."""


class Suggests(Protocol):
    """The part of an Optuna trial that a space uses."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """An integer in [low, high]."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number in [low, high]."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """One of the choices."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """A search space. Its functions are module-level, so that it can travel between processes."""

    name: str
    """The file's stem."""
    method: str
    """The method of its trials (`trainables.registry.METHODS`)."""
    suggest: Callable[[Suggests, SpaceContext], dict[str, Any]]
    """Ask the trial for values; returns fields of `TrialConfig`."""
    start: Callable[[SpaceContext], Mapping[str, Any]]
    """Parameters of the trial after the baseline: the method's published defaults, scaled to the run."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """One asked-for parameter, as `describe` saw it."""

    name: str
    """The parameter."""
    low: Any
    """Lower bound; None for a choice."""
    high: Any
    """Upper bound; None for a choice."""
    step: Any
    """Grid of the values, None for none."""
    log: bool
    """Whether it is searched on a logarithmic scale."""
    choices: tuple[Any, ...] | None
    """The choices, None for a range."""

    def __str__(self) -> str:
        if self.choices is not None:
            return "one of " + ", ".join(map(str, self.choices))
        step = f" in steps of {self.step}" if self.step not in (None, 1) else ""
        return f"{self.low} .. {self.high}{step}{' (log)' if self.log else ''}"


class _Recorder:
    """Stands in for an Optuna trial, takes every lower bound and keeps the ranges."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        self.ranges.append(Range(name=name, low=low, high=high, step=step, log=log, choices=None))
        return low

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        self.ranges.append(Range(name=name, low=low, high=high, step=step, log=log, choices=None))
        return low

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        self.ranges.append(Range(name=name, low=None, high=None, step=None, log=False, choices=tuple(choices)))
        return choices[0]


def describe(space: Space, context: SpaceContext) -> list[Range]:
    """The ranges of a space on a run."""
    recorder = _Recorder()
    space.suggest(recorder, context)
    return recorder.ranges
