"""Thresholds: given, of a deviation, of surgery, and of recurrent networks."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.pruners import Pruner, build_pruner
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.errors import UserError

NOW = Moment(epoch=0, timing=Timing())


def pruner_of(class_: str, names: list[str], **arguments: Any) -> Pruner:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2, 2)) for name in names})
    return build_pruner("p", PRUNERS[class_](**arguments), model, seed=0)


def test_what_is_at_the_threshold_goes() -> None:
    pruner = pruner_of("MagnitudeParameterPruner", ["w"], thresholds={"w": 0.5})
    weight = torch.tensor([0.5, -0.5, 0.51, -0.51, 0.0, float("nan")])
    assert pruner.masks({"w": weight}, {}, NOW)["w"].tolist() == [0, 0, 1, 1, 0, 1]


def test_a_star_is_for_every_other_parameter() -> None:
    pruner = pruner_of("MagnitudeParameterPruner", ["a", "b", "c"], thresholds={"*": 1.0, "b": 3.0})
    assert pruner.targets == ("a", "b", "c")
    weight = torch.tensor([0.5, 2.0, 4.0])
    found = pruner.masks(dict.fromkeys("abc", weight), {}, NOW)
    assert [found[name].tolist() for name in "abc"] == [[0, 1, 1], [0, 0, 1], [0, 1, 1]]


def test_the_deviation_is_the_unbiased_one_of_the_first_use() -> None:
    values = [-1.5, 0.2, 0.9, -0.4, 2.0]
    threshold = 0.5 * statistics.stdev(values)
    pruner = pruner_of("SensitivityPruner", ["w"], sensitivities={"w": 0.5})
    first = pruner.masks({"w": torch.tensor(values)}, {}, NOW)["w"].tolist()
    assert first == [float(abs(v) > threshold) for v in values]
    # Biased, the threshold would be between these two.
    biased = 0.5 * statistics.pstdev(values)
    near = torch.tensor([biased + 1e-3, threshold - 1e-3, threshold + 1e-3])
    assert biased + 1e-3 < threshold - 1e-3
    assert pruner.masks({"w": near}, {}, NOW)["w"].tolist() == [0, 0, 1]
    # Much larger weights leave the threshold where it was.
    assert pruner.masks({"w": 100 * torch.tensor(values)}, {}, NOW)["w"].tolist() == [1] * 5


SURGERY = {"sensitivities": {"w": 1.5}, "low_thresh_mult": 0.9, "hi_thresh_mult": 1.1}


def slow_surgery(values: list[float], before: list[float], mean: float, std: float, s: float) -> list[float]:
    """Equation 3, element by element."""
    after = []
    for value, m in zip(values, before, strict=True):
        if abs(value) < 0.9 * (mean + s * std):
            after.append(0.0)
        elif abs(value) >= 1.1 * (mean + s * std):
            after.append(1.0)
        else:
            after.append(m)
    return after


@pytest.mark.parametrize("growth", [0.0, 0.25])
def test_surgery_cuts_splices_and_leaves(growth: float) -> None:
    pruner = pruner_of("SplicingPruner", ["w"], **SURGERY, sensitivity_multiplier=growth)
    timing = Timing(starting_epoch=2, ending_epoch=8)
    generator = torch.Generator().manual_seed(3)
    current: dict[str, Tensor] = {}
    expected = [1.0] * 400
    changes = set()
    for epoch in range(2, 8):
        weight = torch.randn(400, generator=generator, dtype=torch.float64)
        if epoch == 2:
            sizes = [abs(v) for v in weight.tolist()]
            mean, std = statistics.mean(sizes), statistics.stdev(sizes)
        sensitivity = 1.5 * (1 + (epoch - 2) * growth)
        before = expected
        expected = slow_surgery(weight.tolist(), before, mean, std, sensitivity)
        current = pruner.masks({"w": weight}, current, Moment(epoch=epoch, timing=timing))
        assert current["w"].tolist() == expected
        changes |= set(zip(before, expected, strict=True))
    # Each kind of change was seen.
    assert changes == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_the_two_lines_of_narang_by_hand() -> None:
    # theta = 2 * 0.5 * 2 / (2 * 4 + 3 * 6) = 1 / 13; phi = 1.5 / 13.
    timing = Timing(starting_epoch=2, ending_epoch=12, frequency=2)
    pruner = pruner_of("BaiduRNNPruner", ["w"], q=0.5, ramp_epoch=6, ramp_slope_mult=1.5, weights=["w"])
    wanted = [1 / 26, 3 / 26, (5 + 1.5) / 26, (5 + 1.5 * 3) / 26, (5 + 1.5 * 5) / 26]
    for epoch, threshold in zip(timing.active_epochs(), wanted, strict=True):
        weight = torch.tensor([threshold * (1 - 1e-12), threshold * (1 + 1e-12)], dtype=torch.float64)
        assert pruner.masks({"w": weight}, {}, Moment(epoch=epoch, timing=timing))["w"].tolist() == [0, 1]


def test_a_ramp_is_counted_from_the_policys_or_from_the_runs_first_epoch() -> None:
    """R = S + offset, as published since June 2018: masks are equal bit for bit."""
    of_run = pruner_of("BaiduRNNPruner", ["w"], q=0.5, ramp_epoch=6, ramp_slope_mult=1.5, weights=["w"])
    of_policy = pruner_of("BaiduRNNPruner", ["w"], q=0.5, ramp_epoch_offset=4, ramp_slope_mult=1.5, weights=["w"])
    timing = Timing(starting_epoch=2, ending_epoch=12, frequency=2)
    weight = torch.randn(200, generator=torch.Generator().manual_seed(0)) / 3
    for epoch in timing.active_epochs():
        moment = Moment(epoch=epoch, timing=timing)
        one, other = (pruner.masks({"w": weight}, {}, moment)["w"] for pruner in (of_run, of_policy))
        assert torch.equal(one, other)
        assert 0 < one.sum() < 200
    later = Moment(epoch=9, timing=Timing(starting_epoch=5, ending_epoch=15, frequency=2))
    shifted = of_policy.masks({"w": weight}, {}, later)["w"]  # offset from another start: the same two steps later
    assert torch.equal(shifted, of_policy.masks({"w": weight}, {}, Moment(epoch=6, timing=timing))["w"])


def test_a_ramp_before_the_policy_as_published_has_the_second_line_alone() -> None:
    pruner = pruner_of("BaiduRNNPruner", ["w"], q=0.5, ramp_epoch=2, ramp_slope_mult=2, weights=["w"])
    slope = 2 * 0.5 / (2 * (2 - 4) + 3 * (20 - 2))
    thresholds = [slope * (2 - 4 + 1) + 2 * slope * (epoch - 2 + 1) for epoch in (4, 5)]
    for epoch, threshold in zip((4, 5), thresholds, strict=True):
        weight = torch.tensor([threshold * 0.99, threshold * 1.01])
        timing = Timing(starting_epoch=4, ending_epoch=20)
        assert pruner.masks({"w": weight}, {}, Moment(epoch=epoch, timing=timing))["w"].tolist() == [0, 1]


def test_a_ramp_without_a_slope_is_refused() -> None:
    pruner = pruner_of("BaiduRNNPruner", ["w"], q=0.5, ramp_epoch=45, ramp_slope_mult=1.5, weights=["w"])
    rule = "^ramp_epoch must be between the policy's starting_epoch 2 and ending_epoch 12, got 45$"
    with pytest.raises(UserError, match=rule):
        pruner.masks({"w": torch.ones(2)}, {}, Moment(epoch=2, timing=Timing(starting_epoch=2, ending_epoch=12)))
