"""Gradient estimators: directions of descent without backpropagation, or beside it.

    import tune_cac as cac
    estimate = cac.gradients.central_difference(lambda m: F.cross_entropy(m(x), y), model)

Importing this package loads no torch; a name's home is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainables.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainables.gradients.central_differences import (
        CentralDifferenceSGD,
        autograd_gradient,
        central_difference,
        relative_error,
    )
    from trainables.gradients.discrete_gradients import DiscreteGradient, discrete_gradient
    from trainables.gradients.gradient_clustering import GradientCluster, GradientClustering
    from trainables.gradients.gradient_method import GradientMethod, reservoir
    from trainables.gradients.gradient_statistics import GradientMeasurement, GradientMoments, GradientStatistics
    from trainables.gradients.importance_sampling import ImportanceSampling
    from trainables.gradients.kfac import KFAC
    from trainables.gradients.normalised_sgd import NormalisedSGD
    from trainables.gradients.straight_through import (
        BinaryActivation,
        activation_mode,
        backward_noise_ste,
        sign_ste,
        stochastic_rounding_ste,
    )
    from trainables.gradients.straight_through_directions import StraightThroughSettings, straight_through_direction
    from trainables.gradients.svrg import SVRG
    from trainables.gradients.zero_gradients import ZeroGradients

__all__ = [
    "central_difference", "CentralDifferenceSGD", "autograd_gradient", "relative_error", "NormalisedSGD",
    "discrete_gradient", "DiscreteGradient",
    "sign_ste", "stochastic_rounding_ste", "backward_noise_ste", "BinaryActivation", "activation_mode",
    "straight_through_direction", "StraightThroughSettings",
    "GradientMethod", "SVRG", "KFAC", "GradientClustering", "GradientCluster", "ImportanceSampling", "ZeroGradients",
    "GradientStatistics", "GradientMeasurement", "GradientMoments",
    "reservoir",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "central_differences": (
            "central_difference", "CentralDifferenceSGD", "autograd_gradient", "relative_error",
        ),
        "discrete_gradients": ("discrete_gradient", "DiscreteGradient"),
        "normalised_sgd": ("NormalisedSGD",),
        "straight_through": ("sign_ste", "stochastic_rounding_ste", "backward_noise_ste", "BinaryActivation",
                             "activation_mode"),
        "straight_through_directions": ("straight_through_direction", "StraightThroughSettings"),
        "gradient_method": ("GradientMethod", "reservoir"),
        "svrg": ("SVRG",),
        "kfac": ("KFAC",),
        "gradient_clustering": ("GradientClustering", "GradientCluster"),
        "importance_sampling": ("ImportanceSampling",),
        "zero_gradients": ("ZeroGradients",),
        "gradient_statistics": ("GradientStatistics", "GradientMeasurement", "GradientMoments"),
    },
)  # fmt: skip
