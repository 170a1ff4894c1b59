"""Regularization terms of the loss that push weights or groups towards zero, or the groups' norms apart.

Symbols: w a weight; g one of its groups (see `structures`); lambda the strength that the schedule gives a parameter,
>= 0. Terms are summed over the parameters.

    L1               lambda sum |w|
    group lasso      lambda sum_g ||g||_2                  (Yuan and Lin 2006, eq. 2.1, without sqrt of the group size)
    group variance   lambda / var_g ||g||_2                (Torfi et al. 2018, arXiv:1802.09902; variance unbiased)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor, nn

from trainables.compression.component import Regularizer
from trainables.compression.schedule.configs import ComponentConfig
from trainables.compression.schedule.names import assigned, plain_name
from trainables.compression.schedule.regularizer_configs import (
    GroupLassoRegularizerConfig,
    GroupVarianceRegularizerConfig,
    L1RegularizerConfig,
)
from trainables.compression.structures import (
    at_least_single,
    check_groups,
    group_count,
    group_mask,
    group_norms,
    parts_of,
)
from trainables.errors import UserError

#: Below this variance the group variance term is constant and its gradient is 0: equal norms give no direction in
#: which to increase the variance, and 1 / var**2 would overflow.
LEAST_VARIANCE = 1e-12


class L1(Regularizer):
    """lambda sum |w|. With a threshold criterion, elements with |w| <= lambda become zero."""

    def __init__(self, strengths: Mapping[str, float], criterion: str | None = None) -> None:
        self.strengths = dict(strengths)
        self.criterion = criterion
        self.thresholds = criterion is not None
        self.targets = tuple(self.strengths)

    def loss(self, weights: Mapping[str, Tensor]) -> Tensor:
        terms = (
            strength * weights[name].abs().sum(dtype=at_least_single(weights[name].dtype))
            for name, strength in self.strengths.items()
        )
        return reduce(add, terms)

    def masks(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.criterion is None:
            return {}
        found = {name: weights[name].detach() for name in self.targets}
        return {name: (w.abs() > self.strengths[name]).to(w.dtype) for name, w in found.items()}


class GroupLasso(Regularizer):
    """lambda times the sum of the groups' L2 norms; with two kinds of groups (``Rows+Cols``) both sums are added.

    With a threshold criterion, groups whose greatest (``Max``) or mean (``Mean_Abs``) absolute value is at most lambda
    become zero.
    """

    def __init__(self, regimes: Mapping[str, tuple[float, str]], criterion: str | None = None) -> None:
        self.regimes = dict(regimes)
        self.criterion = criterion
        self.thresholds = criterion is not None
        self.targets = tuple(self.regimes)

    def loss(self, weights: Mapping[str, Tensor]) -> Tensor:
        terms = (
            strength * group_norms(weights[name], kind).sum()
            for name, (strength, group) in self.regimes.items()
            for kind in parts_of(group)
        )
        return reduce(add, terms)

    def masks(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.criterion is None:
            return {}
        return {
            name: group_mask(weights[name], group, strength, self.criterion)
            for name, (strength, group) in self.regimes.items()
        }


class GroupVariance(Regularizer):
    """lambda over the unbiased variance of the groups' L2 norms, clamped to at least `LEAST_VARIANCE`."""

    def __init__(self, regimes: Mapping[str, tuple[float, str]]) -> None:
        self.regimes = dict(regimes)
        self.targets = tuple(self.regimes)

    def loss(self, weights: Mapping[str, Tensor]) -> Tensor:
        terms = (
            strength / group_norms(weights[name], kind).var(unbiased=True).clamp(min=LEAST_VARIANCE)
            for name, (strength, kind) in self.regimes.items()
        )
        return reduce(add, terms)


def build_regularizer(name: str, settings: ComponentConfig, model: nn.Module) -> Regularizer:
    """Build the regularizer that the settings describe, for the parameters of this model.

    Args:
        name: of the instance in the schedule, for messages.
        settings: one of `trainables.compression.schedule.configs.REGULARIZERS`.
        model: as built; the settings' patterns are matched with its parameters' names without a leading ``module.``.

    Raises:
        UserError: a pattern matches no parameter, or a parameter does not have the requested groups.
    """
    if not isinstance(settings, (L1RegularizerConfig, GroupLassoRegularizerConfig, GroupVarianceRegularizerConfig)):
        raise TypeError(f"{type(settings).__name__} holds the settings of no regularizer")
    shapes = {plain_name(key): tuple(parameter.shape) for key, parameter in model.named_parameters()}
    try:
        regimes: dict[str, Any] = assigned(settings.reg_regims, list(shapes))
        if isinstance(settings, L1RegularizerConfig):
            return L1(regimes, settings.threshold_criteria)
        for parameter, (_, group) in regimes.items():
            check_groups(parameter, shapes[parameter], group)
        if isinstance(settings, GroupLassoRegularizerConfig):
            return GroupLasso(regimes, settings.threshold_criteria)
        for parameter, (_, group) in regimes.items():
            if group_count(shapes[parameter], group) < 2:
                raise UserError(
                    f"the variance of group {group} needs at least two groups, but {parameter} of shape "
                    f"{list(shapes[parameter])} has one"
                )
        return GroupVariance(regimes)
    except UserError as error:
        raise UserError(f"regularizer {name}: {error}") from None
