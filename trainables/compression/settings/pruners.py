"""Arguments of the pruners. Symbols as in docs/compression.md: s sensitivity, w a weight, t a threshold."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from trainables.compression.settings.base import (
    Count,
    Fraction,
    Names,
    NotNegative,
    Positive,
    Settings,
    Text,
    Whole,
)

Ranked = Literal["3D", "Filters", "Channels", "Rows", "Blocks"]
Filters = Literal["3D", "Filters"]
Thresholded = Literal["2D", "3D", "4D", "Filters", "Channels", "Rows", "Cols"]


class SensitivityPruner(Settings):
    """Zero what is below t = s std(w), the deviation taken at the first use (Han et al. 2015)."""

    class_: ClassVar[str] = "SensitivityPruner"
    sensitivities: dict[Text, NotNegative] = Field(min_length=1)
    """s by parameter name or pattern."""


class MagnitudeParameterPruner(Settings):
    """Zero what is below a given threshold."""

    class_: ClassVar[str] = "MagnitudeParameterPruner"
    thresholds: dict[Text, NotNegative] = Field(min_length=1)
    """t by parameter name or pattern; ``*`` is for every other parameter."""


class SparsityLevelParameterPruner(Settings):
    """Zero the smallest share of the elements."""

    class_: ClassVar[str] = "SparsityLevelParameterPruner"
    levels: dict[Text, Fraction] = Field(min_length=1)
    """Share of the elements by parameter name or pattern."""


class _Gradual(Settings):
    initial_sparsity: Fraction
    """Share pruned in the first active epoch."""
    final_sparsity: Fraction
    """Share pruned in the last active epoch, above the initial one."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.final_sparsity <= self.initial_sparsity:
            raise ValueError(
                f"final_sparsity must be above initial_sparsity {self.initial_sparsity}, got {self.final_sparsity}"
            )
        return self


class AutomatedGradualPruner(_Gradual):
    """Zero the smallest share of the elements, the share growing by a cubic (Zhu & Gupta 2017, eq. 1)."""

    class_: ClassVar[str] = "AutomatedGradualPruner"
    weights: Names
    """Parameter names or patterns."""


class BlockArguments(Settings):
    """Arguments of blocks."""

    class_: ClassVar[str] = ""
    block_shape: tuple[Count, Count, Count, Count]
    """Filters, channels, height, width of a block; height and width are 1."""

    @model_validator(mode="after")
    def _is_flat(self) -> Self:
        if self.block_shape[2:] != (1, 1):
            raise ValueError(f"block_shape must end in 1, 1 (height, width), got {list(self.block_shape)}")
        return self


class _Structures(Settings):
    weights: Names
    """Parameter names or patterns."""
    group_dependency: Literal["Leader"] | None = None
    """``Leader``: all weights lose the structures that the first one loses."""


class _WithBlocks(_Structures):
    group_type: Ranked
    """What is ranked."""
    kwargs: BlockArguments | None = None
    """For Blocks: ``block_shape``."""

    @model_validator(mode="after")
    def _blocks_have_a_shape(self) -> Self:
        if (self.group_type == "Blocks") != (self.kwargs is not None):
            raise ValueError(
                "kwargs with block_shape belongs to group_type Blocks, and Blocks needs it, got group_type "
                f"{self.group_type} {'with' if self.kwargs is not None else 'without'} kwargs"
            )
        return self


class _LpRanked(_WithBlocks):
    noise: NotNegative = 0.0
    """Deviation of the factor (mean 1) that each structure's norm is multiplied by before ranking."""
    group_size: Count = 1
    """Structures are pruned in multiples of this."""


class _Desired(Settings):
    desired_sparsity: Fraction
    """Share of the structures."""


class L1RankedStructureParameterPruner(_LpRanked, _Desired):
    """Zero the share of the structures with the smallest mean absolute value (Li et al. 2017)."""

    class_: ClassVar[str] = "L1RankedStructureParameterPruner"


class L2RankedStructureParameterPruner(_LpRanked, _Desired):
    """Zero the share of the structures with the smallest mean L2 norm."""

    class_: ClassVar[str] = "L2RankedStructureParameterPruner"


class L1RankedStructureParameterPruner_AGP(_LpRanked, _Gradual):  # noqa: N801  # the schedule's name
    """The same with a share that grows by a cubic."""

    class_: ClassVar[str] = "L1RankedStructureParameterPruner_AGP"


class L2RankedStructureParameterPruner_AGP(_LpRanked, _Gradual):  # noqa: N801
    """The same with a share that grows by a cubic."""

    class_: ClassVar[str] = "L2RankedStructureParameterPruner_AGP"


class RandomLevelStructureParameterPruner(_WithBlocks):
    """Zero a random share, drawn anew at each use, of the structures with the smallest mean absolute value."""

    class_: ClassVar[str] = "RandomLevelStructureParameterPruner"
    sparsity_range: tuple[Fraction, Fraction]
    """The share's least and greatest value."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.sparsity_range[0] > self.sparsity_range[1]:
            raise ValueError(f"sparsity_range must be [least, greatest], got {list(self.sparsity_range)}")
        return self


class _Filters(_Structures):
    group_type: Filters
    """Filters."""


class ActivationAPoZRankedFilterPruner(_Filters, _Desired):
    """Zero the filters whose activations are zero most often (Hu et al. 2016)."""

    class_: ClassVar[str] = "ActivationAPoZRankedFilterPruner"


class ActivationAPoZRankedFilterPruner_AGP(_Filters, _Gradual):  # noqa: N801
    """The same with a share that grows by a cubic."""

    class_: ClassVar[str] = "ActivationAPoZRankedFilterPruner_AGP"


class ActivationMeanRankedFilterPruner(_Filters, _Desired):
    """Zero the filters whose activations have the smallest mean (Molchanov et al. 2017)."""

    class_: ClassVar[str] = "ActivationMeanRankedFilterPruner"


class ActivationMeanRankedFilterPruner_AGP(_Filters, _Gradual):  # noqa: N801
    """The same with a share that grows by a cubic."""

    class_: ClassVar[str] = "ActivationMeanRankedFilterPruner_AGP"


class GradientRankedFilterPruner(_Filters, _Desired):
    """Zero the filters whose removal changes the loss least, by a first-order Taylor term (Molchanov et al. 2017)."""

    class_: ClassVar[str] = "GradientRankedFilterPruner"


class GradientRankedFilterPruner_AGP(_Filters, _Gradual):  # noqa: N801
    """The same with a share that grows by a cubic."""

    class_: ClassVar[str] = "GradientRankedFilterPruner_AGP"


class RandomRankedFilterPruner(_Filters, _Desired):
    """Zero filters at random, the exact share of them: what a ranking has to beat."""

    class_: ClassVar[str] = "RandomRankedFilterPruner"


class RandomRankedFilterPruner_AGP(_Filters, _Gradual):  # noqa: N801
    """The same with a share that grows by a cubic."""

    class_: ClassVar[str] = "RandomRankedFilterPruner_AGP"


class BernoulliFilterPruner(_Filters, _Desired):
    """Zero each filter with this probability and scale the others up by what is kept (drop-filter)."""

    class_: ClassVar[str] = "BernoulliFilterPruner"


class BernoulliFilterPruner_AGP(_Filters, _Gradual):  # noqa: N801
    """The same with a probability that grows by a cubic."""

    class_: ClassVar[str] = "BernoulliFilterPruner_AGP"


class StructureParameterPruner(Settings):
    """Zero the structures whose greatest or mean absolute value is at most a threshold."""

    class_: ClassVar[str] = "StructureParameterPruner"
    reg_regims: dict[Text, tuple[NotNegative, Thresholded]] = Field(min_length=1)
    """[threshold, structure] by parameter name or pattern."""
    threshold_criteria: Literal["Max", "Mean_Abs"]
    """What of a structure is compared."""


class SplicingPruner(Settings):
    """Prune below a, restore above b, between them leave as it is (dynamic network surgery, Guo et al. 2016, eq. 3)."""

    class_: ClassVar[str] = "SplicingPruner"
    sensitivities: dict[Text, NotNegative] = Field(min_length=1)
    """s by parameter name or pattern; ``*`` is for every other parameter."""
    low_thresh_mult: Positive
    """a over mean|w| + s std|w|."""
    hi_thresh_mult: Positive
    """b over the same, at least the lower one."""
    sensitivity_multiplier: NotNegative = 0.0
    """By this times s, s grows each epoch from the first active one on."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.hi_thresh_mult < self.low_thresh_mult:
            raise ValueError(
                f"hi_thresh_mult must be >= low_thresh_mult {self.low_thresh_mult}, got {self.hi_thresh_mult}"
            )
        return self


class BaiduRNNPruner(Settings):
    """Zero what is below a threshold that rises along two straight lines (Narang et al. 2017)."""

    class_: ClassVar[str] = "BaiduRNNPruner"
    q: Positive
    """The 90th percentile of |w| of a trained dense run."""
    ramp_slope_mult: Positive
    """Slope of the second line over that of the first; 1.5 to 2 in the paper."""
    weights: Names
    """Parameter names or patterns."""
    ramp_epoch_offset: Annotated[Whole, Field(ge=0)] | None = None
    """Where the second line begins, in epochs from the policy's first."""
    ramp_epoch: Annotated[Whole, Field(ge=0)] | None = None
    """The same as an epoch of the run, as schedules had it before June 2018."""
    initial_sparsity: Fraction | None = None
    """Published schedules have it; the rule has no use for it."""
    final_sparsity: Fraction | None = None
    """Published schedules have it; the rule has no use for it."""

    @model_validator(mode="after")
    def _has_one_ramp(self) -> Self:
        if (self.ramp_epoch_offset is None) == (self.ramp_epoch is None):
            got = "neither" if self.ramp_epoch is None else "both"
            raise ValueError(
                "needs ramp_epoch_offset, counted from the policy's first epoch, or ramp_epoch, counted from the "
                f"run's, got {got}"
            )
        return self

    def ramp_from(self, starting_epoch: int) -> int:
        """The epoch of the run in which the second line begins."""
        return starting_epoch + (self.ramp_epoch_offset or 0) if self.ramp_epoch is None else self.ramp_epoch


PRUNERS: dict[str, type[Settings]] = {
    model.class_: model
    for model in (
        SensitivityPruner, MagnitudeParameterPruner, SparsityLevelParameterPruner, AutomatedGradualPruner,
        L1RankedStructureParameterPruner, L2RankedStructureParameterPruner, L1RankedStructureParameterPruner_AGP,
        L2RankedStructureParameterPruner_AGP, RandomLevelStructureParameterPruner, ActivationAPoZRankedFilterPruner,
        ActivationAPoZRankedFilterPruner_AGP, ActivationMeanRankedFilterPruner, ActivationMeanRankedFilterPruner_AGP,
        GradientRankedFilterPruner, GradientRankedFilterPruner_AGP, RandomRankedFilterPruner,
        RandomRankedFilterPruner_AGP, BernoulliFilterPruner, BernoulliFilterPruner_AGP, StructureParameterPruner,
        SplicingPruner, BaiduRNNPruner,
    )
}  # fmt: skip
