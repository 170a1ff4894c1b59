"""Hyperparameters of the gradient estimators, as fields of a trial's configuration. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainables.errors import UserError, unknown_name
from trainables.gradients.variance_fields import (
    LEAST,
    OF_ANY_METHOD,
    PREFIXES,
    VARIANCE_DEFAULTS,
    VARIANCE_METHODS,
    VarianceFields,
    check_variance_fields,
)
from trainables.gradskip.variable_types import is_number

#: Methods that take other gradients than backpropagation's of the loop's batches.
ESTIMATORS = ("central_difference", "discrete_gradient", "straight_through", *VARIANCE_METHODS)
#: By what the discrete gradient orders what it found: the loss's decrease over the change, or over its square.
OBJECTIVES = ("decrease/delta", "decrease/delta^2")
#: Mode of the binary activations from which an estimator's gradients are sampled, by its name; None has none.
STE_ESTIMATORS: Mapping[str, str | None] = {
    "sign": "sign",
    "stochastic_rounding": "stochastic",
    "backward_noise": "backward",
    "proposal": "stochastic",
    "nes": None,
}
#: How samples become one direction: their mean; their mean weighted by max(effect, 0); the one of the largest effect.
STE_WEIGHTINGS = ("uniform", "effect", "best")


@dataclass(frozen=True, kw_only=True)
class GradientFields(VarianceFields):
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
    ste_estimator: str | None = None
    """straight_through: one of `STE_ESTIMATORS`."""
    ste_samples: int | None = None
    """straight_through: gradients that are sampled in a step, >= 1; of nes, pairs of forward passes."""
    ste_weighting: str | None = None
    """straight_through: how samples become one direction, `STE_WEIGHTINGS`."""
    ste_normalised: bool | None = None
    """straight_through: True for a direction of unit length."""
    ste_trial_step: float | None = None
    """straight_through: length of the step that measures the effect of a sample, above 0."""
    ste_candidates: int | None = None
    """straight_through, estimator proposal: directions drawn beside the mean, >= 1."""
    ste_spread: float | None = None
    """straight_through, estimator proposal: factor of the samples' deviations, above 0."""
    ste_sigma: float | None = None
    """straight_through, estimator nes: standard deviation of a weight's perturbation, above 0."""


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
    "straight_through": {
        "gradient_start_itr": 0,
        "ste_estimator": "stochastic_rounding",
        "ste_samples": 1,
        "ste_weighting": "uniform",
        "ste_normalised": False,
        "ste_trial_step": 0.01,
        "ste_candidates": 4,
        "ste_spread": 1.0,
        "ste_sigma": 0.01,
    },
    **VARIANCE_DEFAULTS,
}
#: Names of the fields.
FIELD_NAMES = tuple(field.name for field in fields(GradientFields) if field.name not in OF_ANY_METHOD)
#: Least values of the fields that are integers.
INTEGERS: Mapping[str, int] = {"gradient_start_itr": 0, "ste_samples": 1, "ste_candidates": 1, **LEAST}


def estimator_in(method: str) -> str | None:
    """Return the estimator that is a method, or one of the methods that it joins; None if there is none.

    >>> estimator_in("gradskip+zero_gradients"), estimator_in("gradskip")
    ('zero_gradients', None)
    """
    return next((part for part in method.split("+") if part in ESTIMATORS), None)


def estimator_of(names: set[str]) -> str | None:
    """Return the estimator that fields of a space belong to; None if none of them is of an estimator.

    >>> estimator_of({"gradient_epsilon", "epochs"}), estimator_of({"gradient_epsilon", "discrete_stride"})
    ('central_difference', 'discrete_gradient')

    Raises:
        UserError: fields of two estimators.
    """
    own = names & set(FIELD_NAMES)
    prefixes = {"discrete_": "discrete_gradient", "ste_": "straight_through"}
    prefixes |= {prefix: method for method, prefix in PREFIXES.items()}
    found = [method for prefix, method in prefixes.items() if any(name.startswith(prefix) for name in own)]
    if len(found) > 1:
        raise UserError(
            f"settings of {' and '.join(found)} can't be searched together, got {', '.join(sorted(own))}: search them "
            "one after the other"
        )
    return found[0] if found else "central_difference" if own else None


def settings_of(config: Any) -> dict[str, Any]:
    """Return the values with which a configuration's estimator works, by field: its own, or the method's defaults.

    Args:
        config: a `TrialConfig` with a method of `ESTIMATORS`.
    """
    given = {name: getattr(config, name) for name in FIELD_NAMES}
    method = estimator_in(config.method)
    assert method is not None, "a method without an estimator"
    defaults = DEFAULTS[method]
    return {
        name: defaults.get(name) if value is None else value
        for name, value in given.items()
        if name in readable_fields(method)
    }


def readable_fields(method: str) -> set[str]:
    """Return the fields that an estimator reads."""
    return set(DEFAULTS[method]) | (set() if method in VARIANCE_METHODS else {"gradient_layers"})


def check_gradient_fields(config: Any) -> None:
    """Raise UserError for a value out of range, or a field that the configuration's method does not read."""
    named = [name for name in FIELD_NAMES if getattr(config, name) is not None]
    if not named:
        return
    method = estimator_in(config.method)
    if method is not None:
        readable = readable_fields(method)
        for name in named:
            if name not in readable:
                raise unknown_name(f"setting of method {method}", name, readable)
    check_variance_fields(config)
    for name in ("gradient_epsilon", "discrete_stride", "ste_trial_step", "ste_spread", "ste_sigma"):
        value = getattr(config, name)
        if value is not None and not (is_number(value) and value > 0):
            raise UserError(f"{name} must be a number above 0, got {value!r}")
    for name, valid in (
        ("discrete_objective", OBJECTIVES), ("ste_estimator", STE_ESTIMATORS), ("ste_weighting", STE_WEIGHTINGS)
    ):  # fmt: skip
        value = getattr(config, name)
        if value is not None and value not in valid:
            raise unknown_name(name, str(value), valid)
    if config.method == "discrete_gradient":
        settings = settings_of(config)
        if settings["discrete_stride"] > settings["gradient_epsilon"]:
            raise UserError(
                f"discrete_stride must be at most gradient_epsilon={settings['gradient_epsilon']!r}, got "
                f"{settings['discrete_stride']!r}"
            )
