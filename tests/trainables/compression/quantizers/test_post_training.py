"""Post-training quantization: before and after its epoch, against a layer computed in integers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.quantizers import Quantizer, build_quantizer
from trainables.compression.schedule.configs import PostTrainLinearQuantizerConfig
from trainables.errors import UserError


def quantizer_of(**settings: Any) -> Quantizer:
    return build_quantizer("q", PostTrainLinearQuantizerConfig.model_validate(settings))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear() -> nn.Linear:
    layer = nn.Linear(5, 3).double()
    with torch.no_grad():
        layer.weight.copy_(draw(3, 5, seed=1))
        layer.bias.copy_(draw(3, seed=2))
    return layer


def test_until_the_epoch_ends_the_model_computes_as_before() -> None:
    plain, model = linear(), linear()
    quantizer_of().prepare(model, None)
    x = draw(7, 5)
    for training in (True, False):
        assert torch.equal(model.train(training)(x), plain(x))


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_layer_is_what_integers_compute(per_channel: bool) -> None:
    """x_q and w_q have 8 bits, b_q has 16; their sum times s_x s_w, on the output's own grid, is the output."""
    model = linear()
    weight, bias = model.weight.detach().tolist(), model.bias.detach().tolist()
    quantizer = quantizer_of(bits_accum=16, mode="SYMMETRIC_RESTRICTED", per_channel_wts=per_channel)
    quantizer.prepare(model, None)
    x = draw(7, 5)
    exact = model(x)
    quantizer.finish_epoch(model)
    s_x = x.abs().max().item() / 127
    s_y = exact.abs().max().item() / 127
    rows = [max(abs(w) for w in row) for row in weight]
    steps = [row / 127 if per_channel else max(rows) / 127 for row in rows]
    loop = []
    for values in x.tolist():
        for row, b, s_w in zip(weight, bias, steps, strict=True):
            total = round(b / (s_x * s_w)) + sum(
                round(v / s_x) * round(w / s_w) for v, w in zip(values, row, strict=True)
            )
            loop.append(min(max(round(total * s_x * s_w / s_y), -127), 127) * s_y)
    assert model(x).flatten().tolist() == pytest.approx(loop, abs=1e-9)
    assert model.bias.tolist() == pytest.approx(
        [round(b / (s_x * s)) * s_x * s for b, s in zip(bias, steps, strict=True)], abs=1e-12
    )
    assert model.bias.tolist() != pytest.approx(bias, abs=1e-6)


def test_a_small_accumulator_cuts_the_bias() -> None:
    model = linear()
    with torch.no_grad():
        model.bias.fill_(1000.0)
    quantizer = quantizer_of(bits_accum=10, mode="SYMMETRIC_RESTRICTED")
    quantizer.prepare(model, None)
    x = draw(7, 5)
    model(x)
    weight = model.parametrizations.weight.original
    quantizer.finish_epoch(model)
    limit = 511 * x.abs().max().item() / 127 * weight.abs().max().item() / 127
    assert model.bias.tolist() == pytest.approx([limit] * 3)


@pytest.mark.parametrize("groups", [1, 2])
def test_biases_of_transposed_convolutions_have_the_steps_of_their_channels(groups: int) -> None:
    model = nn.ConvTranspose2d(4, 6, 2, groups=groups).double()
    bias = model.bias.detach().tolist()
    quantizer = quantizer_of(bits_accum=12, mode="SYMMETRIC_RESTRICTED", per_channel_wts=True)
    quantizer.prepare(model, None)
    x = draw(2, 4, 3, 3)
    model(x)
    weight = model.parametrizations.weight.original.detach()
    quantizer.finish_epoch(model)
    width = 6 // groups
    s_x = x.abs().max().item() / 127
    expected = []
    for channel, b in enumerate(bias):
        step = s_x * weight[:, channel % width].abs().max().item() / 127
        expected.append(min(max(round(b / step), -2048), 2047) * step)
    assert model.bias.tolist() == pytest.approx(expected, abs=1e-12)


def test_ranges_are_fixed_from_the_end_of_the_first_epoch_on() -> None:
    model = nn.Sequential(linear(), nn.ReLU())
    quantizer = quantizer_of(clip_acts="AVG")
    quantizer.prepare(model, None)
    model(draw(7, 5))
    quantizer.finish_epoch(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model(1000 * draw(7, 5))
    quantizer.finish_epoch(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_an_input_given_by_name_is_quantized() -> None:
    by_name, by_place = linear(), linear()
    x = draw(7, 5)
    results = []
    for model, args, kwargs in ((by_name, (), {"input": x}), (by_place, (x,), {})):
        quantizer = quantizer_of(bits_activations=3)
        quantizer.prepare(model, None)
        model(*args, **kwargs)
        quantizer.finish_epoch(model)
        results.append(model(*args, **kwargs))
    assert torch.equal(*results)


def test_without_a_batch_in_training_mode_there_is_no_range() -> None:
    model = nn.Sequential(linear(), nn.ReLU())
    quantizer = quantizer_of()
    quantizer.prepare(model, None)
    model.eval()(draw(7, 5))
    with pytest.raises(UserError, match=r"quantizer q needs at least one forward pass in training mode .* got none"):
        quantizer.finish_epoch(model)
    model.train()(draw(7, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantizer.finish_epoch(model)


def test_what_no_batch_reached_is_named_and_stays_as_it_is() -> None:
    model = nn.ModuleDict({"used": linear(), "unused": linear()})
    quantizer = quantizer_of(bits_parameters=32)
    quantizer.prepare(model, None)
    x = draw(7, 5)
    exact = model["used"](x)
    with pytest.warns(UserWarning, match="not quantized, for no batch went through it: activations of unused$"):
        quantizer.finish_epoch(model)
    assert torch.equal(model["unused"](x), exact)
    assert not torch.equal(model["used"](x), exact)
