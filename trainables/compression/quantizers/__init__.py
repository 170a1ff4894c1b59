"""Quantizers: the model computes with few bits while the optimizer trains its float weights.

Parameters stay the same objects; the layers compute with quantized values (`torch.nn.utils.parametrize` on the
instance), and an activation's child module ``quantized_output`` quantizes its output. A quantizer's complete state is
in the model's state dict. 32 bits and null leave all values unchanged, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from torch import nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from trainables.compression import measures
from trainables.compression.quantizers.quantized_modules import (
    INPUT,
    OUTPUT,
    CalibratedRange,
    Frozen,
    FrozenBias,
    FrozenWeight,
    LearnedClipActivation,
    LinearWeight,
    MovingRange,
    Quantization,
    dorefa_weight,
    is_quantized,
    quantize_input,
    quantize_output,
    unit_activation,
    wrpn_weight,
)
from trainables.compression.schedule.configs import (
    ComponentConfig,
    InputConfig,
    OverridesConfig,
    PostTrainOverridesConfig,
)
from trainables.compression.schedule.matching import match_modules
from trainables.errors import UserError, unknown_name
from trainables.workloads.user_code import class_named

__all__ = ["Quantizer", "build_quantizer", "is_quantized"]

#: Numbers of bits of a module, 1 to 31, of its ``weights``, ``bias`` and ``activations``; None: not quantized.
Bits = dict[str, int | None]

#: Layers whose weights and biases are quantized, subclasses included.
WEIGHT_LAYERS = (*measures.WEIGHT_LAYERS, nn.Embedding)
#: Activations that clip values below 0.
RECTIFIERS = (nn.ReLU, nn.ReLU6)
#: Activations whose output a linear quantizer quantizes.
ACTIVATIONS = (
    *RECTIFIERS, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh,
)  # fmt: skip


def usable(bits: int | None) -> int | None:
    """Return a schedule's number of bits, where 32 also means not quantized."""
    return None if bits is None or bits >= 32 else bits


def plan_bits(model: nn.Module, default: Bits, overrides: Mapping[str, OverridesConfig]) -> dict[nn.Module, Bits]:
    """Return the bits of each module in the model's order; a module with several names occurs once.

    The first pattern that matches a module applies; keys it does not set inherit the default. UserError if a pattern
    matches no module, or a module has several names with different bits.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, Bits] = {}
    for pattern, override in overrides.items():
        matches = match_modules(pattern, [name for name in modules if name])
        if not any(isinstance(modules[name], (*WEIGHT_LAYERS, *ACTIVATIONS)) for name in matches):
            hint = f"; {matches[0]}.* means what is in it" if any(modules[matches[0]].children()) else ""
            warnings.warn(
                f"overrides of {pattern!r} have no effect: {', '.join(matches)} has neither a weight nor an activation "
                f"of its own that is quantized{hint}",
                stacklevel=4,
            )
        own = {what: usable(getattr(override, f"bits_{what}"))
               for what in default if f"bits_{what}" in override.model_fields_set}  # fmt: skip
        for name in matches:
            chosen.setdefault(name, {**default, **own})
    plan: dict[nn.Module, tuple[str, Bits]] = {}
    for name, module in modules.items():
        bits = chosen.get(name, default)
        first, before = plan.setdefault(module, (name, bits))
        if before != bits:
            raise UserError(
                f"{first} and {name} are one module and must have the same bits, got different overrides: name both "
                "in one pattern"
            )
    return {module: bits for module, (_, bits) in plan.items()}


class Quantizer:
    """Quantize weights and biases with `dorefa_weight`, outputs of rectifiers with `unit_activation` (DoReFa-Net).

    The other quantizers are its subclasses. ``name`` is that of the instance in the schedule, ``given`` its settings.
    """

    activation_kinds: ClassVar[tuple[type[nn.Module], ...]] = RECTIFIERS  # modules whose output is quantized

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.given = given
        weights, bias = (
            (given.bits_weights, given.bits_bias)
            if hasattr(given, "bits_weights")
            else (given.bits_parameters, given.bits_accum)
        )
        self.default: Bits = {
            "weights": usable(weights), "bias": usable(bias), "activations": usable(given.bits_activations)
        }  # fmt: skip

    def least_bits(self, what: str) -> int:
        """Return the fewest bits allowed for ``weights``, ``bias`` or ``activations``: 2 if one is a sign bit."""
        return 1

    def quantizes_output(self, module: nn.Module) -> bool:
        """Return whether a module's output may be quantized."""
        return isinstance(module, self.activation_kinds)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        """Build the module that quantizes the layer's weight."""
        return Quantization(bits, dorefa_weight)

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        """Build the module that quantizes the layer's bias."""
        return self.weight_quantization(layer, bits)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        """Build a module that quantizes activations; ``options`` are device and dtype of its parameters and buffers."""
        return Quantization(bits, unit_activation)

    def plan(self, model: nn.Module) -> dict[nn.Module, dict[str, int]]:
        """Return the bits of what each module has and the quantizer quantizes.

        UserError: overrides do not fit the model, bits are too few, or a hook computes a weight.
        """
        names = {module: name for name, module in model.named_modules()}
        plan = {}
        for module, bits in plan_bits(model, self.default, self.given.overrides).items():
            has = {
                "weights": isinstance(module, WEIGHT_LAYERS),
                "bias": isinstance(module, WEIGHT_LAYERS) and getattr(module, "bias", None) is not None,
                "activations": self.quantizes_output(module),
            }
            plan[module] = {what: number for what, number in bits.items() if has[what] and number is not None}
            for what, number in plan[module].items():
                self._check(names[module] or "the model", module, what, number)
        return plan

    def _check(self, name: str, module: nn.Module, what: str, bits: int) -> None:
        if bits < self.least_bits(what):
            raise UserError(
                f"bits of {what} of quantizer {self.name} must be at least {self.least_bits(what)} "
                f"(one is the sign's), got {bits} for {name}"
            )
        parameter = {"weights": "weight", "bias": "bias"}.get(what)
        if parameter and not (parameter in module._parameters or parametrize.is_parametrized(module, parameter)):
            raise UserError(
                f"{parameter} of {name} must be a parameter to be quantized, got one that a hook computes: use "
                "torch.nn.utils.parametrizations instead of torch.nn.utils.weight_norm or spectral_norm"
            )

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Change the model's modules in place, and add learned parameters to the optimizer's last group.

        Parameters stay the same objects, but their names and their order in the model change: an optimizer whose state
        is to be loaded must have been built before `prepare`, like the one that was saved. UserError: the model is
        quantized already, or as `plan`. The model is then unchanged.
        """
        if is_quantized(model):
            raise UserError(f"a model must be quantized once, got a quantized one for quantizer {self.name}")
        plan = self.plan(model)
        known = {id(p) for p in model.parameters()}
        like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        options: dict[str, Any] = {"device": like.device, "dtype": torch.promote_types(like.dtype, torch.float32)}
        for module, bits in plan.items():
            self.change(module, bits, options)
        self.change_inputs(model, options)
        self._warn_of_nothing(model, plan)
        learned = [(name, p) for name, p in model.named_parameters() if id(p) not in known]
        if optimizer is not None and learned:
            # Added, so that Gradient-Skip's optimizers see them; not as a group of their own, because learning-rate
            # schedules refer to groups by index.
            last = optimizer.param_groups[-1]
            named = "param_names" in last
            options = {name: value for name, value in last.items() if name not in ("params", "param_names")}
            optimizer.add_param_group({**options, "params": learned if named else [p for _, p in learned]})
            added = optimizer.param_groups.pop()
            for key in ("params", "param_names") if named else ("params",):
                last[key].extend(added[key])

    def change_inputs(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Quantize the model's input, if the quantizer does that."""

    def change(self, module: nn.Module, bits: Mapping[str, int], options: Mapping[str, Any]) -> None:
        """Quantize a module's weight, bias and output, where given bits."""
        # Shape and dtype do not change, so torch's check with a forward pass is not needed.
        makers = {"weights": ("weight", self.weight_quantization), "bias": ("bias", self.bias_quantization)}
        for what, (parameter, make) in makers.items():
            if what in bits:
                parametrize.register_parametrization(module, parameter, make(module, bits[what]), unsafe=True)
        if "activations" in bits:
            quantize_output(module, self.activation_quantization(bits["activations"], options))

    def _warn_of_nothing(self, model: nn.Module, plan: Mapping[nn.Module, object]) -> None:
        if self.default["activations"] and not any(map(self.quantizes_output, plan)):
            kinds = ", ".join(kind.__name__ for kind in self.activation_kinds)
            warnings.warn(
                f"quantizer {self.name} quantizes no activations, for no module is one of {kinds}; functions such as "
                "F.relu cannot be seen: use modules in their place",
                stacklevel=3,
            )
        elif not is_quantized(model):
            warnings.warn(
                f"quantizer {self.name} quantizes nothing: every number of bits is 32 or null, or for what the model "
                "does not have",
                stacklevel=3,
            )

    def finish_epoch(self, model: nn.Module) -> None:
        """Handle the end of the last step of an active epoch."""


class _Wrpn(Quantizer):
    def least_bits(self, what: str) -> int:
        return 1 if what == "activations" else 2

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return Quantization(bits, wrpn_weight)


class _Pact(Quantizer):
    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().prepare(model, optimizer)
        clips = [m.alpha for m in model.modules() if isinstance(m, LearnedClipActivation)]
        if self.given.act_clip_decay is not None and optimizer is not None and clips:
            optimizer.register_step_pre_hook(lambda stepped, *_: self._decay(stepped, clips))

    @torch.no_grad()
    def _decay(self, optimizer: Optimizer, clips: list[nn.Parameter]) -> None:
        """Make a step's weight decay of the clips their own; a group of their own would move others' numbers."""
        own = {id(clip) for clip in clips}
        for group in optimizer.param_groups:
            decay, wanted = group.get("weight_decay", 0), self.given.act_clip_decay
            is_decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
            for clip in group["params"]:
                if id(clip) in own and clip.grad is not None:
                    if is_decoupled:
                        clip.mul_((1 - group["lr"] * wanted) / (1 - group["lr"] * decay))
                    else:
                        clip.grad.add_(clip, alpha=wanted - decay)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return LearnedClipActivation(bits, self.given.act_clip_init_val, options)


class _LinearTraining(Quantizer):
    """Quantize weights and biases to their own range, activations and the model's input to a moving average range.

    Biases and embeddings have one range, even if ``per_channel_wts`` gives each filter its own.
    """

    activation_kinds: ClassVar[tuple[type[nn.Module], ...]] = ACTIVATIONS

    def change_inputs(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        given = self.given
        if not getattr(given, "quantize_inputs", False):  # post-training quantization sees inputs of layers instead
            return
        bits = usable(given.bits_activations if given.num_bits_inputs is None else given.num_bits_inputs)
        if bits is not None:
            quantize_input(model, self.activation_quantization(bits, options))

    def _mode(self, what: str) -> str:
        modes = self.given.mode
        return str(modes.activations if what == "activations" else modes.weights)

    def least_bits(self, what: str) -> int:
        return 2 if self._mode(what).startswith("SYMMETRIC") else 1  # one bit would have no positive level

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return LinearWeight(bits, self.given.mode.weights, self.channel_axis(layer))

    def channel_axis(self, layer: nn.Module) -> int | None:
        """Return the axis of the layer's weight whose slices each get a grid; None: one grid for all."""
        if not self.given.per_channel_wts or isinstance(layer, nn.Embedding):  # its rows are outputs, not filters
            return None
        return 1 if isinstance(layer, measures.TRANSPOSED) else 0

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return LinearWeight(bits, self.given.mode.weights, None)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return MovingRange(bits, self.given.mode.activations, self.given.ema_decay, options)


class _NCFTraining(_LinearTraining):
    """Quantize outputs of linear layers and of the user's modules `Concat` and `EltwiseMult`, too, and no input."""

    activation_kinds = (*ACTIVATIONS, nn.Linear)

    def quantizes_output(self, module: nn.Module) -> bool:
        return super().quantizes_output(module) or type(module).__name__ in ("Concat", "EltwiseMult")


class _PostTraining(_LinearTraining):
    """Quantize inputs, weights, biases and outputs of layers, and outputs of activation modules, of a trained model.

    The ranges are collected during one epoch: until `finish_epoch` the model computes as before, and every forward pass
    in training mode updates them; after it they are fixed. Of an embedding only the weight is quantized, since its
    output consists of weight rows.

    A layer's bias becomes signed integers of ``bits_accum`` bits times s_x s_w, the step of the sum it is added to; it
    is not quantized if input or weight are not.
    """

    activation_kinds = tuple(kind for kind in (*WEIGHT_LAYERS, *ACTIVATIONS) if kind is not nn.Embedding)

    def least_bits(self, what: str) -> int:
        return 2 if what == "bias" else super().least_bits(what)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        weight: Any = layer.weight
        return FrozenWeight(bits, self.given.mode.weights, self.channel_axis(layer), weight)

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        bias: Any = layer.bias
        return FrozenBias(bits, bias, per_channel=self.given.per_channel_wts)

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        given = self.given
        modules = dict(model.named_modules())
        self._own: dict[nn.Module, PostTrainOverridesConfig] = {}  # the first override that matches each module
        for pattern, override in given.overrides.items():
            for name in match_modules(pattern, [name for name in modules if name]):
                self._own.setdefault(modules[name], override)
        stats = None if given.model_activation_stats is None else read_stats(given.model_activation_stats)
        if stats is not None and not set(stats) & set(modules):
            raise unknown_name(
                f"layer in {given.model_activation_stats}", min(stats, default=""), [name for name in modules if name]
            )
        super().prepare(model, optimizer)
        if stats is None:
            return
        for name in [name for name in modules if name in stats]:
            for place, found in ((INPUT, stats[name].inputs.get(0)), (OUTPUT, stats[name].output)):
                seen = modules[name]._modules.get(place)
                if found is not None and isinstance(seen, CalibratedRange):
                    try:
                        seen.take(found.model_dump(exclude_none=True))
                    except KeyError as error:
                        raise UserError(f"{given.model_activation_stats} lacks {error.args[0]} of {name}") from None
        self.finish_epoch(model)

    def plan(self, model: nn.Module) -> dict[nn.Module, dict[str, int]]:
        plan = super().plan(model)
        for name, override in self.given.overrides.items():
            for other in override.input_overrides.values():
                bits = usable(other.bits_activations)
                least = 2 if str(other.mode or self._mode("activations")).startswith("SYMMETRIC") else 1
                if bits is not None and bits < least:
                    raise UserError(f"bits_activations of the input of {name} must be at least {least}, got {bits}")
        return plan

    def change(self, module: nn.Module, bits: Mapping[str, int], options: Mapping[str, Any]) -> None:
        super().change(module, {what: number for what, number in bits.items() if what != "activations"}, options)
        given, own = self.given, self._own.get(module, PostTrainOverridesConfig())
        mode, clip = given.mode.activations, own.clip_acts or given.clip_acts
        deviations = (own.clip_n_stds or given.clip_n_stds) if clip == "N_STD" else None
        if "activations" in bits:
            quantize_output(module, CalibratedRange(bits["activations"], mode, clip, deviations, options))
        other = own.input_overrides.get("0", InputConfig(from_output=True))
        number = bits.get("activations")
        if not other.from_output:
            if "bits_activations" in other.model_fields_set:
                number = usable(other.bits_activations)
            mode, clip = other.mode or mode, other.clip_acts or clip
            deviations = (other.clip_n_stds or own.clip_n_stds or given.clip_n_stds) if clip == "N_STD" else None
        if isinstance(module, WEIGHT_LAYERS) and own.quantize_inputs and number is not None:
            quantize_input(module, CalibratedRange(number, mode, clip, deviations, options))

    def finish_epoch(self, model: nn.Module) -> None:
        """Freeze all ranges for good; later calls do nothing.

        Activations that no batch reached are not quantized, with a warning; UserError if no batch reached any.
        """
        if any(module.frozen for module in model.modules() if isinstance(module, Frozen)):
            return
        ranges = {name: module for name, module in model.named_modules() if isinstance(module, CalibratedRange)}
        unseen = [name for name, module in ranges.items() if int(module.batches) == 0]
        if unseen and len(unseen) == len(ranges):
            raise UserError(
                f"quantizer {self.name} needs at least one forward pass in training mode in its first active epoch to "
                "see the activations' ranges, got none"
            )
        if unseen:
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in unseen))
            why = "no batch went through it" if self.given.model_activation_stats is None else "the statistics lack it"
            warnings.warn(f"not quantized, for {why}: activations of {layers}", stacklevel=2)
        for name, seen in ranges.items():
            if name not in unseen:
                seen.freeze()
        for module in model.modules():
            if isinstance(module, WEIGHT_LAYERS):
                _freeze_parameters(module)


def _freeze_parameters(layer: nn.Module) -> None:
    lists: Any = getattr(layer, "parametrizations", {})
    weight, bias = (lists[name][-1] if name in lists else None for name in ("weight", "bias"))
    if not isinstance(weight, FrozenWeight):
        return
    # Not frozen yet, it returns its input unchanged, so this is the weight without quantization.
    current: Any = layer.weight
    weight.freeze_at(current)
    seen = layer._modules.get(INPUT)
    if isinstance(bias, FrozenBias) and isinstance(seen, CalibratedRange) and seen.frozen:
        bias.freeze_at(1 / seen.grid().scale, 1 / weight.grid().scale)


class _Range(BaseModel):
    """Hold the range of an activation as Distiller writes it; its other keys are left out."""

    min: float
    max: float
    avg_min: float | None = None
    avg_max: float | None = None
    mean: float | None = None
    std: float | None = None


class _LayerStats(BaseModel):
    inputs: dict[int, _Range] = Field(default_factory=dict)
    output: _Range


def read_stats(file: str) -> dict[str, _LayerStats]:
    """Read a file of activation statistics: by layer, ``inputs`` by number and ``output``, each with min, max, ....

    UserError: there is none, or it is something else.
    """
    try:
        return TypeAdapter(dict[str, _LayerStats]).validate_python(yaml.safe_load(Path(file).read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"model_activation_stats {file}: {where}: {first['msg']}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"model_activation_stats {file} cannot be read: {str(error).splitlines()[0]}") from error


_QUANTIZERS: dict[str, type[Quantizer]] = {
    "DorefaQuantizer": Quantizer,
    "WRPNQuantizer": _Wrpn,
    "PACTQuantizer": _Pact,
    "QuantAwareTrainRangeLinearQuantizer": _LinearTraining,
    "NCFQuantAwareTrainQuantizer": _NCFTraining,
    "PostTrainLinearQuantizer": _PostTraining,
}


def build_quantizer(name: str, settings: ComponentConfig, model: nn.Module | None = None) -> Quantizer:
    """Build the quantizer that a schedule describes; it changes no model before `Quantizer.prepare` is called.

    ``name`` is that of the instance in the schedule, for messages. Overrides and bits are checked against the model as
    built, if it is given.
    """
    quantizer: Quantizer = class_named(settings.class_, _QUANTIZERS, "quantizer", Quantizer)(name, settings)
    if model is not None:
        quantizer.plan(model)
    return quantizer
