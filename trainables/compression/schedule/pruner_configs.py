"""Arguments of the pruners. Symbols as in docs/compression.md: s sensitivity, w a weight, t a threshold."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, create_model, model_validator

from trainables.compression.schedule.config_base import (
    ComponentConfig,
    Count,
    Fraction,
    Names,
    NotNegative,
    Positive,
    Text,
    Whole,
)

Ranked = Literal["3D", "Filters", "Channels", "Rows", "Blocks"]
Filters = Literal["3D", "Filters"]
Thresholded = Literal["2D", "3D", "4D", "Filters", "Channels", "Rows", "Cols"]


class SensitivityPrunerConfig(ComponentConfig):
    """Zero elements below t = s std(w), with std computed at the first use (Han et al. 2015)."""

    sensitivities: dict[Text, NotNegative] = Field(min_length=1)
    """s by parameter name or pattern."""


class MagnitudeParameterPrunerConfig(ComponentConfig):
    """Zero elements below a given threshold."""

    thresholds: dict[Text, NotNegative] = Field(min_length=1)
    """t by parameter name or pattern; ``*`` matches all other parameters."""


class SparsityLevelParameterPrunerConfig(ComponentConfig):
    """Zero a share of the elements, those with the smallest absolute values."""

    levels: dict[Text, Fraction] = Field(min_length=1)
    """Share of the elements by parameter name or pattern."""


class _GradualConfig(ComponentConfig):
    initial_sparsity: Fraction
    """Share pruned in the first active epoch."""
    final_sparsity: Fraction
    """Share pruned in the last active epoch, above the initial share."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.final_sparsity <= self.initial_sparsity:
            raise ValueError(
                f"final_sparsity must be above initial_sparsity {self.initial_sparsity}, got {self.final_sparsity}"
            )
        return self


class AutomatedGradualPrunerConfig(_GradualConfig):
    """Zero a share of the elements, the smallest, that grows by a cubic (Zhu & Gupta 2017, eq. 1)."""

    weights: Names
    """Parameter names or patterns."""


class BlockConfig(ComponentConfig):
    """Arguments of blocks."""

    class_: ClassVar[str] = ""
    block_shape: tuple[Count, Count, Count, Count]
    """Filters, channels, height, width of a block; height and width are 1."""

    @model_validator(mode="after")
    def _is_flat(self) -> Self:
        if self.block_shape[2:] != (1, 1):
            raise ValueError(f"block_shape must end in 1, 1 (height, width), got {list(self.block_shape)}")
        return self


class _StructuresConfig(ComponentConfig):
    weights: Names
    """Parameter names or patterns."""
    group_dependency: Literal["Leader"] | None = None
    """``Leader``: the structures removed from the first weight are removed from all weights."""


class _WithBlocksConfig(_StructuresConfig):
    group_type: Ranked
    """The structures that are ranked."""
    kwargs: BlockConfig | None = None
    """For Blocks: ``block_shape``."""

    @model_validator(mode="after")
    def _blocks_have_a_shape(self) -> Self:
        if (self.group_type == "Blocks") != (self.kwargs is not None):
            raise ValueError(
                "kwargs with block_shape belongs to group_type Blocks, and Blocks needs it, got group_type "
                f"{self.group_type} {'with' if self.kwargs is not None else 'without'} kwargs"
            )
        return self


class _LpRankedConfig(_WithBlocksConfig):
    noise: NotNegative = 0.0
    """Standard deviation of the factor (mean 1) that each structure's norm is multiplied by before ranking."""
    group_size: Count = 1
    """Structures are pruned in multiples of this."""


class _DesiredConfig(ComponentConfig):
    desired_sparsity: Fraction
    """Share of the structures."""


class RandomLevelStructureParameterPrunerConfig(_WithBlocksConfig):
    """Zero a random share, drawn at each use, of the structures, those with the smallest mean absolute values."""

    sparsity_range: tuple[Fraction, Fraction]
    """The share's least and greatest value."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.sparsity_range[0] > self.sparsity_range[1]:
            raise ValueError(f"sparsity_range must be [least, greatest], got {list(self.sparsity_range)}")
        return self


class _FiltersConfig(_StructuresConfig):
    group_type: Filters
    """Filters."""


class StructureParameterPrunerConfig(ComponentConfig):
    """Zero the structures whose greatest or mean absolute value is at most a threshold."""

    reg_regims: dict[Text, tuple[NotNegative, Thresholded]] = Field(min_length=1)
    """[threshold, structure] by parameter name or pattern."""
    threshold_criteria: Literal["Max", "Mean_Abs"]
    """The statistic of a structure that is compared with the threshold."""


class SplicingPrunerConfig(ComponentConfig):
    """Prune below a, restore above b, no change between (dynamic network surgery, Guo et al. 2016, eq. 3)."""

    sensitivities: dict[Text, NotNegative] = Field(min_length=1)
    """s by parameter name or pattern; ``*`` matches all other parameters."""
    low_thresh_mult: Positive
    """a over mean|w| + s std|w|."""
    hi_thresh_mult: Positive
    """b over the same, >= ``low_thresh_mult``."""
    sensitivity_multiplier: NotNegative = 0.0
    """Increase of s per epoch from the first active epoch on, as a multiple of s."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.hi_thresh_mult < self.low_thresh_mult:
            raise ValueError(
                f"hi_thresh_mult must be >= low_thresh_mult {self.low_thresh_mult}, got {self.hi_thresh_mult}"
            )
        return self


class BaiduRNNPrunerConfig(ComponentConfig):
    """Zero elements below a threshold that rises along two straight lines (Narang et al. 2017)."""

    q: Positive
    """The 90th percentile of |w| of a trained dense run."""
    ramp_slope_mult: Positive
    """Slope of the second line over that of the first; 1.5 to 2 in the paper."""
    weights: Names
    """Parameter names or patterns."""
    ramp_epoch_offset: Annotated[Whole, Field(ge=0)] | None = None
    """Start of the second line, in epochs from the policy's first epoch."""
    ramp_epoch: Annotated[Whole, Field(ge=0)] | None = None
    """The same as an epoch of the run, as in schedules before June 2018."""
    initial_sparsity: Fraction | None = None
    """Accepted for published schedules; not used."""
    final_sparsity: Fraction | None = None
    """Accepted for published schedules; not used."""

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
        """Return the epoch of the run in which the second line begins."""
        return starting_epoch + (self.ramp_epoch_offset or 0) if self.ramp_epoch is None else self.ramp_epoch


def _ranked(name: str, structures: type[_StructuresConfig], summary: str) -> tuple[type[ComponentConfig], ...]:
    """Return two models: pruning a given share of the structures, and ``_AGP``, a share that grows by a cubic."""
    gradual = f"{summary.rstrip('.')}; the share grows by a cubic."
    return (
        create_model(f"{name}Config", __base__=(structures, _DesiredConfig), __doc__=summary),
        create_model(f"{name}_AGPConfig", __base__=(structures, _GradualConfig), __doc__=gradual),
    )


_MODELS: tuple[type[ComponentConfig], ...] = (
    SensitivityPrunerConfig,
    MagnitudeParameterPrunerConfig,
    SparsityLevelParameterPrunerConfig,
    AutomatedGradualPrunerConfig,
    *_ranked("L1RankedStructureParameterPruner", _LpRankedConfig,
             "Zero the share of the structures with the smallest mean absolute value (Li et al. 2017)."),
    *_ranked("L2RankedStructureParameterPruner", _LpRankedConfig,
             "Zero the share of the structures with the smallest mean L2 norm."),
    RandomLevelStructureParameterPrunerConfig,
    *_ranked("ActivationAPoZRankedFilterPruner", _FiltersConfig,
             "Zero the filters whose activations are zero most often (Hu et al. 2016)."),
    *_ranked("ActivationMeanRankedFilterPruner", _FiltersConfig,
             "Zero the filters whose activations have the smallest mean (Molchanov et al. 2017)."),
    *_ranked("GradientRankedFilterPruner", _FiltersConfig,
             "Zero the filters whose removal changes the loss least, by a first-order Taylor term (Molchanov et "
             "al. 2017)."),
    *_ranked("RandomRankedFilterPruner", _FiltersConfig,
             "Zero filters at random, the exact share of them: what a ranking has to beat."),
    *_ranked("BernoulliFilterPruner", _FiltersConfig,
             "Zero each filter with this probability and scale the others up by what is kept (drop-filter)."),
    StructureParameterPrunerConfig,
    SplicingPrunerConfig,
    BaiduRNNPrunerConfig,
)  # fmt: skip

#: The pydantic model of each class's arguments, by the class's name in YAML.
PRUNERS = {model.class_: model for model in _MODELS}
