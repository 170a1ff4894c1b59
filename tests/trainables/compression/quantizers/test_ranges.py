"""Ranges of activations over batches, and post-training quantization against a layer computed in integers."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.quantizers import Quantizer, build_quantizer
from trainables.compression.quantizers.quantized_modules import CalibratedRange, MovingRange
from trainables.compression.schedule.configs import Clip, PostTrainLinearQuantizerConfig
from trainables.errors import UserError

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}


def batches(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator, dtype=torch.float64) * (n + 1) for n in range(count)]


def average(values: list[float], decay: float) -> float:
    """Each weighs ``decay`` times the next."""
    weights = [decay ** (len(values) - 1 - n) for n in range(len(values))]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("decay", [0.75, 0.999, 0.0, 1.0])
def test_a_moving_range_is_the_average_in_which_each_batch_weighs_less_than_the_next(decay: float) -> None:
    module = MovingRange(8, "ASYMMETRIC_UNSIGNED", decay, OPTIONS)
    lows: list[float] = []
    highs: list[float] = []
    for batch in batches():
        values = batch.flatten().tolist()
        lows.append(min(values))
        highs.append(max(values))
        low, high = average(lows, decay), average(highs, decay)
        y = module(batch)
        assert (module.low.item(), module.high.item()) == pytest.approx((low, high))
        per_unit = 255 / (high - low)
        zero = round(-low * per_unit)
        loop = [(min(max(round(v * per_unit) + zero, 0), 255) - zero) / per_unit for v in values]
        assert y.flatten().tolist() == pytest.approx(loop, abs=1e-9)


def test_a_moving_range_stays_in_evaluation_and_lets_through_what_comes_before_the_first_batch() -> None:
    module = MovingRange(2, "SYMMETRIC", 0.5, OPTIONS).eval()
    first, second, *_ = batches()
    assert torch.equal(module(first), first)
    module.train()(first)
    kept = (module.low.item(), module.high.item())
    y = module.eval()(second)
    assert (module.low.item(), module.high.item()) == kept
    assert y.unique().numel() <= 4


@pytest.mark.parametrize("clip", ["NONE", "AVG", "N_STD"])
def test_a_calibrated_range_is_that_of_its_rule(clip: Clip) -> None:
    module = CalibratedRange(8, "ASYMMETRIC_SIGNED", clip, 1.5 if clip == "N_STD" else None, OPTIONS)
    lists = [batch.flatten().tolist() for batch in batches()]
    for batch in batches():
        assert torch.equal(module(batch), batch)
        module.eval()(batch * 1000)  # not looked at
        module.train()
    module.freeze()
    everything = [v for values in lists for v in values]
    reach = 1.5 * statistics.pstdev(everything)
    mean = statistics.fmean(everything)
    expected = {
        "NONE": (min(everything), max(everything)),
        "AVG": (statistics.fmean(map(min, lists)), statistics.fmean(map(max, lists))),
        "N_STD": (max(mean - reach, min(everything)), min(mean + reach, max(everything))),
    }[clip]
    assert (module.low.item(), module.high.item()) == pytest.approx(expected)
    if clip == "N_STD":
        assert expected[0] > min(everything)
    far = module(batches()[0] * 1000)
    step = (expected[1] - expected[0]) / 255
    assert (far.min().item(), far.max().item()) == pytest.approx(expected, abs=step)
    assert (module.low.item(), module.high.item()) == pytest.approx(expected)


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
