"""Arguments of the quantizers. Numbers of bits are 1 to 32; 32 and null mean not quantized."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from trainables.compression.schedule.config_base import ComponentConfig, Flag, Fraction, Positive, Text

Bits = Annotated[int, Field(strict=True, ge=1, le=32)]
Mode = Literal["SYMMETRIC", "SYMMETRIC_RESTRICTED", "ASYMMETRIC_UNSIGNED", "ASYMMETRIC_SIGNED"]
Clip = Literal["NONE", "AVG", "N_STD"]


def _plain(value: Any) -> Any:
    """Return the part after the last dot, since published schedules also write ``LinearQuantMode.SYMMETRIC``."""
    return value.rpartition(".")[2] if isinstance(value, str) else value


class OverridesConfig(ComponentConfig):
    """Settings of some layers that differ; absent keys inherit the general settings."""

    class_: ClassVar[str] = ""
    bits_activations: Bits | None = None
    """Bits of activations; null: not quantized."""
    bits_weights: Bits | None = None
    """Bits of weights; null: not quantized."""
    bits_bias: Bits | None = None
    """Bits of biases; null: not quantized."""


class _QuantizerConfig(ComponentConfig):
    bits_activations: Bits | None = 32
    """Bits of activations."""
    bits_weights: Bits | None = 32
    """Bits of weights of convolutions, linear layers and embeddings."""
    bits_bias: Bits | None = None
    """Bits of their biases."""
    overrides: dict[Text, OverridesConfig] = Field(default_factory=dict)
    """By module name or pattern; the first pattern that matches a module counts. A key that is absent inherits."""


class DorefaQuantizerConfig(_QuantizerConfig):
    """DoReFa-Net (Zhou et al. 2016, eqs. 7 to 9)."""


class WRPNQuantizerConfig(_QuantizerConfig):
    """Wide reduced-precision networks (Mishra et al. 2017): weights clamped to [-1, 1]."""


class PACTQuantizerConfig(_QuantizerConfig):
    """DoReFa weights, activations clipped at a learned value (Choi et al. 2018, eqs. 1 to 3)."""

    act_clip_init_val: Positive = 8.0
    """Initial value of the learned clip."""


class QuantAwareTrainRangeLinearQuantizerConfig(_QuantizerConfig):
    """Linear quantization-aware training with moving-average ranges (Jacob et al. 2018, section 3)."""

    bits_bias: Bits | None = 32
    """Bits of biases."""
    mode: Annotated[Mode, BeforeValidator(_plain)] = "SYMMETRIC"
    """The mapping of a range to numbers."""
    ema_decay: Fraction = 0.999
    """Weight of the old range at each step."""
    per_channel_wts: Flag = False
    """True if each filter has its own range instead of one range per weight."""
    quantize_inputs: Flag = True
    """True if the model's input is quantized to a moving range, too."""
    num_bits_inputs: Bits | None = None
    """Bits of the model's input; as many as of activations if not given."""


class PostTrainLinearQuantizerConfig(ComponentConfig):
    """Linear quantization of a trained model, with activation ranges from the batches of one epoch."""

    bits_activations: Bits | None = 8
    """Bits of activations."""
    bits_parameters: Bits | None = 8
    """Bits of weights of convolutions, linear layers and embeddings."""
    bits_accum: Bits = 32
    """Bits of a layer's sum, to which its bias is quantized."""
    overrides: dict[Text, OverridesConfig] = Field(default_factory=dict)
    """By module name or pattern; the first pattern that matches a module counts. A key that is absent inherits."""
    mode: Annotated[Mode, BeforeValidator(_plain)] = "SYMMETRIC"
    """The mapping of a range to numbers."""
    clip_acts: Annotated[Clip, BeforeValidator(_plain)] = "NONE"
    """Range of activations: all values, the mean of the batches' ranges, or mean -+ standard deviations."""
    clip_n_stds: Positive | None = None
    """Number of standard deviations for ``clip_acts: N_STD``."""
    per_channel_wts: Flag = False
    """True if each filter has its own range instead of one range per weight."""

    @model_validator(mode="after")
    def _deviations_are_for_their_clip(self) -> Self:
        if (self.clip_acts == "N_STD") != (self.clip_n_stds is not None):
            raise ValueError(
                f"clip_n_stds belongs to clip_acts N_STD, and N_STD needs it, got clip_acts {self.clip_acts} "
                f"{'without' if self.clip_n_stds is None else 'with'} clip_n_stds"
            )
        return self


QUANTIZERS: dict[str, type[ComponentConfig]] = {
    model.class_: model
    for model in (
        DorefaQuantizerConfig, WRPNQuantizerConfig, PACTQuantizerConfig,
        QuantAwareTrainRangeLinearQuantizerConfig, PostTrainLinearQuantizerConfig,
    )
}  # fmt: skip
