"""Number of bits for each module's tensors: the quantizer's defaults and its overrides by module name."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from trainables.compression.schedule.matching import match_modules
from trainables.compression.schedule.quantizer_configs import OverridesConfig
from trainables.errors import UserError

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
