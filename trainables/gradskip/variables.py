"""The ``CAC_*`` variables, each declared once: name, default, type, range, meaning and the rules that read it.

`gradskip.Settings`, the ``CAC_*`` fields of `TrialConfig`, validation, the environment, the printed help and the
documentation's tables come from these declarations. Names, defaults and meanings are those of the published CAC library
(Fujitsu, ``cac`` 1.0.0); variables that it does not have are marked. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from trainables.errors import UserError, unknown_name
from trainables.gradskip.rules.choice import NAMED, WITH_END

# --- Declaration of a ``CAC_*`` variable as a field of a dataclass: checks, parsing, texts


class Range(NamedTuple):
    """Values that a variable may have: in words after "must be", and whether one of the right type is among them."""

    words: str
    holds: Callable[[Any], bool]


def at_least(low: int, note: str = "") -> Range:
    """Return the range of integers from ``low`` on; a note is appended to its words."""
    return Range(f"an integer >= {low}{note}", lambda value: value >= low)


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One ``CAC_*`` variable."""

    name: str  # the environment variable
    default: Any  # None where it is not set
    default_text: str
    allowed: Range
    meaning: str  # description for users
    mode: str  # the modes that read it, with commas: manual, auto (the rule ``variance``), names of rules; both for any
    published: bool  # true if the published library has it; the others are ours, with defaults that keep its behaviour
    field: str  # the field of `Settings` that holds it
    kind: type  # type of a value: int, float, bool, str or tuple
    element: type | None  # type of a tuple's elements
    optional: bool  # true if it may be None

    def check(self, value: Any) -> None:
        """Raise UserError if ``value`` is not valid; an integer is a number, but a bool is neither."""
        if self.kind is tuple:
            right = isinstance(value, tuple) and all(_is(self.element, item) for item in value)
        else:
            right = _is(self.kind, value)
        if not right or not self.allowed.holds(value):
            raise UserError(f"{self.name} must be {self.allowed.words}, got {shown(value)}")

    def read(self, text: str) -> Any:
        """Parse the text of an environment variable or of ``--set``; raise UserError if it is not valid."""
        try:
            if self.kind is bool:
                value: Any = _FLAGS[text.strip().casefold()]
            elif self.kind is not tuple:
                value = self.kind(text.strip())
            elif self.element is str:
                value = parse_names(text)
            else:
                value = tuple(int(part) for part in text.strip().strip("[]()").rstrip(",").split(","))
        except (ValueError, KeyError):
            raise UserError(f"{self.name} must be {self.allowed.words}, got {shown(text)}") from None
        self.check(value)
        return value


_FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


def variable(
    name: str,
    default: Any,
    allowed: Range,
    meaning: str,
    *,
    mode: str,
    published: bool = True,
    default_text: str | None = None,
) -> Any:
    """Declare a variable as a field of a dataclass; see `Variable`. The mode ``rules`` is those that read it."""
    text = default_text or ("not set" if default is None else as_text(default))
    declared = {"name": name, "default": default, "default_text": text, "allowed": allowed, "meaning": meaning}
    return field(default=default, metadata={**declared, "mode": mode, "published": published})


def as_text(value: Any) -> str:
    """Return a value as the text of an environment variable."""
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; an integer is one, a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is(wanted: type | None, value: Any) -> bool:
    if wanted is float:
        return is_number(value)
    return isinstance(value, wanted or object) and (wanted is bool or not isinstance(value, bool))


def shown(value: Any) -> str:
    """Return a value as error messages show it."""
    return repr(",".join(map(str, value))) if isinstance(value, (tuple, list)) else repr(value)


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma list without surrounding spaces."""
    return tuple(part.strip() for part in text.split(","))


def declared_variables(declaring: type) -> tuple[Variable, ...]:
    """Return the variables that a dataclass declares with `variable`, in order, with what its annotations say."""
    hints = get_type_hints(declaring)
    found = []
    for declared in fields(declaring):
        optional = isinstance(hints[declared.name], UnionType)
        plain = get_args(hints[declared.name])[0] if optional else hints[declared.name]
        known = dict(declared.metadata)
        if known["mode"] == "rules":
            known["mode"] = ",".join(name for name, rule in NAMED.items() if declared.name in rule.reads)
        kind, element = get_origin(plain) or plain, next(iter(get_args(plain)), None)
        found.append(Variable(**known, field=declared.name, kind=kind, element=element, optional=optional))
    return tuple(found)


# --- The ``CAC_*`` variables, each declared once ----------------------------------------------------------------------

#: Rules that may decide a stop when no manual lists are given; ``variance`` is the published rule.
RULES = ("variance", *NAMED)
#: Rules whose signal depends on when it is measured: CAC_RULE_START_ITR and CAC_RULE_INTERVAL.
MEASURED_RULES = tuple(name for name, rule in NAMED.items() if rule.is_measured)
#: Whether batch norms of a stopped prefix, or all of the model, continue to update their running statistics.
NORM_STATISTICS = ("go_on", "hold", "hold_all")
#: The mode of a stopped prefix's modules while the rest trains.
PREFIX_MODES = ("train", "eval")
#: The published default of CAC_VAR_SAMPLES, taken when neither it nor a braking distance is set.
DEFAULT_SAMPLES = 200

_ASCENDING = Range(
    "a comma list of integers >= 0 in strictly ascending order, such as 10,20",
    lambda values: len(values) > 0 and values[0] >= 0 and all(a < b for a, b in pairwise(values)),
)
_WHEN = Range(_ASCENDING.words.replace(">= 0", ">= -1"), lambda values: _ASCENDING.holds([n + 1 for n in values]))
_SHARE = Range("in (0, 1]", lambda value: 0 < value <= 1)
_FLAG = Range("0 or 1", lambda value: True)
_NAMES = Range(
    "a comma list of conv, linear or class names of modules, each once",
    lambda names: len(names) > 0 and len(set(names)) == len(names) and all(name.isidentifier() for name in names),
)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class VariableFields:
    """The variables as fields; `gradskip.Settings` checks them together."""

    stop_layer_num: tuple[int, ...] | None = variable(
        "CAC_STOP_LAYER_NUM", None, _ASCENDING,
        "layers to stop: layer N is the N-th parameter tensor given to the optimizer, counted from 0; stopping N stops "
        "every parameter 0..N. Without CAC_STOP_LAYER_ITR: the layers that the auto rule looks at, of any kind, "
        "instead of CAC_WATCH",
        mode="manual",
    )
    stop_layer_itr: tuple[int, ...] | None = variable(
        "CAC_STOP_LAYER_ITR", None, _WHEN,
        "the iteration (optimizer steps so far, from 0) of each stop in CAC_STOP_LAYER_NUM, after whose step it comes; "
        "-1: before the first step, so that these layers never train",
        mode="manual",
    )
    start_itr: int = variable(
        "CAC_VAR_START_ITR", 5000, at_least(0),
        "first iteration of an examination; it sets the first peak, so the first stop comes one interval later at the "
        "earliest",
        mode="auto",
    )
    start_thr: float = variable(
        "CAC_VAR_START_THR", 0.95, Range("in (0, 1] or -1 (off)", lambda value: 0 < value <= 1 or value == -1),
        "the first layer stops when its weight variance over its peak falls below this; -1 switches auto off",
        mode="auto",
    )
    mt_count_thr: int = variable(
        "CAC_VAR_MT_COUNT_THR", 5, at_least(0),
        "a later layer is a mountain when its variance's peak rose more often than this, else a slope",
        mode="auto",
    )
    mt_thr: float = variable(
        "CAC_VAR_MT_THR", 0.96, _SHARE,
        "a mountain layer stops when its weight variance over its peak falls below this",
        mode="auto",
    )
    slope_thr: float = variable(
        "CAC_VAR_SLOPE_THR", 0.98, _SHARE,
        "a slope layer stops when its weight variance over its peak falls below this",
        mode="auto",
    )
    samples: int | None = variable(
        "CAC_VAR_SAMPLES", None, at_least(1),
        "iterations from one decision to the next (not set: the braking distance if that is on, else "
        f"{DEFAULT_SAMPLES})",
        mode="auto", default_text=str(DEFAULT_SAMPLES),
    )
    braking_distance: int = variable(
        "CAC_BRAKING_DISTANCE", 0, at_least(0, " (0: off)"),
        "iterations over which the learning rate of a layer about to stop falls to zero; 0 stops it at once",
        mode="both",
    )
    rule: str = variable(
        "CAC_RULE", "variance", Range(f"one of {', '.join(RULES)}", lambda value: value in RULES),
        "what decides a stop: weight variance as published, "
        + ", ".join(f"{rule.decides_by} ({name})" for name, rule in NAMED.items()),
        mode="both", published=False,
    )
    rule_start_itr: int = variable(
        "CAC_RULE_START_ITR", 0, at_least(0),
        "linear: nothing stops before it; freezeout: the first layer's learning rate is zero from it on; "
        "the measured rules: first measurement, before which nothing stops",
        mode="rules", published=False,
    )
    rule_end_itr: int | None = variable(
        "CAC_RULE_END_ITR", None, at_least(1),
        "the schedule's last iteration, as a rule the length of the run; must be set for "
        + " and ".join(WITH_END),
        mode="rules", published=False,
    )
    rule_depth: float = variable(
        "CAC_RULE_DEPTH", 0.5, _SHARE,
        "of the layers that may stop, the share that has stopped at the schedule's end",
        mode="rules", published=False,
    )
    rule_cubic: bool = variable(
        "CAC_RULE_CUBIC", False, _FLAG,
        "layers end at cubed fractions of the run, which keeps late layers longer",
        mode="rules", published=False,
    )
    rule_scaled: bool = variable(
        "CAC_RULE_SCALED", False, _FLAG,
        "a layer that ends early starts with a learning rate as much higher",
        mode="rules", published=False,
    )
    rule_interval: int = variable(
        "CAC_RULE_INTERVAL", 200, at_least(1),
        "iterations from one measurement to the next",
        mode="rules", published=False,
    )
    rule_percentile: float = variable(
        "CAC_RULE_PERCENTILE", 50.0, Range("in (0, 100]", lambda value: 0 < value <= 100),
        "the first layers stop whose gradient norms change less than this percentile of all layers' changes",
        mode="rules", published=False,
    )
    rule_tolerance: float = variable(
        "CAC_RULE_TOLERANCE", 0.2, Range("in (0, 1)", lambda value: 0 < value < 1),
        "the first layer stops when its plasticity changes at less than this share of its fastest change",
        mode="rules", published=False,
    )
    rule_window: int = variable(
        "CAC_RULE_WINDOW", 5, at_least(2),
        "measurements that plasticity is averaged over and its slope is fitted to",
        mode="rules", published=False,
    )
    rule_tau: float = variable(
        "CAC_RULE_TAU", 1e-4, Range("a number > 0", lambda value: value > 0),
        "the first layers stop whose gradients change by less than this on average over entries, from step to step",
        mode="rules", published=False,
    )
    stop_interval: int = variable(
        "CAC_STOP_INTERVAL", 0, at_least(0, " (0: off)"),
        "decided stops wait for the next iteration that is a multiple of it, so that torch.compile compiles anew less "
        "often; not of manual lists",
        mode="both", published=False,
    )
    watch: tuple[str, ...] = variable(
        "CAC_WATCH", ("conv",), _NAMES,
        "what counts as a layer: convolutions (4-D weights), linear weights, or every module of a class",
        mode="both", published=False,
    )
    whole_units: bool = variable(
        "CAC_WHOLE_UNITS", False, _FLAG,
        "a layer stops together with its bias and norm, in execution order; needs model=",
        mode="both", published=False,
    )
    lr_factor: float = variable(
        "CAC_LR_FACTOR", 1.0, Range("a number > 0", lambda value: value > 0),
        "learning rates are this many times the optimizer's own, from the first step on, whatever has stopped",
        mode="both", published=False,
    )
    norm_statistics: str = variable(
        "CAC_NORM_STATISTICS", "go_on",
        Range(f"one of {', '.join(NORM_STATISTICS)}", lambda value: value in NORM_STATISTICS),
        "running statistics of stopped batch norms go on as published, or hold still and are what training normalises "
        "by; hold_all: so do those of all norms of the model, from the first step on; hold and hold_all need model=",
        mode="both", published=False,
    )
    prefix_autograd: bool = variable(
        "CAC_PREFIX_AUTOGRAD", True, _FLAG,
        "0: nothing upstream of a stopped layer is kept for a backward pass, left-over parameters included; "
        "0 needs model=",
        mode="both", published=False,
    )
    prefix_mode: str = variable(
        "CAC_PREFIX_MODE", "train", Range(" or ".join(PREFIX_MODES), lambda value: value in PREFIX_MODES),
        "once layers have stopped, modules in and before which nothing trains go on in training mode as published, or "
        "are in evaluation mode: no dropout there, and norms hold their statistics; eval needs model=",
        mode="both", published=False,
    )
# fmt: on


VARIABLES: tuple[Variable, ...] = declared_variables(VariableFields)
#: A setting as messages and help give it for an example.
EXAMPLE = "CAC_VAR_START_THR=0.97"

BY_NAME: dict[str, Variable] = {variable.name: variable for variable in VARIABLES}


def ratio_name(rule: str) -> str:
    """Return what a stop's number is, by the rule in its event."""
    return "ratio" if rule in MEASURED_RULES else "variance/peak"


def variable_named(name: str) -> Variable:
    """Return the variable of that name; raise UserError with the nearest name and the list if there is none."""
    if name not in BY_NAME:
        raise unknown_name("variable", name, BY_NAME)
    return BY_NAME[name]
