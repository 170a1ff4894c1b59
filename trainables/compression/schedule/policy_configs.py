"""Problems of a schedule, collected with their lines, and arguments of policies. Does not import torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import Field, PlainValidator, model_validator

from trainables.compression.schedule.configs import ComponentConfig, Flag, Whole
from trainables.errors import UserError, nearest_name

#: Keys and list positions from the schedule's root to a value.
Path = tuple[str | int, ...]


class ScheduleError(UserError):
    """A schedule that cannot be used. The message has the first problem and the number of the others.

    Args:
        errors: one line each, at least one, in the order of the file.
    """

    def __init__(self, errors: Sequence[str]) -> None:
        self.errors = tuple(errors)
        more = f" (and {len(errors) - 1} more: `schedule check` lists them)" if len(errors) > 1 else ""
        super().__init__(errors[0] + more)

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[tuple[str, ...]]]:
        return type(self), (self.errors,)  # the message is built again when unpickled


class Problem(NamedTuple):
    """One problem of a schedule."""

    path: Path
    """The entry with the problem."""
    text: str
    """The rule, the given value, and how to correct it."""


def dotted(path: Path) -> str:
    """Return a path in the form used in messages and names of search ranges.

    >>> dotted(("policies", 0, "pruner"))
    'policies.0.pruner'
    """
    return ".".join(map(str, path))


def line_at(lines: Mapping[Path, int], path: Path) -> int | None:
    """Return the line of a path, or of the nearest enclosing path that has one."""
    enclosing = (path[:length] for length in range(len(path), -1, -1))
    return next((lines[place] for place in enclosing if place in lines), None)


def nearest(given: str, known: Iterable[str]) -> str:
    """Return ``, did you mean 'x'? Valid: ...`` for an unknown name; without the question if no name is similar."""
    names = list(known)
    near = nearest_name(given, names)
    return f"{f', did you mean {near!r}?' if near else '.'} Valid: {', '.join(names)}"


def shown(value: object, length: int = 60) -> str:
    """Return a value as messages show it, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


class Findings:
    """Collect problems.

    Args:
        source: name of the schedule in messages, such as its file's name.
        lines: by path, from 1.
        compatible: whether problems that the original language silently accepted are warnings instead of errors.
    """

    def __init__(self, source: str, lines: Mapping[Path, int], *, compatible: bool = False) -> None:
        self.source, self.lines, self.compatible = source, lines, compatible
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []

    def error(self, path: Path, text: str) -> None:
        """Record an error, with or without the compatibility switch."""
        self.errors.append(Problem(path, text))

    def warning(self, path: Path, text: str) -> None:
        """Record a warning, with or without the compatibility switch."""
        self.warnings.append(Problem(path, text))

    def lenient(self, path: Path, text: str) -> None:
        """Record what the original silently accepted as an error, or as a warning with the compatibility switch."""
        (self.warnings if self.compatible else self.errors).append(Problem(path, text))

    def said(self, problems: Iterable[Problem]) -> tuple[str, ...]:
        """Return ``FILE:LINE: path: text`` for each problem, in the order of the file."""
        found = sorted(((line_at(self.lines, path) or 0, path, text) for path, text in problems), key=lambda at: at[0])
        return tuple(
            ": ".join(filter(None, (f"{self.source}:{line}" if line else self.source, dotted(path), text)))
            for line, path, text in found
        )

    def raise_or_warn(self) -> None:
        """Raise the errors; without errors, issue the warnings as `UserWarning`.

        Raises:
            ScheduleError: with all errors.
        """
        if self.errors:
            raise ScheduleError(self.said(self.errors))
        for text in self.said(self.warnings):
            warnings.warn(text, UserWarning, stacklevel=3)


#: Section of each kind of policy. A policy with several kinds has the first of them, as in the original.
KINDS = {
    "pruner": "pruners",
    "regularizer": "regularizers",
    "quantizer": "quantizers",
    "lr_scheduler": "lr_schedulers",
    "extension": "extensions",
    "distiller": "distillers",
}
RANGE = ("starting_epoch", "ending_epoch", "frequency")


def _levels(given: Any) -> dict[str, float] | float | None:
    for name, level in given.items() if isinstance(given, Mapping) else [("", given)]:
        is_share = isinstance(level, (int, float)) and not isinstance(level, bool) and 0 <= level <= 1
        if not is_share and given is not None:
            raise ValueError(f"levels{f' of {name}' if name else ''} must be in [0, 1], got {shown(level)}")
    if isinstance(given, Mapping) and not given:
        raise ValueError("levels must name at least one parameter, got none")
    return dict(given) if isinstance(given, Mapping) else given


class PrunerPolicyConfig(ComponentConfig):
    """Options of a policy for its pruner's masks; all off by default."""

    class_: ClassVar[str] = "pruner policies"
    levels: Annotated[dict[str, float] | float | None, PlainValidator(_levels)] = None
    """Share of the elements by parameter name or pattern, or one for all, instead of the pruner's own levels."""
    keep_mask: Flag = False
    """True if masks stay in force after the last active epoch even if the options below would end them."""
    mini_batch_pruning_frequency: Annotated[Whole, Field(ge=0)] = 0
    """Number of optimizer steps of the run after which masks are computed again; 0: once per active epoch."""
    mask_on_forward_only: Flag = False
    """True if weights are masked only for the forward pass, so that masked weights are still updated."""
    mask_gradients: Flag = False
    """True if gradients are masked, too; needs ``mask_on_forward_only``."""
    use_double_copies: Flag = False
    """True if the optimizer updates the unmasked weights."""
    discard_masks_at_minibatch_end: Flag = False
    """True if a mask is discarded at the end of its minibatch."""
    skip_first_minibatch: Flag = False
    """True if the first minibatch of the first active epoch is not masked: masks are computed after it."""
    fold_batchnorm: Flag = False
    """True if weights are ranked after scaling by the batch norm that follows."""

    @model_validator(mode="after")
    def _gradients_need_forward_only(self) -> Self:
        if self.mask_gradients and not self.mask_on_forward_only:
            raise ValueError("mask_gradients needs mask_on_forward_only: set both, or leave mask_gradients out")
        return self


class RegularizerPolicyConfig(ComponentConfig):
    """Options of a policy for its regularizer's masks."""

    class_: ClassVar[str] = "regularizer policies"
    keep_mask: Flag = False
    """True if weights that the threshold zeroed in the last active epoch stay zero."""
