"""Arguments of every class of a schedule: one frozen, strict pydantic model per class. Does not import torch.

`CLASSES` maps a section and the classes' names in YAML to the models. The tables of docs/compression.md say what the
arguments mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

from trainables.errors import UserError, unknown_name

#: A share of elements or structures; text and booleans are not accepted.
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
#: A number >= 0.
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
#: A number > 0.
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
#: An integer.
Whole = Annotated[int, Field(strict=True)]
#: An integer >= 1.
Count = Annotated[int, Field(strict=True, ge=1)]
#: A boolean.
Flag = Annotated[bool, Field(strict=True)]
#: Text that is not empty.
Text = Annotated[str, Field(strict=True, min_length=1)]


#: Parameter names or patterns, at least one; a single one may be given without a list.
Names = Annotated[
    tuple[Text, ...],
    Field(min_length=1),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
T = TypeVar("T")
#: A value for each parameter name or pattern, at least one.
ByName = Annotated[dict[Text, T], Field(min_length=1)]
#: A number >= 0 and a kind of groups for each.
Regimes = ByName[tuple[NotNegative, T]]


class ComponentConfig(BaseModel):
    """Checked arguments of one class of a schedule; unknown arguments are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    class_: ClassVar[str] = ""
    """The class's name in a schedule; empty for arguments that are a part of others."""
    nested: ClassVar[dict[str, Any]] = {}
    """The models of arguments that are maps, and of the values of such maps."""


def own_config(reference: str) -> type[ComponentConfig]:
    """Return the settings of a user's class, ``package.module:Class``, which takes any arguments."""

    class Own(OverridesConfig, extra="allow"):  # the general numbers of bits are given as those of overrides are
        class_: ClassVar[str] = reference
        nested: ClassVar[dict[str, Any]] = {"overrides": OverridesConfig}
        weights: Names | None = None
        overrides: dict[Text, OverridesConfig] = Field(default_factory=dict)

    return Own


def _config(name: str, *bases: type[ComponentConfig], **fields: Any) -> type[ComponentConfig]:
    """Return the model of a class: its bases' arguments and more, each with type and default, ... if it needs one."""
    return create_model(f"{name}Config", __base__=bases or ComponentConfig, __module__=__name__, **fields)


# --- Arguments of the pruners. Symbols as in docs/compression.md: s sensitivity, w a weight, t a threshold ------------

Thresholded = Literal["2D", "3D", "4D", "Filters", "Channels", "Rows", "Cols"]
Criterion = Literal["Max", "Mean_Abs"]


class GradualConfig(ComponentConfig):
    """A share that grows by a cubic over the policy's active epochs (Zhu & Gupta 2017, eq. 1)."""

    initial_sparsity: Fraction
    final_sparsity: Fraction

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.final_sparsity <= self.initial_sparsity:
            raise ValueError(
                f"final_sparsity must be above initial_sparsity {self.initial_sparsity}, got {self.final_sparsity}"
            )
        return self


class BlockConfig(ComponentConfig):
    """The shape of blocks."""

    block_shape: tuple[Count, Count, Literal[1], Literal[1]]
    """Filters, channels, height, width of a block; height and width are 1."""


class _StructuresConfig(ComponentConfig):
    weights: Names
    group_dependency: Literal["Leader"] | None = None
    """``Leader``: the structures removed from the first weight are removed from all weights."""


class _WithBlocksConfig(_StructuresConfig):
    nested: ClassVar[dict[str, Any]] = {"kwargs": BlockConfig}
    group_type: Literal["3D", "Filters", "Channels", "Rows", "Blocks"]
    kwargs: BlockConfig | None = None

    @model_validator(mode="after")
    def _blocks_have_a_shape(self) -> Self:
        if (self.group_type == "Blocks") != (self.kwargs is not None):
            raise ValueError(
                "kwargs with block_shape belongs to group_type Blocks, and Blocks needs it, got group_type "
                f"{self.group_type} {'with' if self.kwargs is not None else 'without'} kwargs"
            )
        return self


class RandomLevelStructureParameterPrunerConfig(_WithBlocksConfig):
    """Zero a random share, drawn at each use, of the structures, those with the smallest mean absolute values."""

    sparsity_range: tuple[Fraction, Fraction]

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.sparsity_range[0] > self.sparsity_range[1]:
            raise ValueError(f"sparsity_range must be [least, greatest], got {list(self.sparsity_range)}")
        return self


class SplicingPrunerConfig(ComponentConfig):
    """Prune below a, restore above b, no change between (dynamic network surgery, Guo et al. 2016, eq. 3)."""

    sensitivities: ByName[NotNegative]
    low_thresh_mult: Positive
    hi_thresh_mult: Positive
    sensitivity_multiplier: NotNegative = 0.0

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
    ramp_slope_mult: Positive
    weights: Names
    ramp_epoch_offset: Annotated[Whole, Field(ge=0)] | None = None
    ramp_epoch: Annotated[Whole, Field(ge=0)] | None = None
    initial_sparsity: Fraction | None = None
    final_sparsity: Fraction | None = None
    """Both accepted for published schedules; not used."""

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


def _by_name(*models: type[ComponentConfig]) -> dict[str, type[ComponentConfig]]:
    """Return the models of classes by the classes' names, those of the models without ``Config``."""
    for model in models:
        model.class_ = model.__name__.removesuffix("Config")
    return {model.class_: model for model in models}


def _ranked(name: str, base: type[ComponentConfig], **fields: Any) -> tuple[type[ComponentConfig], ...]:
    """Return two models: pruning a given share of the structures, and ``_AGP``, a share that grows by a cubic."""
    given = _config(name, base, **fields, desired_sparsity=(Fraction, ...))
    return given, _config(f"{name}_AGP", base, GradualConfig, **fields)


_NORMS: dict[str, Any] = {"noise": (NotNegative, 0.0), "group_size": (Count, 1)}
_FILTERS: dict[str, Any] = {"group_type": (Literal["3D", "Filters"], ...)}


PRUNERS = _by_name(
    _config("SensitivityPruner", sensitivities=(ByName[NotNegative], ...)),
    _config("MagnitudeParameterPruner", thresholds=(ByName[NotNegative], ...)),
    _config("SparsityLevelParameterPruner", levels=(ByName[Fraction], ...)),
    _config("AutomatedGradualPruner", GradualConfig, weights=(Names, ...)),
    *_ranked("L1RankedStructureParameterPruner", _WithBlocksConfig, **_NORMS),
    *_ranked("L2RankedStructureParameterPruner", _WithBlocksConfig, **_NORMS),
    RandomLevelStructureParameterPrunerConfig,
    *_ranked("ActivationAPoZRankedFilterPruner", _StructuresConfig, **_FILTERS),
    *_ranked("ActivationMeanRankedFilterPruner", _StructuresConfig, **_FILTERS),
    *_ranked("GradientRankedFilterPruner", _StructuresConfig, **_FILTERS),
    *_ranked("RandomRankedFilterPruner", _StructuresConfig, **_FILTERS),
    *_ranked("BernoulliFilterPruner", _StructuresConfig, **_FILTERS),
    _config("StructureParameterPruner", reg_regims=(Regimes[Thresholded], ...), threshold_criteria=(Criterion, ...)),
    SplicingPrunerConfig,
    BaiduRNNPrunerConfig,
)


# --- Arguments of the quantizers. Numbers of bits are 1 to 32; 32 and null mean not quantized -------------------------


Bits = Annotated[int, Field(strict=True, ge=1, le=32)]
Mode = Literal["SYMMETRIC", "SYMMETRIC_RESTRICTED", "ASYMMETRIC_UNSIGNED", "ASYMMETRIC_SIGNED"]
Clip = Literal["NONE", "AVG", "N_STD"]


def _plain(value: Any) -> Any:
    """Return the part after the last dot, since published schedules also write ``LinearQuantMode.SYMMETRIC``."""
    return value.rpartition(".")[2] if isinstance(value, str) else value


class OverridesConfig(ComponentConfig):
    """Settings of some layers that differ; absent keys inherit the general settings."""

    bits_activations: Bits | None = None
    bits_weights: Bits | None = None
    bits_bias: Bits | None = None


#: The mapping of a range to numbers.
_Mode = Annotated[Mode, BeforeValidator(_plain)]
_Clip = Annotated[Clip, BeforeValidator(_plain)]


class ModesConfig(ComponentConfig):
    """A mapping each for activations and for weights (biases are weights)."""

    activations: _Mode = "SYMMETRIC"
    weights: _Mode = "SYMMETRIC"


_Modes = Annotated[
    ModesConfig,
    BeforeValidator(lambda given: {"activations": given, "weights": given} if isinstance(given, str) else given),
]


class InputConfig(ComponentConfig):
    """Settings of a layer's input that differ from those of its output."""

    from_output: Flag = False
    """As the output; the other keys then mean nothing."""
    bits_activations: Bits | None = None
    mode: _Mode | None = None
    clip_acts: _Clip | None = None
    clip_n_stds: Positive | None = None


class PostTrainOverridesConfig(OverridesConfig):
    """Settings of some layers in post-training quantization."""

    clip_acts: _Clip | None = None
    clip_n_stds: Positive | None = None
    quantize_inputs: Flag = True
    input_overrides: dict[Literal["0"], InputConfig] = Field(default_factory=dict)
    """By the number of the input; layers have the input 0 alone."""


class _QuantizerConfig(ComponentConfig):
    nested: ClassVar[dict[str, Any]] = {"overrides": OverridesConfig, "mode": ModesConfig}
    bits_activations: Bits | None = 32
    bits_weights: Bits | None = 32
    bits_bias: Bits | None = None
    overrides: dict[Text, OverridesConfig] = Field(default_factory=dict)
    """By module name or pattern; the first pattern that matches a module counts. A key that is absent inherits."""


class PACTQuantizerConfig(_QuantizerConfig):
    """DoReFa weights, activations clipped at a learned value (Choi et al. 2018, eqs. 1 to 3)."""

    act_clip_init_val: Positive = 8.0
    act_clip_decay: NotNegative | None = None
    """Weight decay of the clipping values; None: the optimizer's."""


class NCFQuantAwareTrainQuantizerConfig(_QuantizerConfig):
    """The next one for networks such as NeuMF: outputs of linear layers, concatenations and products, no inputs."""

    bits_bias: Bits | None = 32
    mode: _Modes = Field("SYMMETRIC", validate_default=True)
    ema_decay: Fraction = 0.999
    per_channel_wts: Flag = False


class QuantAwareTrainRangeLinearQuantizerConfig(NCFQuantAwareTrainQuantizerConfig):
    """Linear quantization-aware training with moving-average ranges (Jacob et al. 2018, section 3)."""

    quantize_inputs: Flag = True
    num_bits_inputs: Bits | None = None


class PostTrainLinearQuantizerConfig(ComponentConfig):
    """Linear quantization of a trained model, with activation ranges from the batches of one epoch."""

    nested: ClassVar[dict[str, Any]] = {"overrides": PostTrainOverridesConfig, "mode": ModesConfig}
    bits_activations: Bits | None = 8
    bits_parameters: Bits | None = 8
    bits_accum: Bits = 32
    overrides: dict[Text, PostTrainOverridesConfig] = Field(default_factory=dict)
    mode: _Modes = Field("SYMMETRIC", validate_default=True)
    clip_acts: _Clip = "NONE"
    clip_n_stds: Positive | None = None
    per_channel_wts: Flag = False
    model_activation_stats: Text | None = None
    """A file of `QuantCalibrationStatsCollector` with the ranges, in place of an epoch that sees them."""
    inputs_quant_auto_fallback: Flag = True
    """Accepted for published schedules: an input is always quantized by its own range."""

    @model_validator(mode="after")
    def _deviations_are_for_their_clip(self) -> Self:
        if (self.clip_acts == "N_STD") != (self.clip_n_stds is not None):
            raise ValueError(
                f"clip_n_stds belongs to clip_acts N_STD, and N_STD needs it, got clip_acts {self.clip_acts} "
                f"{'without' if self.clip_n_stds is None else 'with'} clip_n_stds"
            )
        for name, own in self.overrides.items():
            lacks = [one for one in own.input_overrides.values() if one.clip_acts == "N_STD" and not one.clip_n_stds]
            if not (own.clip_n_stds or self.clip_n_stds) and (lacks or own.clip_acts == "N_STD"):
                raise ValueError(f"clip_acts N_STD of {name} needs clip_n_stds, there or for all")
        return self


QUANTIZERS = _by_name(
    _config("DorefaQuantizer", _QuantizerConfig),
    _config("WRPNQuantizer", _QuantizerConfig),
    PACTQuantizerConfig,
    QuantAwareTrainRangeLinearQuantizerConfig,
    NCFQuantAwareTrainQuantizerConfig,
    PostTrainLinearQuantizerConfig,
)


# --- Arguments of the regularizers. Symbols: lambda strength ----------------------------------------------------------


LassoGroup = Literal["2D", "3D", "Filters", "4D", "Channels", "Rows", "Cols", "Rows+Cols", "Cols+Rows", "Channels+4D",
                     "4D+Channels"]  # fmt: skip
VarianceGroup = Literal["3D", "Filters", "Channels", "Rows", "Cols"]
_IF_ANY = (Criterion | None, None)

#: lambda sum|w|; lambda times the sum of the groups' L2 norms (Yuan & Lin 2006); lambda over the variance of the
#: groups' norms, which increases the variance.
REGULARIZERS = _by_name(
    _config("L1Regularizer", reg_regims=(ByName[NotNegative], ...), threshold_criteria=_IF_ANY),
    _config("GroupLassoRegularizer", reg_regims=(Regimes[LassoGroup], ...), threshold_criteria=_IF_ANY),
    _config("GroupVarianceRegularizer", reg_regims=(Regimes[VarianceGroup], ...)),
)
REGULARIZERS["GroupLASSORegularizer"] = REGULARIZERS["GroupLassoRegularizer"]


_List = Annotated[list[T], Field(min_length=1)]
_Index = Annotated[Whole, Field(ge=0)]
_Momentum = Annotated[Fraction, Field(lt=1)]

#: Names, rule and type, the same for all classes. Arguments that torch adds later are checked by torch only.
_KINDS: tuple[tuple[str, str, Any], ...] = (
    ("step_size total_iters T_max T_0 T_mult step_size_up step_size_down", "a whole number >= 1", Count),
    ("total_steps epochs steps_per_epoch", "a whole number >= 1", Count),
    ("patience cooldown", "a whole number >= 0", _Index),
    ("gamma factor start_factor end_factor power eta_min threshold eps", "a number >= 0", NotNegative),
    ("div_factor final_div_factor", "a number > 0", Positive),
    ("min_lr max_lr base_lr", "a number >= 0, or a list of them", NotNegative | _List[NotNegative]),
    ("base_momentum max_momentum", "a number in [0, 1), or a list of them", _Momentum | _List[_Momentum]),
    ("cycle_momentum three_phase", "true or false", Flag),
    ("mode threshold_mode scale_mode anneal_strategy", "text", Annotated[str, Field(strict=True)]),
    ("milestones", "a list of numbers, each a whole number >= 0", _List[_Index]),
    ("gammas", "a list of numbers, each a number >= 0", _List[NotNegative]),
    ("pct_start", "a number in [0, 1]", Fraction),
    ("scale_fn", "left out, for it is a function", None),
)
_RULES = {name: (rule, TypeAdapter[Any](kind)) for names, rule, kind in _KINDS for name in names.split()}


def check_arguments(class_name: str, arguments: Mapping[str, Any], make: Callable[..., Any]) -> None:
    """Check that the class of this name can be called with these arguments.

    UserError: an argument is unknown, missing, of another type or out of its range; the message has the signature.
    """
    filled_in = ("self", "optimizer", "last_epoch")
    taken = {name: p for name, p in inspect.signature(make).parameters.items() if name not in filled_in}
    how = f"{class_name}({', '.join(str(p.replace(annotation=p.empty)) for p in taken.values())})"
    for name, value in arguments.items():
        if name not in taken:
            raise UserError(f"{unknown_name(f'argument of {class_name}', str(name), taken)} in {how}")
        if name not in _RULES or (value is None and taken[name].default is None):
            continue
        rule, accepted = _RULES[name]
        try:
            accepted.validate_python(value)
        except ValidationError:
            raise UserError(f"{name} of {class_name} must be {rule}, got {value!r}: {how}") from None
    for name, parameter in taken.items():
        if name not in arguments and parameter.default is parameter.empty:
            raise UserError(f"{class_name} needs {name}: {how}")


class _RemoverConfig(ComponentConfig):
    thinning_func_str: Literal["remove_filters", "remove_channels", "remove_structures"] | None = None
    arch: Text | None = None
    dataset: Text | None = None
    """All three accepted for published schedules and ignored: the class determines the first, the trained model is
    thinned, a training batch is used."""
    round_to: Count = 1


#: The extensions differ in what they remove: zero filters and the weights that read them, zero input channels and the
#: filters that produced them, or both.
EXTENSIONS = _by_name(*(_config(f"{what}Remover", _RemoverConfig) for what in ("Filter", "Channel", "Structure")))


class KnowledgeDistillationConfig(ComponentConfig):
    """w_s CE(student, labels) + w_d T^2 KL(teacher || student) + w_t CE(teacher, labels) (Hinton et al. 2015)."""

    teacher: Text | None = None
    """Model of the registry (``resnet20``), or ``package.module:function`` that returns a model; None: the student's
    architecture."""
    pretrained: Flag = False
    checkpoint: Text | None = None
    temperature: Positive = 1.0
    distill_weight: NotNegative = 0.5
    student_weight: NotNegative = 0.5
    teacher_weight: NotNegative = 0.0

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Self:
        if self.teacher is None and self.checkpoint is None:
            raise ValueError("distillation needs a teacher: name one, or give the checkpoint of the same architecture")
        return self


DISTILLERS = _by_name(KnowledgeDistillationConfig)

#: Classes of each section; those of ``lr_schedulers`` are torch's and are checked by ``check_lr``.
CLASSES: Mapping[str, Mapping[str, type[ComponentConfig]]] = {
    "pruners": PRUNERS,
    "regularizers": REGULARIZERS,
    "quantizers": QUANTIZERS,
    "extensions": EXTENSIONS,
    "distillers": DISTILLERS,
}
globals().update({row.__name__: row for rows in CLASSES.values() for row in rows.values()})  # to be pickled by name
