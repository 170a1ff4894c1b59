"""Copies with integers and constants in place of quantizers, beside the quantized models themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantized_nets import NAMES, make_model, settings_of
from torch import Tensor, nn
from torch.optim import SGD

from trainables.compression.quantizers import Quantizer, build_quantizer
from trainables.compression.quantizers.quantized_modules import LinearWeight, Quantization, straight_through
from trainables.deployment.fixed_model import fixed_copy

X = torch.randn(16, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def quantized(name: str, *, batches: int = 3, **changes: Any) -> nn.Module:
    """A model that has seen batches in training mode, in eval mode."""
    model = make_model()
    quantizer = build_quantizer("q", settings_of(name, **changes))
    quantizer.prepare(model, SGD(model.parameters(), 0.1))
    with torch.no_grad():
        for seed in range(batches):
            model.train()(torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(seed)))
    if batches:
        quantizer.finish_epoch(model)
    return model.eval()


def wide_bits(name: str, bits: int) -> dict[str, Any]:
    post = name == "PostTrainLinearQuantizer"
    return {("bits_parameters" if post else "bits_weights"): bits, "bits_activations": bits}


@pytest.mark.parametrize("bits", [1, None, 7, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_computes_the_same_from_integers(name: str, bits: int | None) -> None:
    if bits == 1 and (name == "WRPNQuantizer" or "QuantAwareTrain" in name):
        bits = 2  # one is the sign's
    model = quantized(name, **({} if bits is None else wide_bits(name, bits)))
    before = copy.deepcopy(model.state_dict())
    fixed, simulated = fixed_copy(model.train())
    model.eval()
    torch.testing.assert_close(fixed(X), model(X), rtol=1e-4, atol=1e-5)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    # DoReFa's 8 bits have 256 levels without 0, and 0: no 8-bit integer has so many.
    is_dorefa = name in ("DorefaQuantizer", "PACTQuantizer") and bits == 8
    assert simulated == (["conv.weight", "up.weight", "fc.weight"] if is_dorefa else [])
    stored = [tensor for key, tensor in fixed.state_dict().items() if key.endswith("weight.original")]
    assert {tensor.dtype for tensor in stored} == {torch.float32 if is_dorefa else torch.int8}
    assert len(stored) == 3


def test_more_than_8_bits_stay_floats_of_as_many_values() -> None:
    model = quantized("QuantAwareTrainRangeLinearQuantizer", **wide_bits("QuantAwareTrainRangeLinearQuantizer", 10))
    fixed, simulated = fixed_copy(model)
    layers = ("conv.weight", "relu.output", "up.weight", "last.output", "fc.weight")
    assert simulated == ["input", *layers]
    torch.testing.assert_close(fixed(X), model(X), rtol=1e-4, atol=1e-5)


def test_ranges_that_no_batch_has_set_change_nothing() -> None:
    name = "QuantAwareTrainRangeLinearQuantizer"
    model = quantized(name, batches=0, bits_weights=None, bits_bias=None)
    fixed, simulated = fixed_copy(model)
    assert torch.equal(fixed(X), make_model().eval()(X))
    assert simulated == []


class Own(Quantizer):
    """A user's quantizer: weights are powers of two, outputs rounded down, biases half of what is usual."""

    def weight_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return Quantization(
            bits, lambda w, bits: straight_through(w, lambda w: w.sign() * w.abs().log2().round().exp2())
        )

    def bias_quantization(self, layer: nn.Module, bits: int) -> Quantization:
        return Halved(bits, "SYMMETRIC", None)

    def activation_quantization(self, bits: int, options: Any) -> Quantization:
        return Quantization(bits, lambda x, bits: straight_through(x, lambda x: (x * bits).floor() / bits))


class Halved(LinearWeight):
    def forward(self, w: Tensor) -> Tensor:
        return super().forward(w) / 2


def test_quantizations_of_ones_own_are_evaluated() -> None:
    model = make_model()
    Own("own", settings_of("DorefaQuantizer")).prepare(model, None)
    fixed, simulated = fixed_copy(model.eval())
    assert torch.equal(fixed(X), model(X))
    assert simulated == ["conv.weight", "relu.output", "up.weight", "last.output", "fc.weight"]
    assert all(tensor.is_floating_point() for tensor in fixed.state_dict().values() if tensor.dim())
    program = torch.export.export(fixed, (X,)).module()
    torch.testing.assert_close(program(X), model(X))
