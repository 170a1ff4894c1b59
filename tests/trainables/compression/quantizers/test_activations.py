"""Ranges of activations over batches, against running sums in plain Python."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from trainables.compression.quantizers.quantized_modules import CalibratedRange, LearnedClipActivation, MovingRange
from trainables.compression.schedule.configs import Clip

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_moving_range_has_no_bias_towards_its_first_batch(dtype: torch.dtype) -> None:
    """Batch maxima 1, then 5 ninety-nine times, decay 0.999: 4.958, as the original's debiased average gives."""
    module = MovingRange(8, "SYMMETRIC", 0.999, {"device": "cpu", "dtype": dtype})
    biased = 0.0
    for step, largest in enumerate([1.0] + [5.0] * 99, start=1):
        module(torch.tensor([0.0, largest], dtype=dtype))
        biased = 0.999 * biased + 0.001 * largest
        assert module.high.item() == pytest.approx(biased / (1 - 0.999**step), rel=1e-5)
    assert module.high.item() == pytest.approx(4.96, abs=0.005)


def test_a_moving_range_stays_in_evaluation_and_lets_through_what_comes_before_the_first_batch() -> None:
    module = MovingRange(2, "SYMMETRIC", 0.5, OPTIONS).eval()
    first, second, *_ = batches()
    assert torch.equal(module(first), first)
    module.train()(first)
    kept = (module.low.item(), module.high.item())
    y = module.eval()(second)
    assert (module.low.item(), module.high.item()) == kept
    assert y.unique().numel() <= 4


def test_an_empty_batch_shows_nothing() -> None:
    empty = torch.zeros(0, 3)
    moving, calibrated = (
        MovingRange(8, "SYMMETRIC", 0.9, OPTIONS),
        CalibratedRange(8, "SYMMETRIC", "AVG", None, OPTIONS),
    )
    assert moving(empty).shape == calibrated(empty).shape == (0, 3)
    assert moving.seen.item() == calibrated.batches.item() == 0


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


def test_a_learned_clip_learns_down_to_what_its_loss_wants() -> None:
    module = LearnedClipActivation(4, 8.0, {"device": "cpu", "dtype": torch.float32})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.linspace(0, 10, 50)
    for _ in range(60):
        optimizer.zero_grad()
        (module(x) - x.clamp(max=3.0)).square().mean().backward()
        optimizer.step()
    assert module.alpha.item() == pytest.approx(3.0, abs=0.1)
