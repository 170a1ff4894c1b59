"""Hyperparameters of the gradient estimators, as fields of a trial's configuration. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainables.errors import UserError, unknown_name
from trainables.gradskip.variables import is_number

#: Scores by which importance sampling draws.
IMPORTANCE_SCORES = ("loss", "output_gradient")
#: From which labels K-FAC's factors are measured: drawn from the model's own distribution, or the batch's.
FISHERS = ("sampled", "empirical")
#: Gradients of a measurement unless specified, as in the paper.
STATISTICS_SAMPLES = 50
#: Samples that are kept of an epoch whose samples have no numbers, unless specified.
KEPT_SAMPLES = 5000
#: Ways to find clusters of gradients: passes over all samples, or from the batches that are trained.
CLUSTER_MODES = ("full", "online")
#: Steps from one update of the clusters to the next: the least of full updates, and of those from trained batches.
FULL_CLUSTER_EVERY, ONLINE_CLUSTER_EVERY = 100, 10
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
#: Ways to one direction from samples: their mean; their mean weighted by max(effect, 0).
STE_WEIGHTINGS = ("uniform", "effect")


@dataclass(frozen=True, kw_only=True)
class GradientFields:
    """Fields of the methods of `ESTIMATORS` (`PREFIXES` says whose); None: the method's default (`DEFAULTS`)."""

    svrg_alpha: float | None = None  # coefficient of the control variate, in [0, 1]; 0 is SGD
    svrg_alpha_decays: bool | None = None  # True if the coefficient falls linearly to 0 over the run
    svrg_snapshot_every: int | None = None  # steps from one snapshot, a pass over the data, to the next, >= 1
    kfac_damping: float | None = None  # added to the eigenvalues of the curvature, above 0
    kfac_kl_clip: float | None = None  # bound on the KL divergence of a step, above 0
    kfac_decay: float | None = None  # decay of the factors' moving averages, in [0, 1)
    kfac_factor_every: int | None = None  # steps from one measurement of the factors to the next, >= 1
    kfac_inverse_every: int | None = None  # steps from one eigendecomposition to the next, >= 1
    kfac_fisher: str | None = None  # labels of the factors, `FISHERS`
    cluster_count: int | None = None  # K, the clusters, >= 1
    cluster_mode: str | None = None  # `CLUSTER_MODES`
    cluster_every: int | None = None
    """Steps from one update of the clusters to the next, >= 1; unless set, online 10, full as many as passes need to
    cost less than plain steps, 100 at least."""
    cluster_iterations: int | None = None  # passes over the data of a full update, >= 1
    cluster_decay: float | None = None  # decay of the centres in online mode, in [0, 1)
    kept_samples: int | None = None
    """gradient_clustering, importance_sampling, svrg: most samples that are kept of data without numbers, >= 1."""
    importance_by: str | None = None  # `IMPORTANCE_SCORES`
    importance_uniform: float | None = None  # share of the probability that is spread evenly, in (0, 1]
    importance_update_every: int | None = None  # steps from one update of the probabilities to the next, >= 1
    zero_threshold: float | None = None  # norm of a sample's output gradient below which it is left out, above 0
    zero_unbiased: bool | None = None  # True keeps some of those samples with a larger weight
    statistics_measurements: int | None = None  # of any method: measurements in the run, >= 1. None: no statistics
    statistics_samples: int | None = None  # gradients of each estimator in one, >= 2. None: `STATISTICS_SAMPLES`
    gradient_layers: tuple[str, ...] | None = None
    """Names or patterns of the parameters that are estimated; the others are trained by backpropagation. None: all."""
    gradient_start_itr: int | None = None
    """First iteration with the estimator, >= 0; before it all parameters are trained by backpropagation."""
    gradient_epsilon: float | None = None
    """central_difference: half the distance of two evaluations; discrete_gradient: length of a step. Above 0."""
    gradient_epsilon_decays: bool | None = None  # True if epsilon keeps its ratio to the learning rate
    discrete_stride: float | None = None  # smallest change of a weight, above 0 and at most epsilon
    discrete_objective: str | None = None  # order in which changes are taken, `OBJECTIVES`
    ste_estimator: str | None = None  # one of `STE_ESTIMATORS`
    ste_samples: int | None = None  # gradients that are sampled in a step, >= 1; of nes, pairs of forward passes
    ste_weighting: str | None = None  # how samples become one direction, `STE_WEIGHTINGS`
    ste_normalised: bool | None = None  # True for a direction of unit length
    ste_trial_step: float | None = None  # length of the step that measures the effect of a sample, above 0
    ste_candidates: int | None = None  # estimator proposal: directions drawn beside the mean, >= 1
    ste_spread: float | None = None  # estimator proposal: factor of the samples' deviations, above 0
    ste_sigma: float | None = None  # estimator nes: standard deviation of a weight's perturbation, above 0


#: Fields that a method reads and their values where they are None, by method.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "central_difference": {
        "gradient_layers": None, "gradient_start_itr": 0, "gradient_epsilon": 0.1, "gradient_epsilon_decays": True,
    },
    "discrete_gradient": {
        "gradient_layers": None, "gradient_start_itr": 0, "gradient_epsilon": 1e-2, "gradient_epsilon_decays": True,
        "discrete_stride": 1e-4, "discrete_objective": OBJECTIVES[0],
    },
    "straight_through": {
        "gradient_layers": None, "gradient_start_itr": 0, "ste_estimator": "stochastic_rounding", "ste_samples": 1,
        "ste_weighting": "uniform", "ste_normalised": False, "ste_trial_step": 0.01, "ste_candidates": 4,
        "ste_spread": 1.0, "ste_sigma": 0.01,
    },
    "svrg": {
        "gradient_start_itr": 0, "svrg_alpha": 1.0, "svrg_alpha_decays": False, "svrg_snapshot_every": 100,
        "kept_samples": KEPT_SAMPLES,
    },
    "kfac": {
        "gradient_start_itr": 0, "kfac_damping": 1e-3, "kfac_kl_clip": 1e-2, "kfac_decay": 0.95,
        "kfac_factor_every": 10, "kfac_inverse_every": 100, "kfac_fisher": "sampled",
    },
    "gradient_clustering": {
        "gradient_start_itr": 0, "cluster_count": 10, "cluster_mode": "full", "cluster_every": None,
        "cluster_iterations": 3, "cluster_decay": 0.99, "kept_samples": KEPT_SAMPLES,
    },
    "importance_sampling": {
        "gradient_start_itr": 0, "importance_by": "loss", "importance_uniform": 0.5, "importance_update_every": 10,
        "kept_samples": KEPT_SAMPLES,
    },
    "zero_gradients": {"gradient_start_itr": 0, "zero_threshold": 0.01, "zero_unbiased": False},
}  # fmt: skip
#: Methods that take other gradients than backpropagation's of the loop's batches.
ESTIMATORS = tuple(DEFAULTS)
#: Beginnings of the names of fields that one method alone has, by method.
PREFIXES: Mapping[str, str] = {
    "discrete_gradient": "discrete_",
    "straight_through": "ste_",
    "svrg": "svrg_",
    "kfac": "kfac_",
    "gradient_clustering": "cluster_",
    "importance_sampling": "importance_",
    "zero_gradients": "zero_",
}
#: Fields that any method may have.
OF_ANY_METHOD = ("statistics_measurements", "statistics_samples")
#: Names of the estimators' fields.
FIELD_NAMES = tuple(field.name for field in fields(GradientFields) if field.name not in OF_ANY_METHOD)
#: Least values of the fields that are integers.
INTEGERS: Mapping[str, int] = {
    "gradient_start_itr": 0, "ste_samples": 1, "ste_candidates": 1, "svrg_snapshot_every": 1, "kfac_factor_every": 1,
    "kfac_inverse_every": 1, "cluster_count": 1, "cluster_every": 1, "cluster_iterations": 1, "kept_samples": 1,
    "importance_update_every": 1, "statistics_measurements": 1, "statistics_samples": 2,
}  # fmt: skip
#: Ranges of numbers: the rule in words, whether a value is valid, and the fields.
_RANGES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("in [0, 1]", lambda v: 0 <= v <= 1, ("svrg_alpha",)),
    ("in [0, 1)", lambda v: 0 <= v < 1, ("kfac_decay", "cluster_decay")),
    ("in (0, 1]", lambda v: 0 < v <= 1, ("importance_uniform",)),
    ("above 0", lambda v: v > 0, (
        "kfac_damping", "kfac_kl_clip", "zero_threshold", "gradient_epsilon", "discrete_stride", "ste_trial_step",
        "ste_spread", "ste_sigma",
    )),
)  # fmt: skip
_CHOICES: Mapping[str, Collection[str]] = {
    "kfac_fisher": FISHERS, "cluster_mode": CLUSTER_MODES, "importance_by": (*IMPORTANCE_SCORES, "gradient"),
    "discrete_objective": OBJECTIVES, "ste_estimator": STE_ESTIMATORS,
    # Values that studies have, but no estimator any more, are refused where they would be trained.
    "ste_weighting": (*STE_WEIGHTINGS, "best"),
}  # fmt: skip


def check_gradient_fields(config: Any) -> None:
    """Raise UserError for a value out of range, or a field that the configuration's method does not read.

    Integers are checked with those of other fields.
    """
    given = {name: value for name in FIELD_NAMES if (value := getattr(config, name)) is not None}
    method = estimator_in(config.method)
    readable = FIELD_NAMES if method is None else DEFAULTS[method]
    for name in given:
        if name not in readable:
            raise unknown_name(f"setting of method {method}", name, readable)
    for rule, holds, names in _RANGES:
        for name in names:
            if name in given and not (is_number(given[name]) and holds(given[name])):
                raise UserError(f"{name} must be a number {rule}, got {given[name]!r}")
    for name, valid in _CHOICES.items():
        if name in given and given[name] not in valid:
            raise unknown_name(name, str(given[name]), valid)
    if given and config.method == "discrete_gradient":
        epsilon, stride = (settings_of(config)[name] for name in ("gradient_epsilon", "discrete_stride"))
        if stride > epsilon:
            raise UserError(f"discrete_stride must be at most gradient_epsilon={epsilon!r}, got {stride!r}")


def usual_cluster_interval(batches: int, iterations: int) -> int:
    """Return the steps from one full update to the next unless specified, 4/3 for each batch of each pass.

    Such a batch costs 1.13 plain steps (`benchmarks/variance_study.py --times`), so updates cost less than plain steps.

    >>> usual_cluster_interval(10, 3), usual_cluster_interval(782, 3)
    (100, 3128)
    """
    return max(FULL_CLUSTER_EVERY, -(-4 * batches * iterations // 3))


def options_of(method: str, settings: Mapping[str, Any], total_steps: int) -> dict[str, Any]:
    """Return the keyword arguments of a method's class (`trainables.gradients`) for a trial's settings.

    >>> options_of("svrg", {"svrg_alpha": 0.5, "svrg_alpha_decays": True, "kept_samples": 9}, 300)
    {'alpha': 0.5, 'alpha_end': 300}
    """
    prefix = PREFIXES[method]
    own = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
    if own.pop("alpha_decays", False):
        own["alpha_end"] = total_steps
    for name, option in (("count", "clusters"), ("normalised", "normalise")):
        if name in own:
            own[option] = own.pop(name)
    return own


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
    found = [method for method, prefix in PREFIXES.items() if any(name.startswith(prefix) for name in own)]
    if len(found) > 1:
        raise UserError(
            f"settings of {' and '.join(found)} can't be searched together, got {', '.join(sorted(own))}: search them "
            "one after the other"
        )
    return found[0] if found else "central_difference" if own else None


def settings_of(config: Any) -> dict[str, Any]:
    """Return the values with which a configuration's estimator works, by field: its own, or the method's defaults."""
    method = estimator_in(config.method)
    assert method is not None, "a method without an estimator"
    given = {name: getattr(config, name) for name in FIELD_NAMES if name in DEFAULTS[method]}
    return {name: DEFAULTS[method][name] if value is None else value for name, value in given.items()}
