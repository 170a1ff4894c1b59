"""Hyperparameters of the gradient estimators, as fields of a trial's configuration. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainables.errors import UserError, unknown_name
from trainables.gradskip.variable_types import is_number

#: Methods that estimate gradients.
ESTIMATORS = ("central_difference", "discrete_gradient", "straight_through")
#: By what the discrete gradient orders what it found: the loss's decrease over the change, or over its square.
OBJECTIVES = ("decrease/delta", "decrease/delta^2")


@dataclass(frozen=True, kw_only=True)
class GradientFields:
    """Fields of the methods of `ESTIMATORS`; None: the method's default (`DEFAULTS`)."""

    gradient_layers: tuple[str, ...] | None = None
    """Names or patterns of the parameters that are estimated; the others are trained by backpropagation. None: all."""
    gradient_start_itr: int | None = None
    """First iteration with the estimator, >= 0; before it all parameters are trained by backpropagation."""
    gradient_epsilon: float | None = None
    """central_difference: half the distance of two evaluations; discrete_gradient: length of a step. Above 0."""
    gradient_epsilon_decays: bool | None = None
    """True if epsilon keeps its ratio to the learning rate."""
    discrete_stride: float | None = None
    """discrete_gradient: smallest change of a weight, above 0 and at most epsilon."""
    discrete_objective: str | None = None
    """discrete_gradient: order in which changes are taken, `OBJECTIVES`."""


#: Values of fields that are None, by method.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "central_difference": {"gradient_start_itr": 0, "gradient_epsilon": 0.1, "gradient_epsilon_decays": True},
    "discrete_gradient": {
        "gradient_start_itr": 0,
        "gradient_epsilon": 1e-2,
        "gradient_epsilon_decays": True,
        "discrete_stride": 1e-4,
        "discrete_objective": OBJECTIVES[0],
    },
    "straight_through": {"gradient_start_itr": 0},
}
#: Names of the fields.
FIELD_NAMES = tuple(field.name for field in fields(GradientFields))


def estimator_of(names: set[str]) -> str | None:
    """Return the estimator that fields of a space belong to; None if none of them is of an estimator.

    >>> estimator_of({"gradient_epsilon", "epochs"}), estimator_of({"gradient_epsilon", "discrete_stride"})
    ('central_difference', 'discrete_gradient')
    """
    own = names & set(FIELD_NAMES)
    for prefix, method in (("discrete_", "discrete_gradient"), ("ste_", "straight_through")):
        if any(name.startswith(prefix) for name in own):
            return method
    return "central_difference" if own else None


def settings_of(config: Any) -> dict[str, Any]:
    """Return the values with which a configuration's estimator works, by field: its own, or the method's defaults.

    Args:
        config: a `TrialConfig` with a method of `ESTIMATORS`.
    """
    given = {name: getattr(config, name) for name in FIELD_NAMES}
    defaults = DEFAULTS[config.method]
    return {
        name: defaults.get(name) if value is None else value
        for name, value in given.items()
        if name in defaults or name == "gradient_layers"
    }


def check_gradient_fields(config: Any) -> None:
    """Raise UserError for a value out of range, or a field that the configuration's method does not read."""
    named = [name for name in FIELD_NAMES if getattr(config, name) is not None]
    if not named:
        return
    if config.method in ESTIMATORS:
        readable = {"gradient_layers", *DEFAULTS[config.method]}
        for name in named:
            if name not in readable:
                raise unknown_name(f"setting of method {config.method}", name, readable)
    for name in ("gradient_epsilon", "discrete_stride"):
        value = getattr(config, name)
        if value is not None and not (is_number(value) and value > 0):
            raise UserError(f"{name} must be a number above 0, got {value!r}")
    start = config.gradient_start_itr
    if start is not None and not (isinstance(start, int) and not isinstance(start, bool) and start >= 0):
        raise UserError(f"gradient_start_itr must be an integer >= 0, got {start!r}")
    if config.discrete_objective not in (None, *OBJECTIVES):
        raise unknown_name("discrete_objective", str(config.discrete_objective), OBJECTIVES)
    if config.method == "discrete_gradient":
        settings = settings_of(config)
        if settings["discrete_stride"] > settings["gradient_epsilon"]:
            raise UserError(
                f"discrete_stride must be at most gradient_epsilon={settings['gradient_epsilon']!r}, got "
                f"{settings['discrete_stride']!r}"
            )
