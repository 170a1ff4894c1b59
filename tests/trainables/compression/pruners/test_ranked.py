"""Shares of elements and structures: counts, ties, the cubic, norms, leaders, noise, chance; the published AlexNet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainables.compression.pruners import Pruner, build_pruner, kept_after, pruned_count
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.errors import UserError

VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.inf, math.nan]) | st.floats(0, 3, width=16), min_size=1)


@settings(max_examples=60)
@given(values=VALUES, share=st.floats(0, 1))
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16])
def test_the_smallest_go_and_of_equal_ones_the_first(kind: torch.dtype, values: list[float], share: float) -> None:
    count = pruned_count(share, len(values))
    # A NaN is as large as can be.
    order = sorted(range(len(values)), key=lambda i: (math.inf if math.isnan(values[i]) else values[i], i))
    expected = [i not in order[:count] for i in range(len(values))]
    assert kept_after(torch.tensor(values, dtype=kind), count).tolist() == expected


@pytest.mark.parametrize(
    ("share", "n", "group_size", "count"),
    [
        (0.0, 16, 1, 0),
        (0.5, 16, 1, 8),
        (0.49, 10, 1, 4),
        (1.0, 16, 1, 16),
        (0.7, 16, 8, 8),
        (0.4, 16, 8, 0),
        (1.0, 20, 8, 16),
        (math.nextafter(1.0, 0.0), 1, 1, 0),
    ],
)
def test_structures_are_counted_down_to_a_group_and_never_all_unless_asked(
    share: float, n: int, group_size: int, count: int
) -> None:
    assert pruned_count(share, n, group_size) == count


def masks_of(class_: str, tensors: dict[str, Tensor], moment: Moment, **arguments: object) -> dict[str, Tensor]:
    """One decision on bare weights."""
    model = nn.ParameterDict({name: nn.Parameter(weight) for name, weight in tensors.items()})
    pruner = build_pruner("p", PRUNERS[class_](**arguments), model, seed=0)
    return pruner.masks(tensors, {}, moment)


def moment(epoch: int = 0, **timing: int) -> Moment:
    return Moment(epoch=epoch, timing=Timing(**timing))  # type: ignore[arg-type]


def test_the_cubic_of_zhu_and_gupta() -> None:
    # Epochs 0 to 10 every second one, from 0.05 to 0.8: the numbers of a published schedule.
    timing = {"starting_epoch": 0, "ending_epoch": 10, "frequency": 2}
    weight = torch.rand(10000, generator=torch.Generator().manual_seed(0)) + 0.1
    pruned = []
    for epoch in range(0, 10, 2):
        found = masks_of(
            "AutomatedGradualPruner",
            {"w": weight},
            moment(epoch, **timing),
            initial_sparsity=0.05,
            final_sparsity=0.8,
            weights=["w"],
        )
        pruned.append(int((found["w"] == 0).sum()))
    assert pruned == [500, 4835, 7062, 7882, 8000]


NOW = Moment(epoch=0, timing=Timing())


def pruner_of(class_: str, weights: dict[str, Tensor], *, seed: int = 0, name: str = "p", **arguments: Any) -> Pruner:
    model = nn.ParameterDict({key: nn.Parameter(weight) for key, weight in weights.items()})
    return build_pruner(name, PRUNERS[class_](weights=list(weights), **arguments), model, seed=seed)


def random_weight(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kept_filters(mask: Tensor) -> list[int]:
    """Which filters stay; each is whole."""
    rows = mask.flatten(1)
    assert bool(((rows == rows[:, :1]).all(dim=1)).all())
    return [i for i, row in enumerate(rows.tolist()) if row[0] != 0]


@pytest.mark.parametrize(("class_", "order"), [("L1", 1), ("L2", 2)])
@pytest.mark.parametrize("group_type", ["3D", "Filters"])
@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.3, 2), (0.5, 4), (0.99, 7), (1.0, 8)])
def test_filters_of_the_smallest_norm_go(class_: str, order: int, group_type: str, share: float, count: int) -> None:
    weight = random_weight(8, 3, 2, 2)
    pruner = pruner_of(
        f"{class_}RankedStructureParameterPruner", {"w": weight}, group_type=group_type, desired_sparsity=share
    )
    norms = [sum(abs(v) ** order for v in row) for row in weight.flatten(1).tolist()]
    gone = sorted(range(8), key=lambda i: norms[i])[:count]
    assert kept_filters(pruner.masks({"w": weight}, {}, NOW)["w"]) == [i for i in range(8) if i not in gone]


LEADING = ["L1RankedStructureParameterPruner", "RandomRankedFilterPruner", "BernoulliFilterPruner"]


@pytest.mark.parametrize("class_", LEADING)
def test_all_follow_the_leader(class_: str) -> None:
    weights = {"first": random_weight(8, 3, 2, 2), "then": random_weight(8, 5, seed=1)[..., None]}
    pruner = pruner_of(class_, weights, group_type="Filters", desired_sparsity=0.5, group_dependency="Leader")
    alone = pruner_of(class_, {"first": weights["first"]}, group_type="Filters", desired_sparsity=0.5)
    masks = pruner.masks(weights, {}, NOW)
    kept = kept_filters(alone.masks(weights, {}, NOW)["first"])
    assert kept_filters(masks["first"]) == kept_filters(masks["then"]) == kept
    assert 0 < len(kept) < 8


def test_a_leader_needs_as_many_structures() -> None:
    weights = {"a": torch.ones(8, 3, 2, 2), "b": torch.ones(4, 8, 2, 2)}
    rule = (
        r"^group_dependency Leader needs weights with equally many Filters, got 8 in a \(8, 3, 2, 2\) and 4 in "
        r"b \(4, 8, 2, 2\)$"
    )
    with pytest.raises(UserError, match=rule):
        pruner_of(
            "L1RankedStructureParameterPruner",
            weights,
            group_type="Filters",
            desired_sparsity=0.5,
            group_dependency="Leader",
        )


@pytest.mark.slow
def test_noise_is_a_normal_factor_on_the_norms() -> None:
    # Two filters with norms 1 and 1 + d change places if (1 + s x) > (1 + d)(1 + s y), a normal variable being above
    # d: the probability is that of z > d / (s sqrt(1 + (1 + d)^2)).
    deviation, gap = 0.3, 0.2
    weight = torch.tensor([1.0, 1 + gap]).reshape(2, 1, 1)
    pruner = pruner_of(
        "L1RankedStructureParameterPruner",
        {"w": weight},
        group_type="Filters",
        desired_sparsity=0.5,
        noise=deviation,
    )
    n = 4000
    changed = sum(kept_filters(pruner.masks({"w": weight}, {}, NOW)["w"]) == [0] for _ in range(n))
    expected = 0.5 * math.erfc(gap / (deviation * math.sqrt(1 + (1 + gap) ** 2)) / math.sqrt(2))
    assert abs(changed / n - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


def test_a_random_level_prunes_the_smallest_of_a_share_in_the_range() -> None:
    weight = torch.arange(1.0, 101.0).reshape(100, 1, 1)
    pruner = pruner_of(
        "RandomLevelStructureParameterPruner", {"w": weight}, group_type="Filters", sparsity_range=[0.2, 0.6]
    )
    counts = []
    for _ in range(2000):
        kept = kept_filters(pruner.masks({"w": weight}, {}, NOW)["w"])
        assert kept == list(range(100 - len(kept), 100))
        counts.append(100 - len(kept))
    assert min(counts) == 20
    assert max(counts) == 59
    # Uniform over 40 counts: mean 39.5, deviation sqrt((40^2 - 1) / 12).
    assert abs(sum(counts) / 2000 - 39.5) < 4 * math.sqrt((40**2 - 1) / 12 / 2000)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_bernoulli_filters_go_with_the_probability_and_the_others_make_up_for_them(share: float) -> None:
    weight = torch.ones(50, 2, 1, 1, dtype=torch.float64)
    pruner = pruner_of("BernoulliFilterPruner", {"w": weight}, group_type="Filters", desired_sparsity=share)
    n, gone = 400, 0
    for _ in range(n):
        mask = pruner.masks({"w": weight}, {}, NOW)["w"]
        kept = kept_filters(mask)
        gone += 50 - len(kept)
        assert mask[kept].flatten().tolist() == pytest.approx([50 / len(kept)] * (2 * len(kept)))
        assert float(mask.mean()) == pytest.approx(1)
    assert abs(gone / (50 * n) - share) < 4 * math.sqrt(share * (1 - share) / (50 * n))


def test_bernoulli_never_drops_all() -> None:
    weight = torch.tensor([1.0, -3.0, 2.0]).reshape(3, 1, 1)
    pruner = pruner_of("BernoulliFilterPruner", {"w": weight}, group_type="Filters", desired_sparsity=1.0)
    assert pruner.masks({"w": weight}, {}, NOW)["w"].flatten().tolist() == [0, 3, 0]


def test_rows_are_the_columns_of_torchs_weight() -> None:
    weight = torch.tensor([[1.0, -5.0, 0.1], [2.0, 3.0, 0.1]])
    pruner = pruner_of("L1RankedStructureParameterPruner", {"w": weight}, group_type="Rows", desired_sparsity=0.4)
    assert pruner.masks({"w": weight}, {}, NOW)["w"].tolist() == [[1, 1, 0], [1, 1, 0]]
