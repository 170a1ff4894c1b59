"""The ``CAC_*`` variables: one table for validation, the environment and the printed help.

Names, defaults and meanings are those of the published CAC library (Fujitsu, ``cac`` 1.0.0); variables that it does not
have are marked. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trainables.errors import UserError, unknown_name

#: Rules that may decide a stop when no manual lists are given; ``variance`` is the published rule.
RULES = ("variance", "linear", "freezeout", "gradient_norm", "plasticity")

#: Whether batch norms of a stopped prefix continue to update their running statistics.
NORM_STATISTICS = ("go_on", "hold")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One ``CAC_*`` variable."""

    name: str
    """The environment variable."""
    field: str
    """The field of `Settings` that holds it."""
    parse: Callable[[str], Any]
    """Converts text to a value; raises ValueError for invalid text."""
    kind: Callable[[Any], bool]
    """Returns whether a value is of the right type."""
    valid: Callable[[Any], bool]
    """Returns whether a value of the right type is in range."""
    rule: str
    """The range in words, as errors print it after "must be"."""
    default: str
    """The published default, as text."""
    mode: str
    """manual, auto (the rule ``variance``), both (any rule), or the names of the rules that read it."""
    meaning: str
    """Description for users."""
    published: bool = True
    """True if the published library has it; other variables are ours, with defaults that keep its behaviour."""

    def check(self, value: Any) -> None:
        """Raise UserError if ``value`` is not valid for this variable."""
        if not self.kind(value) or not self.valid(value):
            raise UserError(f"{self.name} must be {self.rule}, got {shown(value)}")

    def read(self, text: str) -> Any:
        """Parse the text of an environment variable or of ``--set``; raise UserError if it is not valid."""
        try:
            value = self.parse(text)
        except ValueError:
            raise UserError(f"{self.name} must be {self.rule}, got {shown(text)}") from None
        self.check(value)
        return value


def shown(value: Any) -> str:
    """Return a value as error messages show it."""
    return repr(",".join(map(str, value))) if isinstance(value, (tuple, list)) else repr(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_int_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and all(_is_int(v) for v in value)


def _parse_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip().strip("[]()").rstrip(",").split(","))


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, str) for v in value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _parse_flag(text: str) -> bool:
    folded = text.strip().casefold()
    if folded in ("1", "true", "yes", "on"):
        return True
    if folded in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma list without surrounding spaces."""
    return tuple(part.strip() for part in text.split(","))


def _ascending(values: tuple[int, ...]) -> bool:
    return len(values) > 0 and values[0] >= 0 and all(a < b for a, b in pairwise(values))


def _fraction(value: float) -> bool:
    return 0 < value <= 1


_LIST_RULE = "a comma list of integers >= 0 in strictly ascending order, such as 10,20"

VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="CAC_STOP_LAYER_NUM", field="stop_layer_num", parse=_parse_list, kind=_is_int_tuple, valid=_ascending,
        rule=_LIST_RULE, default="not set", mode="manual",
        meaning="layers to stop: layer N is the N-th parameter tensor given to the optimizer, counted from 0; "
        "stopping N stops every parameter 0..N. Without CAC_STOP_LAYER_ITR: the layers that the auto rule looks at",
    ),
    Variable(
        name="CAC_STOP_LAYER_ITR", field="stop_layer_itr", parse=_parse_list, kind=_is_int_tuple, valid=_ascending,
        rule=_LIST_RULE, default="not set", mode="manual",
        meaning="the iteration (optimizer steps so far, from 0) of each stop in CAC_STOP_LAYER_NUM",
    ),
    Variable(
        name="CAC_VAR_START_ITR", field="start_itr", parse=int, kind=_is_int, valid=lambda v: v >= 0,
        rule="an integer >= 0", default="5000", mode="auto",
        meaning="first iteration of an examination; the first stop comes one interval later at the earliest",
    ),
    Variable(
        name="CAC_VAR_START_THR", field="start_thr", parse=float, kind=_is_number,
        valid=lambda v: _fraction(v) or v == -1,
        rule="in (0, 1] or -1 (off)", default="0.95", mode="auto",
        meaning="the first layer stops when its weight variance over its peak falls below this; -1 switches auto off",
    ),
    Variable(
        name="CAC_VAR_MT_COUNT_THR", field="mt_count_thr", parse=int, kind=_is_int, valid=lambda v: v >= 0,
        rule="an integer >= 0", default="5", mode="auto",
        meaning="a later layer is a mountain when its variance's peak rose more often than this, else a slope",
    ),
    Variable(
        name="CAC_VAR_MT_THR", field="mt_thr", parse=float, kind=_is_number, valid=_fraction,
        rule="in (0, 1]", default="0.96", mode="auto",
        meaning="a mountain layer stops when its weight variance over its peak falls below this",
    ),
    Variable(
        name="CAC_VAR_SLOPE_THR", field="slope_thr", parse=float, kind=_is_number, valid=_fraction,
        rule="in (0, 1]", default="0.98", mode="auto",
        meaning="a slope layer stops when its weight variance over its peak falls below this",
    ),
    Variable(
        name="CAC_VAR_SAMPLES", field="samples", parse=int, kind=_is_int, valid=lambda v: v >= 1,
        rule="an integer >= 1", default="200", mode="auto",
        meaning="iterations from one decision to the next (not set: the braking distance if that is on, else 200)",
    ),
    Variable(
        name="CAC_BRAKING_DISTANCE", field="braking_distance", parse=int, kind=_is_int, valid=lambda v: v >= 0,
        rule="an integer >= 0 (0: off)", default="0", mode="both",
        meaning="iterations over which the learning rate of a layer about to stop falls to zero; 0 stops it at once",
    ),
    Variable(
        name="CAC_RULE", field="rule", parse=str.strip, kind=_is_text, valid=lambda v: v in RULES,
        rule=f"one of {', '.join(RULES)}", default="variance", mode="both", published=False,
        meaning="what decides a stop: weight variance as published, a depth schedule (linear), a cosine a layer "
        "(freezeout), change of gradient norms (gradient_norm), or of representations (plasticity)",
    ),
    Variable(
        name="CAC_RULE_START_ITR", field="rule_start_itr", parse=int, kind=_is_int, valid=lambda v: v >= 0,
        rule="an integer >= 0", default="0", mode="linear,freezeout,gradient_norm,plasticity", published=False,
        meaning="linear: nothing stops before it; freezeout: the first layer's learning rate is zero from it on; "
        "gradient_norm, plasticity: first measurement",
    ),
    Variable(
        name="CAC_RULE_END_ITR", field="rule_end_itr", parse=int, kind=_is_int, valid=lambda v: v >= 1,
        rule="an integer >= 1", default="not set", mode="linear,freezeout", published=False,
        meaning="the schedule's last iteration, as a rule the length of the run; must be set for linear and freezeout",
    ),
    Variable(
        name="CAC_RULE_DEPTH", field="rule_depth", parse=float, kind=_is_number, valid=_fraction,
        rule="in (0, 1]", default="0.5", mode="linear", published=False,
        meaning="the share of the layers that is stopped at the schedule's end",
    ),
    Variable(
        name="CAC_RULE_CUBIC", field="rule_cubic", parse=_parse_flag, kind=_is_bool, valid=_is_bool,
        rule="0 or 1", default="0", mode="freezeout", published=False,
        meaning="layers end at cubed fractions of the run, which keeps late layers longer",
    ),
    Variable(
        name="CAC_RULE_SCALED", field="rule_scaled", parse=_parse_flag, kind=_is_bool, valid=_is_bool,
        rule="0 or 1", default="0", mode="freezeout", published=False,
        meaning="a layer that ends early starts with a learning rate as much higher",
    ),
    Variable(
        name="CAC_RULE_INTERVAL", field="rule_interval", parse=int, kind=_is_int, valid=lambda v: v >= 1,
        rule="an integer >= 1", default="200", mode="gradient_norm,plasticity", published=False,
        meaning="iterations from one measurement to the next",
    ),
    Variable(
        name="CAC_RULE_PERCENTILE", field="rule_percentile", parse=float, kind=_is_number,
        valid=lambda v: 0 < v <= 100,
        rule="in (0, 100]", default="50.0", mode="gradient_norm", published=False,
        meaning="the first layers stop whose gradient norms change less than this percentile of all layers' changes",
    ),
    Variable(
        name="CAC_RULE_TOLERANCE", field="rule_tolerance", parse=float, kind=_is_number, valid=lambda v: 0 < v < 1,
        rule="in (0, 1)", default="0.2", mode="plasticity", published=False,
        meaning="the first layer stops when its plasticity changes at less than this share of its fastest change",
    ),
    Variable(
        name="CAC_RULE_WINDOW", field="rule_window", parse=int, kind=_is_int, valid=lambda v: v >= 2,
        rule="an integer >= 2", default="5", mode="plasticity", published=False,
        meaning="measurements that plasticity is averaged over and its slope is fitted to",
    ),
    Variable(
        name="CAC_WATCH", field="watch", parse=parse_names, kind=_is_names,
        valid=lambda v: len(v) > 0 and len(set(v)) == len(v) and all(name.isidentifier() for name in v),
        rule="a comma list of conv, linear or class names of modules, each once", default="conv", mode="both",
        published=False,
        meaning="what counts as a layer: convolutions (4-D weights), linear weights, or every module of a class",
    ),
    Variable(
        name="CAC_WHOLE_UNITS", field="whole_units", parse=_parse_flag, kind=_is_bool, valid=_is_bool,
        rule="0 or 1", default="0", mode="both", published=False,
        meaning="a layer stops together with its bias and norm, in execution order; needs model=",
    ),
    Variable(
        name="CAC_NORM_STATISTICS", field="norm_statistics", parse=str.strip, kind=_is_text,
        valid=lambda v: v in NORM_STATISTICS,
        rule="go_on or hold", default="go_on", mode="both", published=False,
        meaning="running statistics of stopped batch norms go on as published, or hold still and are what training "
        "normalises by; hold needs model=",
    ),
    Variable(
        name="CAC_PREFIX_AUTOGRAD", field="prefix_autograd", parse=_parse_flag, kind=_is_bool, valid=_is_bool,
        rule="0 or 1", default="1", mode="both", published=False,
        meaning="0: nothing upstream of a stopped layer is kept for a backward pass, left-over parameters included; "
        "0 needs model=",
    ),
)  # fmt: skip

BY_NAME: dict[str, Variable] = {variable.name: variable for variable in VARIABLES}
BY_FIELD: dict[str, Variable] = {variable.field: variable for variable in VARIABLES}


def variable_named(name: str) -> Variable:
    """Return the variable of that name; raise UserError with the nearest name and the list if there is none."""
    if name not in BY_NAME:
        raise unknown_name("variable", name, BY_NAME)
    return BY_NAME[name]
