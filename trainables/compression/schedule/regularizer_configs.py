"""Arguments of the regularizers. Symbols: lambda strength."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainables.compression.schedule.config_base import ComponentConfig, NotNegative, Text

LassoGroup = Literal["2D", "3D", "Filters", "4D", "Channels", "Rows", "Cols", "Rows+Cols", "Cols+Rows", "Channels+4D",
                     "4D+Channels"]  # fmt: skip


class L1RegularizerConfig(ComponentConfig):
    """lambda sum|w|."""

    reg_regims: dict[Text, NotNegative] = Field(min_length=1)
    """lambda by parameter name or pattern."""
    threshold_criteria: Literal["Max", "Mean_Abs"] | None = None
    """True if elements of at most lambda are zeroed after each step (for an element both criteria are its |w|)."""


class GroupLassoRegularizerConfig(ComponentConfig):
    """lambda times the sum of the groups' L2 norms (Yuan & Lin 2006)."""

    reg_regims: dict[Text, tuple[NotNegative, LassoGroup]] = Field(min_length=1)
    """[lambda, group] by parameter name or pattern."""
    threshold_criteria: Literal["Max", "Mean_Abs"] | None = None
    """Groups whose greatest or mean absolute value is at most lambda are zeroed after each step."""


class GroupVarianceRegularizerConfig(ComponentConfig):
    """lambda over the variance of the groups' norms, which increases the variance."""

    reg_regims: dict[Text, tuple[NotNegative, Literal["3D", "Filters", "Channels", "Rows", "Cols"]]] = Field(
        min_length=1
    )
    """[lambda, group] by parameter name or pattern."""


REGULARIZERS: dict[str, type[ComponentConfig]] = {
    "L1Regularizer": L1RegularizerConfig,
    "GroupLassoRegularizer": GroupLassoRegularizerConfig,
    "GroupLASSORegularizer": GroupLassoRegularizerConfig,
    "GroupVarianceRegularizer": GroupVarianceRegularizerConfig,
}
