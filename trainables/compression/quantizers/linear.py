"""Linear quantization, in training (Jacob et al. 2018, section 3) or of a trained model.

Symbols: s_x, s_w steps of a layer's input and weight.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from trainables.compression.component import Quantizer
from trainables.compression.quantizers.functions import (
    Grid,
    Mode,
    dorefa_weight,
    least_linear_bits,
    linear_grid,
    on_grid,
    pact_activation,
    unit_activation,
    value_range,
    wide,
    wrpn_weight,
)
from trainables.compression.quantizers.quantized_module import (
    INPUT,
    Frozen,
    Quantization,
    can_be_quantized,
    is_quantized,
    model_options,
    quantize_input,
    quantize_output,
    quantize_parameter,
)
from trainables.compression.schedule import configs as settings
from trainables.compression.schedule.configs import OverridesConfig
from trainables.compression.schedule.matching import match_modules
from trainables.errors import UserError

# --- Base of all quantizers: plans and checks the bits, then changes the model ----------------------------------------


class ModelQuantizer(Quantizer):
    """A quantizer whose complete state is in the model's state dict.

    Args:
        name: of the instance in the schedule, for messages.
        default: bits if no override matches.
        overrides: by module name or pattern.
    """

    activation_kinds: ClassVar[tuple[type[nn.Module], ...]]
    """Modules whose output is quantized."""

    def __init__(self, name: str, default: Bits, overrides: Mapping[str, OverridesConfig]) -> None:
        self.name = name
        self.default = default
        self.overrides = dict(overrides)

    def least_bits(self, what: str) -> int:
        """Return the fewest bits allowed for ``weights``, ``bias`` or ``activations``: 2 if one is a sign bit."""
        return 1

    @abstractmethod
    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        """Build the module that quantizes the layer's weight."""

    @abstractmethod
    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        """Build the module that quantizes the layer's bias."""

    @abstractmethod
    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        """Build a module that quantizes activations; ``options`` are device and dtype of its parameters and buffers."""

    def plan(self, model: nn.Module) -> dict[nn.Module, Bits]:
        """Return the bits by module, after checking them.

        Raises:
            UserError: overrides do not fit the model, or bits are too few.
        """
        plan = plan_bits(model, self.default, self.overrides)
        names = {module: name for name, module in model.named_modules()}
        for module, bits in plan.items():
            for what, number in self._used(module, bits).items():
                if number is not None:
                    self._check(names[module] or "the model", module, what, number)
        return plan

    def _check(self, name: str, module: nn.Module, what: str, bits: int) -> None:
        if bits < self.least_bits(what):
            raise UserError(
                f"bits of {what} of quantizer {self.name} must be at least {self.least_bits(what)} "
                f"(one is the sign's), got {bits} for {name}"
            )
        parameter = {"weights": "weight", "bias": "bias"}.get(what)
        if parameter is not None and not can_be_quantized(module, parameter):
            raise UserError(
                f"{parameter} of {name} must be a parameter to be quantized, got one that a hook computes: use "
                "torch.nn.utils.parametrizations instead of torch.nn.utils.weight_norm or spectral_norm"
            )

    def _used(self, module: nn.Module, bits: Bits) -> dict[str, int | None]:
        """Return the bits that apply to the module: weights, bias and activations that it has."""
        used: dict[str, int | None] = {}
        if isinstance(module, WEIGHT_LAYERS):
            used["weights"] = bits.weights
            if getattr(module, "bias", None) is not None:
                used["bias"] = bits.bias
        if isinstance(module, self.activation_kinds):
            used["activations"] = bits.activations
        return used

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Change the model's modules in place and add learned parameters to the optimizer, if given.

        Parameters stay the same objects, but their names and their order in the model change: an optimizer whose state
        is to be loaded must have been built before `prepare`, like the one that was saved.

        Raises:
            UserError: the model is quantized already; overrides or bits do not fit it; a hook computes a weight. The
                model is then unchanged.
        """
        if is_quantized(model):
            raise UserError(f"a model must be quantized once, got a quantized one for quantizer {self.name}")
        plan = self.plan(model)
        known = {id(p) for p in model.parameters()}
        options = model_options(model)
        for module, bits in plan.items():
            self.change(module, bits, options)
        self.change_inputs(model, options)
        self._warn_of_nothing(model, plan)
        learned = [(name, p) for name, p in model.named_parameters() if id(p) not in known]
        if optimizer is not None and learned:
            join_optimizer(optimizer, learned)

    def change_inputs(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Quantize the model's input, if the quantizer does that."""

    def change(self, module: nn.Module, bits: Bits, options: Mapping[str, Any]) -> None:
        """Quantize a module's weight, bias and output, where present and given bits."""
        used = self._used(module, bits)
        if (number := used.get("weights")) is not None:
            quantize_parameter(module, "weight", self.weight_quantization(module, number))
        if (number := used.get("bias")) is not None:
            quantize_parameter(module, "bias", self.bias_quantization(module, number))
        if (number := used.get("activations")) is not None:
            quantize_output(module, self.activation_quantization(number, options))

    def _warn_of_nothing(self, model: nn.Module, plan: Mapping[nn.Module, Bits]) -> None:
        wants_activations = any(bits.activations is not None for bits in plan.values())
        if wants_activations and not any(isinstance(module, self.activation_kinds) for module in plan):
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


def join_optimizer(optimizer: Optimizer, learned: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Add parameters as a separate group with the options of the first group."""
    first = optimizer.param_groups[0]
    named = "param_names" in first
    options = {key: copy.deepcopy(v) for key, v in first.items() if key not in ("params", "param_names")}
    optimizer.add_param_group({**options, "params": list(learned) if named else [p for _, p in learned]})


# --- Number of bits for each module's tensors: the quantizer's defaults and its overrides by module name --------------

#: Layers whose weights and biases are quantized, subclasses included.
WEIGHT_LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    nn.Embedding,
)  # fmt: skip
#: Activations that clip values below 0.
RECTIFIERS = (nn.ReLU, nn.ReLU6)
#: Activations whose output a linear quantizer quantizes.
ACTIVATIONS = (
    *RECTIFIERS, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh,
)  # fmt: skip
NOT_QUANTIZED = 32


@dataclass(frozen=True, kw_only=True)
class Bits:
    """Numbers of bits, 1 to 31; None: not quantized."""

    weights: int | None
    """Of a layer's weight."""
    bias: int | None
    """Of its bias."""
    activations: int | None
    """Of its output."""


def make_bits(weights: int | None, bias: int | None, activations: int | None) -> Bits:
    """Convert a schedule's numbers of bits, where 32 also means not quantized."""
    found = [None if bits is None or bits >= NOT_QUANTIZED else bits for bits in (weights, bias, activations)]
    return Bits(weights=found[0], bias=found[1], activations=found[2])


def plan_bits(model: nn.Module, default: Bits, overrides: dict[str, OverridesConfig]) -> dict[nn.Module, Bits]:
    """Return the bits of each module in the model's order; a module with several names occurs once.

    The first pattern that matches a module applies; keys it does not set inherit the default. Patterns are matched by
    `match_modules`, as in the check of a schedule.

    Args:
        model: as built; the root module has no name, so no pattern matches it.
        default: bits of modules that no pattern matches.
        overrides: by pattern, in their order.

    Raises:
        UserError: a pattern matches no module, or a module has several names with different bits.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    known = [name for name in modules if name]
    chosen: dict[str, Bits] = {}
    for pattern, override in overrides.items():
        matches = match_modules(pattern, known)
        kinds = (*WEIGHT_LAYERS, *ACTIVATIONS)
        if not any(isinstance(modules[name], kinds) for name in matches):
            hint = f"; {matches[0]}.* means what is in it" if any(modules[matches[0]].children()) else ""
            warnings.warn(
                f"overrides of {pattern!r} have no effect: {', '.join(matches)} has neither a weight nor an activation "
                f"of its own that is quantized{hint}",
                stacklevel=4,
            )
        for name in matches:
            chosen.setdefault(name, _inherited(override, default))
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


def _inherited(override: OverridesConfig, default: Bits) -> Bits:
    own = make_bits(override.bits_weights, override.bits_bias, override.bits_activations)
    given = override.model_fields_set
    return Bits(
        weights=own.weights if "bits_weights" in given else default.weights,
        bias=own.bias if "bits_bias" in given else default.bias,
        activations=own.activations if "bits_activations" in given else default.activations,
    )


# --- Modules that quantize activations --------------------------------------------------------------------------------
# Shapes: x any; ranges ().


Clip = Literal["NONE", "AVG", "N_STD"]


class UnitActivation(Quantization):
    """`unit_activation` with k = bits."""

    def forward(self, x: Tensor) -> Tensor:
        return unit_activation(x, self.bits)


class LearnedClipActivation(Quantization):
    """`pact_activation` with a learned alpha.

    Args:
        bits: k.
        begin: initial alpha, > 0.
        options: device and dtype of alpha.
    """

    def __init__(self, bits: int, begin: float, options: Mapping[str, Any]) -> None:
        super().__init__(bits)
        self.alpha = nn.Parameter(torch.full((), begin, **options))

    def forward(self, x: Tensor) -> Tensor:
        return pact_activation(x, self.alpha, self.bits)


class MovingRange(Quantization):
    """Quantize to the exponential moving average of the batches' least and greatest values (Jacob et al. 2018, 3.1).

    In training mode, before batch n is quantized, r is set to the weighted average of the batches so far,
    sum_i d^(n-i) r_i / sum_i d^(n-i), which has no bias towards the first batch or zero (Kingma and Ba 2015,
    section 3). In evaluation mode r does not change; before the first batch the input is returned unchanged.

    Args:
        bits: k.
        mode: see `linear_grid`.
        decay: d in [0, 1].
        options: device and dtype of the range.
    """

    low: Tensor
    high: Tensor
    seen: Tensor

    def __init__(self, bits: int, mode: Mode, decay: float, options: Mapping[str, Any]) -> None:
        super().__init__(bits)
        self.mode = mode
        self.decay = decay
        self.register_buffer("low", torch.zeros((), **options))
        self.register_buffer("high", torch.zeros((), **options))
        # A tensor of a type that every device and torch's DistributedDataParallel support.
        self.register_buffer("seen", torch.zeros((), device=options["device"], dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        if self.training:
            self._see(x.detach())
        quantized = on_grid(x, linear_grid(self.low, self.high, self.bits, self.mode))
        return quantized if self.training else torch.where(self.seen > 0, quantized, x)

    @torch.no_grad()
    def _see(self, x: Tensor) -> None:
        self.seen += 1
        for kept, value in zip((self.low, self.high), torch.aminmax(x), strict=True):
            new = value.to(kept.dtype)
            kept.copy_(torch.where(self.seen > 1, kept + self._weight_of_new(kept.dtype) * (new - kept), new))

    def _weight_of_new(self, dtype: torch.dtype) -> Tensor:
        """Return the last batch's weight in the average, (1 - d) / (1 - d^n), as a scalar on the range's device."""
        batches = self.seen.to(dtype)
        if self.decay == 1:
            return 1 / batches
        if self.decay == 0:
            return torch.ones_like(batches)
        return (1 - self.decay) / -torch.expm1(batches * math.log(self.decay))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}, decay={self.decay}"


class CalibratedRange(Frozen):
    """Quantize to a range collected from batches in training mode; until it is frozen, x is returned unchanged.

    clip NONE: least and greatest of all values. AVG: the mean of the batches' least, and of their greatest values.
    N_STD: mean -+ c standard deviations (of all values, biased), limited to the least and greatest.

    Args:
        bits: k.
        mode: see `linear_grid`.
        clip: see above.
        deviations: c > 0; for N_STD.
        options: device and dtype of the range.
    """

    batches: Tensor
    low: Tensor
    high: Tensor
    values: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, bits: int, mode: Mode, clip: Clip, deviations: float | None, options: Mapping[str, Any]) -> None:
        super().__init__(bits, options["device"])
        self.mode = mode
        self.clip = clip
        self.deviations = deviations
        self.register_buffer("batches", torch.zeros((), device=options["device"], dtype=torch.int64))
        self.register_buffer("low", torch.zeros((), **options))
        self.register_buffer("high", torch.zeros((), **options))
        if clip == "N_STD":
            for name in ("values", "mean", "squares"):
                self.register_buffer(name, torch.zeros((), **options))

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen:
            return on_grid(x, self.grid())
        if self.training and x.numel() > 0:
            self._see(x.detach())
        return x

    def grid(self) -> Grid:
        """Return the frozen grid, with scalar step and zero point."""
        return linear_grid(self.low, self.high, self.bits, self.mode)

    @torch.no_grad()
    def _see(self, x: Tensor) -> None:
        low, high = (value.to(self.low.dtype) for value in torch.aminmax(x))
        if self.clip == "AVG":
            low = self.low + (low - self.low) / (self.batches + 1)
            high = self.high + (high - self.high) / (self.batches + 1)
        else:
            low = torch.where(self.batches > 0, torch.minimum(self.low, low), low)
            high = torch.where(self.batches > 0, torch.maximum(self.high, high), high)
        self.low.copy_(low)
        self.high.copy_(high)
        if self.clip == "N_STD":
            self._see_deviations(wide(x).to(self.mean.dtype))
        self.batches += 1

    def _see_deviations(self, x: Tensor) -> None:
        """Merge a batch into the running mean and sum of squared deviations (Chan et al. 1979)."""
        mean = x.mean()
        squares = ((x - mean) ** 2).sum()
        values = self.values + x.numel()
        apart = mean - self.mean
        self.squares += squares + apart**2 * self.values * (x.numel() / values)
        self.mean += apart * (x.numel() / values)
        self.values.copy_(values)

    @torch.no_grad()
    def freeze(self) -> None:
        """Freeze the range and quantize from now on; requires that at least one batch was seen."""
        if self.clip == "N_STD":
            assert self.deviations is not None
            reach = self.deviations * (self.squares / self.values).sqrt()
            self.low.copy_(torch.maximum(self.low, self.mean - reach))
            self.high.copy_(torch.minimum(self.high, self.mean + reach))
        super().freeze()

    def extra_repr(self) -> str:
        clip = f"{self.clip} {self.deviations}" if self.clip == "N_STD" else self.clip
        return f"{super().extra_repr()}, mode={self.mode}, clip={clip}"


# --- Parametrizations (`torch.nn.utils.parametrize`) that quantize a parameter; they have no parameters themselves
# Shapes: w any; per channel, ranges keep w's number of dimensions with size 1 except along ``axis``.


class DorefaWeight(Quantization):
    """`dorefa_weight` with k = bits."""

    def forward(self, w: Tensor) -> Tensor:
        return dorefa_weight(w, self.bits)


class WrpnWeight(Quantization):
    """`wrpn_weight` with k = bits >= 2."""

    def forward(self, w: Tensor) -> Tensor:
        return wrpn_weight(w, self.bits)


class LinearWeight(Quantization):
    """Quantize a weight to the grid of its least and greatest value, computed again at each use.

    Args:
        bits: k.
        mode: see `linear_grid`.
        axis: of the channels, each with its own grid; None: one grid for all.
    """

    def __init__(self, bits: int, mode: Mode, axis: int | None) -> None:
        super().__init__(bits)
        self.mode = mode
        self.axis = axis

    def forward(self, w: Tensor) -> Tensor:
        return on_grid(w, linear_grid(*value_range(w.detach(), self.axis), self.bits, self.mode))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}, axis={self.axis}"


class FrozenWeight(Frozen):
    """Quantize to the range that the weight had when it was frozen; before that return the weight unchanged.

    Args:
        bits, mode, axis: as in `LinearWeight`.
        like: the weight.
    """

    low: Tensor
    high: Tensor

    def __init__(self, bits: int, mode: Mode, axis: int | None, like: Tensor) -> None:
        super().__init__(bits, like.device)
        self.mode = mode
        self.axis = axis
        low, high = value_range(wide(like.detach()), axis)
        self.register_buffer("low", torch.zeros_like(low))
        self.register_buffer("high", torch.zeros_like(high))

    def forward(self, w: Tensor) -> Tensor:
        return on_grid(w, self.grid()) if self.frozen else w

    def grid(self) -> Grid:
        """Return the frozen grid; its shapes broadcast to the weight."""
        return linear_grid(self.low, self.high, self.bits, self.mode)

    def freeze_at(self, w: Tensor) -> None:
        """Take the range of w and quantize from now on."""
        low, high = value_range(w.detach(), self.axis)
        self.low.copy_(low)
        self.high.copy_(high)
        self.freeze()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}, axis={self.axis}"


class FrozenBias(Frozen):
    """Quantize a bias to signed integers times s_x s_w, the input and weight steps (Jacob et al. 2018, section 2.4).

    Until both are known the bias is returned unchanged. Shapes: b (C,); step () or (C,).

    Args:
        bits: k >= 2, of the sum that the bias is added to.
        like: the bias.
        per_channel: whether the weight has one step per channel.
    """

    step: Tensor

    def __init__(self, bits: int, like: Tensor, per_channel: bool) -> None:
        super().__init__(bits, like.device)
        values = wide(like.detach())
        self.register_buffer("step", torch.ones_like(values) if per_channel else values.new_ones(()))

    def forward(self, b: Tensor) -> Tensor:
        if not self.frozen:
            return b
        q_min, q_max = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        zero = torch.zeros_like(self.step)
        return on_grid(b, Grid(1 / self.step, zero, q_min, q_max, self.step * q_min, self.step * q_max))

    def freeze_at(self, input_step: Tensor, weight_step: Tensor) -> None:
        """Take s_x, (), and s_w, () or one value per channel, and quantize from now on."""
        step = (input_step * weight_step).flatten()
        # The groups of a transposed convolution share their channels' steps.
        self.step.copy_(step.repeat(self.step.numel() // step.numel()).reshape(self.step.shape))
        self.freeze()


def channel_axis(layer: nn.Module, per_channel: bool) -> int | None:
    """Return the axis of the layer's weight whose slices (filters) each get a grid; None: one grid for all.

    An embedding has one grid, since its rows are outputs and not filters.
    """
    if not per_channel or isinstance(layer, nn.Embedding):
        return None
    return 1 if isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)) else 0


# --- DoReFa-Net, WRPN and PACT: quantizers that clip to a fixed or learned range and quantize from the first step


class DorefaQuantizer(ModelQuantizer):
    """Quantize weights and biases with `dorefa_weight`, outputs of rectifiers with `unit_activation`."""

    activation_kinds = RECTIFIERS

    def __init__(
        self,
        name: str,
        given: settings.DorefaQuantizerConfig | settings.WRPNQuantizerConfig | settings.PACTQuantizerConfig,
    ) -> None:
        default = make_bits(given.bits_weights, given.bits_bias, given.bits_activations)
        super().__init__(name, default, given.overrides)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return DorefaWeight(bits)

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return self.weight_quantization(layer, bits)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return UnitActivation(bits)


class WrpnQuantizer(DorefaQuantizer):
    """Quantize weights and biases with `wrpn_weight`, outputs of rectifiers with `unit_activation`."""

    def least_bits(self, what: str) -> int:
        return 1 if what == "activations" else 2

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return WrpnWeight(bits)


class PactQuantizer(DorefaQuantizer):
    """Quantize weights as DoReFa-Net, outputs of rectifiers with `pact_activation` and a separate alpha for each."""

    def __init__(self, name: str, given: settings.PACTQuantizerConfig) -> None:
        super().__init__(name, given)
        self.act_clip_init_val = given.act_clip_init_val

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return LearnedClipActivation(bits, self.act_clip_init_val, options)


# --- Linear quantization, in training ---------------------------------------------------------------------------------


class LinearTrainingQuantizer(ModelQuantizer):
    """Quantize weights and biases to their own range, outputs of activation modules to a moving average range.

    So is the model's first argument, where it is a floating-point tensor. Biases and embeddings have one range, even if
    ``per_channel_wts`` gives each filter its own.
    """

    activation_kinds = ACTIVATIONS

    def __init__(self, name: str, given: settings.QuantAwareTrainRangeLinearQuantizerConfig) -> None:
        default = make_bits(given.bits_weights, given.bits_bias, given.bits_activations)
        super().__init__(name, default, given.overrides)
        self.given = given

    def change_inputs(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        given = self.given
        wanted = given.bits_activations if given.num_bits_inputs is None else given.num_bits_inputs
        bits = make_bits(None, None, wanted if given.quantize_inputs else None).activations
        if bits is not None:
            quantize_input(model, self.activation_quantization(bits, options))

    def least_bits(self, what: str) -> int:
        return least_linear_bits(self.given.mode)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return LinearWeight(bits, self.given.mode, channel_axis(layer, self.given.per_channel_wts))

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return LinearWeight(bits, self.given.mode, None)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return MovingRange(bits, self.given.mode, self.given.ema_decay, options)


class PostTrainingQuantizer(ModelQuantizer):
    """Quantize inputs, weights, biases and outputs of layers, and outputs of activation modules, of a trained model.

    The ranges are collected during one epoch: until `finish_epoch` the model computes as before, and every forward pass
    in training mode updates them; after it they are fixed. Of an embedding only the weight is quantized, since its
    output consists of weight rows.

    A layer's bias becomes signed integers of ``bits_accum`` bits times s_x s_w, the step of the sum it is added to; it
    is not quantized if input or weight are not.
    """

    activation_kinds = tuple(kind for kind in (*WEIGHT_LAYERS, *ACTIVATIONS) if kind is not nn.Embedding)

    def __init__(self, name: str, given: settings.PostTrainLinearQuantizerConfig) -> None:
        default = make_bits(given.bits_parameters, given.bits_accum, given.bits_activations)
        super().__init__(name, default, given.overrides)
        self.given = given

    def least_bits(self, what: str) -> int:
        return 2 if what == "bias" else least_linear_bits(self.given.mode)

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        weight: Any = layer.weight
        return FrozenWeight(bits, self.given.mode, channel_axis(layer, self.given.per_channel_wts), weight)

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        bias: Any = layer.bias
        return FrozenBias(bits, bias, per_channel=self.given.per_channel_wts)

    def activation_quantization(self, bits: int, options: Mapping[str, Any]) -> Quantization:
        return CalibratedRange(bits, self.given.mode, self.given.clip_acts, self.given.clip_n_stds, options)

    def change(self, module: nn.Module, bits: Bits, options: Mapping[str, Any]) -> None:
        super().change(module, bits, options)
        is_layer = isinstance(module, WEIGHT_LAYERS) and isinstance(module, self.activation_kinds)
        if is_layer and bits.activations is not None:
            quantize_input(module, self.activation_quantization(bits.activations, options))

    def finish_epoch(self, model: nn.Module) -> None:
        """Freeze all ranges for good; later calls do nothing.

        Activations that no batch reached are not quantized, with a warning.

        Raises:
            UserError: there was no forward pass in training mode.
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
            warnings.warn(f"not quantized, for no batch went through it: activations of {layers}", stacklevel=2)
        for name, seen in ranges.items():
            if name not in unseen:
                seen.freeze()
        for module in model.modules():
            if isinstance(module, WEIGHT_LAYERS):
                _freeze_parameters(module)


def _freeze_parameters(layer: nn.Module) -> None:
    weight = _quantization_of(layer, "weight")
    if not isinstance(weight, FrozenWeight):
        return
    # Not frozen yet, it returns its input unchanged, so this is the weight without quantization.
    current: Any = layer.weight
    weight.freeze_at(current)
    bias, seen = _quantization_of(layer, "bias"), layer._modules.get(INPUT)
    if isinstance(bias, FrozenBias) and isinstance(seen, CalibratedRange) and seen.frozen:
        bias.freeze_at(seen.grid().step, weight.grid().step)


def _quantization_of(layer: nn.Module, name: str) -> nn.Module | None:
    """Return the last parametrization of a parameter, or None."""
    if not parametrize.is_parametrized(layer, name):
        return None
    parametrizations: Any = layer.parametrizations
    last: nn.Module = parametrizations[name][-1]
    return last
