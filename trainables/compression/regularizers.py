"""Regularization terms of the loss that push weights or groups towards zero, or the groups' norms apart.

docs/compression.md has the formulas. Symbols: w a weight; g one of its groups (see `structures`); lambda the strength
that the schedule gives a parameter, >= 0. Terms are summed over the parameters, and over both kinds of groups of
``Rows+Cols``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainables.compression.masks import parameters_as_built
from trainables.compression.pruners import threshold_mask
from trainables.compression.schedule.configs import ComponentConfig
from trainables.compression.schedule.names import assigned
from trainables.compression.structures import Structures, check_group, group_mask
from trainables.errors import UserError
from trainables.workloads.user_code import class_named

#: Below this variance the group variance term is constant and its gradient is 0: equal norms give no direction in
#: which to increase the variance, and 1 / var**2 would overflow.
LEAST_VARIANCE = 1e-12

#: Terms of a weight by the regularizer's class, given lambda, or (lambda, group).
_TERMS: dict[str, Callable[[Tensor, Any], list[Tensor]]] = {
    # Summed in at least float32, because half precision overflows at 65,504.
    "L1Regularizer": lambda weight, strength: [
        strength * weight.abs().sum(dtype=torch.promote_types(weight.dtype, torch.float32))
    ],
    "GroupLassoRegularizer": lambda weight, regime: [
        regime[0] * Structures(kind).norms(weight).sum() for kind in regime[1].split("+")
    ],
    "GroupVarianceRegularizer": lambda weight, regime: [
        regime[0] / Structures(regime[1]).norms(weight).var(unbiased=True).clamp(min=LEAST_VARIANCE)
    ],
}


class Regularizer:
    """Add a term to the loss; with a threshold criterion also zero elements or groups of at most lambda.

    ``terms`` are those of one weight, given its regime: lambda, or (lambda, group). The criterion is ``Max``, a group's
    greatest absolute value, or ``Mean_Abs``, the mean; None: nothing is zeroed.
    """

    def __init__(
        self, terms: Callable[[Tensor, Any], list[Tensor]], regimes: Mapping[str, Any], criterion: str | None = None
    ) -> None:
        self.targets = tuple(regimes)
        self.criterion = criterion
        self._terms, self._regimes = terms, dict(regimes)

    def loss(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the term, a differentiable scalar, without synchronization with the device."""
        first, *others = (term for name, regime in self._regimes.items() for term in self._terms(weights[name], regime))
        return sum(others, first)

    def masks(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return masks of weights that the threshold criterion zeroes after a step, else empty; no synchronization."""
        if self.criterion is None:
            return {}
        return {
            name: group_mask(weights[name], regime[1], regime[0], self.criterion)
            if isinstance(regime, tuple)
            else threshold_mask(weights[name], regime)
            for name, regime in self._regimes.items()
        }


def build_regularizer(name: str, settings: ComponentConfig, model: nn.Module) -> Regularizer:
    """Build the regularizer that the settings describe, for a model, else UserError.

    ``name`` is that of the instance in the schedule, for messages.
    """
    if ":" in settings.class_:
        own: Any = class_named(settings.class_, {}, "regularizer", Regularizer)
        return own(settings, model)
    given: Any = settings
    shapes = {key: tuple(parameter.shape) for key, parameter in parameters_as_built(model).items()}
    try:
        regimes: dict[str, Any] = assigned(given.reg_regims, list(shapes))
        for parameter, regime in regimes.items():
            if isinstance(regime, tuple):
                check_group(regime[1], parameter, shapes[parameter])
            if settings.class_ == "GroupVarianceRegularizer" and Structures(regime[1]).count(shapes[parameter]) < 2:
                raise UserError(
                    f"the variance of group {regime[1]} needs at least two groups, but {parameter} of shape "
                    f"{list(shapes[parameter])} has one"
                )
    except UserError as error:
        raise UserError(f"regularizer {name}: {error}") from None
    return Regularizer(_TERMS[settings.class_], regimes, getattr(settings, "threshold_criteria", None))
