"""The ``CAC_*`` variables, each declared once: name, default, type, range, meaning and the rules that read it.

`gradskip.Settings`, the ``CAC_*`` fields of `TrialConfig`, validation, the environment, the printed help and the
documentation's tables come from these declarations. Names, defaults and meanings are those of the published CAC library
(Fujitsu, ``cac`` 1.0.0); variables that it does not have are marked. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from trainables.errors import unknown_name
from trainables.gradskip.variable_types import Range, Variable, at_least, declared_variables, variable, within

#: Rules that may decide a stop when no manual lists are given; ``variance`` is the published rule.
RULES = ("variance", "linear", "freezeout", "gradient_norm", "plasticity")
#: Rules whose signal depends on when it is measured: CAC_RULE_START_ITR and CAC_RULE_INTERVAL.
MEASURED_RULES = ("gradient_norm", "plasticity")
#: Whether batch norms of a stopped prefix continue to update their running statistics.
NORM_STATISTICS = ("go_on", "hold")
#: The published default of CAC_VAR_SAMPLES, taken when neither it nor a braking distance is set.
DEFAULT_SAMPLES = 200

_ASCENDING = Range(
    words="a comma list of integers >= 0 in strictly ascending order, such as 10,20",
    holds=lambda values: len(values) > 0 and values[0] >= 0 and all(a < b for a, b in pairwise(values)),
)
_FLAG = Range(words="0 or 1", holds=lambda value: True)
_NAMES = Range(
    words="a comma list of conv, linear or class names of modules, each once",
    holds=lambda names: len(names) > 0 and len(set(names)) == len(names) and all(name.isidentifier() for name in names),
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
        "CAC_STOP_LAYER_ITR", None, _ASCENDING,
        "the iteration (optimizer steps so far, from 0) of each stop in CAC_STOP_LAYER_NUM",
        mode="manual",
    )
    start_itr: int = variable(
        "CAC_VAR_START_ITR", 5000, at_least(0),
        "first iteration of an examination; it sets the first peak, so the first stop comes one interval later at the "
        "earliest",
        mode="auto",
    )
    start_thr: float = variable(
        "CAC_VAR_START_THR", 0.95, within("(0, 1]", {-1: "off"}),
        "the first layer stops when its weight variance over its peak falls below this; -1 switches auto off",
        mode="auto",
    )
    mt_count_thr: int = variable(
        "CAC_VAR_MT_COUNT_THR", 5, at_least(0),
        "a later layer is a mountain when its variance's peak rose more often than this, else a slope",
        mode="auto",
    )
    mt_thr: float = variable(
        "CAC_VAR_MT_THR", 0.96, within("(0, 1]"),
        "a mountain layer stops when its weight variance over its peak falls below this",
        mode="auto",
    )
    slope_thr: float = variable(
        "CAC_VAR_SLOPE_THR", 0.98, within("(0, 1]"),
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
        "CAC_RULE", "variance", Range(words=f"one of {', '.join(RULES)}", holds=lambda value: value in RULES),
        "what decides a stop: weight variance as published, a depth schedule (linear), a cosine a layer (freezeout), "
        "change of gradient norms (gradient_norm), or change of representations (plasticity)",
        mode="both", published=False,
    )
    rule_start_itr: int = variable(
        "CAC_RULE_START_ITR", 0, at_least(0),
        "linear: nothing stops before it; freezeout: the first layer's learning rate is zero from it on; "
        "gradient_norm, plasticity: first measurement",
        mode="linear,freezeout,gradient_norm,plasticity", published=False,
    )
    rule_end_itr: int | None = variable(
        "CAC_RULE_END_ITR", None, at_least(1),
        "the schedule's last iteration, as a rule the length of the run; must be set for linear and freezeout",
        mode="linear,freezeout", published=False,
    )
    rule_depth: float = variable(
        "CAC_RULE_DEPTH", 0.5, within("(0, 1]"),
        "of the layers that may stop, the share that has stopped at the schedule's end",
        mode="linear", published=False,
    )
    rule_cubic: bool = variable(
        "CAC_RULE_CUBIC", False, _FLAG,
        "layers end at cubed fractions of the run, which keeps late layers longer",
        mode="freezeout", published=False,
    )
    rule_scaled: bool = variable(
        "CAC_RULE_SCALED", False, _FLAG,
        "a layer that ends early starts with a learning rate as much higher",
        mode="freezeout", published=False,
    )
    rule_interval: int = variable(
        "CAC_RULE_INTERVAL", 200, at_least(1),
        "iterations from one measurement to the next",
        mode="gradient_norm,plasticity", published=False,
    )
    rule_percentile: float = variable(
        "CAC_RULE_PERCENTILE", 50.0, within("(0, 100]"),
        "the first layers stop whose gradient norms change less than this percentile of all layers' changes",
        mode="gradient_norm", published=False,
    )
    rule_tolerance: float = variable(
        "CAC_RULE_TOLERANCE", 0.2, within("(0, 1)"),
        "the first layer stops when its plasticity changes at less than this share of its fastest change",
        mode="plasticity", published=False,
    )
    rule_window: int = variable(
        "CAC_RULE_WINDOW", 5, at_least(2),
        "measurements that plasticity is averaged over and its slope is fitted to",
        mode="plasticity", published=False,
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
    norm_statistics: str = variable(
        "CAC_NORM_STATISTICS", "go_on",
        Range(words=" or ".join(NORM_STATISTICS), holds=lambda value: value in NORM_STATISTICS),
        "running statistics of stopped batch norms go on as published, or hold still and are what training normalises "
        "by; hold needs model=",
        mode="both", published=False,
    )
    prefix_autograd: bool = variable(
        "CAC_PREFIX_AUTOGRAD", True, _FLAG,
        "0: nothing upstream of a stopped layer is kept for a backward pass, left-over parameters included; "
        "0 needs model=",
        mode="both", published=False,
    )
# fmt: on


VARIABLES: tuple[Variable, ...] = declared_variables(VariableFields)
BY_NAME: dict[str, Variable] = {variable.name: variable for variable in VARIABLES}


def ratio_name(rule: str) -> str:
    """Return what a stop's number is, by the rule in its event.

    >>> ratio_name("slope"), ratio_name("gradient_norm")
    ('variance/peak', 'ratio')
    """
    return "ratio" if rule in MEASURED_RULES else "variance/peak"


def variable_named(name: str) -> Variable:
    """Return the variable of that name; raise UserError with the nearest name and the list if there is none."""
    if name not in BY_NAME:
        raise unknown_name("variable", name, BY_NAME)
    return BY_NAME[name]
