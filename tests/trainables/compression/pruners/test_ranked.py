"""Ranked structures: norms, counts, leaders and noise, and structures that go by chance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.pruners import build_pruner
from trainables.compression.pruners.pruner import Pruner
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing
from trainables.errors import UserError

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


def test_the_two_norms_rank_differently() -> None:
    # L1 6 and 5, L2 sqrt(12) and 5.
    weight = torch.tensor([[[2.0, 2.0, 2.0]], [[5.0, 0.0, 0.0]]])
    kept = {}
    for class_ in ("L1", "L2"):
        pruner = pruner_of(
            f"{class_}RankedStructureParameterPruner", {"w": weight}, group_type="Filters", desired_sparsity=0.5
        )
        kept[class_] = kept_filters(pruner.masks({"w": weight}, {}, NOW)["w"])
    assert kept == {"L1": [0], "L2": [1]}


def test_rows_are_the_columns_of_torchs_weight() -> None:
    weight = torch.tensor([[1.0, -5.0, 0.1], [2.0, 3.0, 0.1]])
    pruner = pruner_of("L1RankedStructureParameterPruner", {"w": weight}, group_type="Rows", desired_sparsity=0.4)
    assert pruner.masks({"w": weight}, {}, NOW)["w"].tolist() == [[1, 1, 0], [1, 1, 0]]


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3, 2, 2)])
def test_channels_of_convolutions_of_any_kind(shape: tuple[int, ...]) -> None:
    weight = random_weight(*shape)
    pruner = pruner_of("L1RankedStructureParameterPruner", {"w": weight}, group_type="Channels", desired_sparsity=0.4)
    norms = [float(weight[:, c].abs().sum()) for c in range(3)]
    mask = pruner.masks({"w": weight}, {}, NOW)["w"]
    for channel in range(3):
        assert bool((mask[:, channel] == float(norms[channel] != min(norms))).all())


def test_blocks_against_a_loop() -> None:
    weight = random_weight(4, 6, 2, 2)
    pruner = pruner_of(
        "L1RankedStructureParameterPruner",
        {"w": weight},
        group_type="Blocks",
        desired_sparsity=0.6,
        kwargs={"block_shape": [2, 3, 1, 1]},
    )
    norms = {}
    for f in range(2):
        for c in range(2):
            for y in range(2):
                for x in range(2):
                    norms[f, c, y, x] = float(weight[2 * f : 2 * f + 2, 3 * c : 3 * c + 3, y, x].abs().sum())
    gone = sorted(norms, key=lambda block: norms[block])[: int(0.6 * 16)]
    mask = pruner.masks({"w": weight}, {}, NOW)["w"]
    for f, c, y, x in torch.ones(4, 6, 2, 2).nonzero().tolist():
        assert mask[f, c, y, x] == ((f // 2, c // 3, y, x) not in gone)


@pytest.mark.parametrize(
    "class_",
    [
        "L1RankedStructureParameterPruner_AGP",
        "L2RankedStructureParameterPruner_AGP",
        "RandomRankedFilterPruner_AGP",
    ],
)
def test_the_share_of_a_gradual_one_grows_by_the_cubic(class_: str) -> None:
    weight = random_weight(1000, 1, 1)
    pruner = pruner_of(class_, {"w": weight}, group_type="Filters", initial_sparsity=0.05, final_sparsity=0.8)
    timing = Timing(starting_epoch=0, ending_epoch=10, frequency=2)
    found = [pruner.masks({"w": weight}, {}, Moment(epoch=e, timing=timing))["w"] for e in range(0, 10, 2)]
    assert [1000 - len(kept_filters(mask)) for mask in found] == [50, 483, 706, 788, 800]


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
        r"^group_dependency Leader needs weights with equally many filters, got 8 in a \(8, 3, 2, 2\) and 4 in "
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


def test_a_thinned_model_that_no_longer_fits_is_told() -> None:
    weights = {"a": torch.ones(8, 3, 2, 2), "b": torch.ones(8, 8, 2, 2)}
    pruner = pruner_of(
        "L1RankedStructureParameterPruner",
        weights,
        group_type="Filters",
        desired_sparsity=0.5,
        group_dependency="Leader",
    )
    with pytest.raises(UserError, match="equally many filters, got 6 in a"):
        pruner.masks({**weights, "a": torch.ones(6, 3, 2, 2)}, {}, NOW)


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


def test_random_filters_are_exactly_the_share_and_each_as_often() -> None:
    weight = torch.ones(10, 1, 1)
    pruner = pruner_of("RandomRankedFilterPruner", {"w": weight}, group_type="Filters", desired_sparsity=0.35)
    gone = torch.zeros(10)
    for _ in range(2000):
        mask = pruner.masks({"w": weight}, {}, NOW)["w"].flatten()
        assert int((mask == 0).sum()) == 3
        gone += mask == 0
    assert float((gone / 2000 - 0.3).abs().max()) < 5 * math.sqrt(0.3 * 0.7 / 2000)


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


def test_the_probability_of_a_gradual_bernoulli_grows_by_the_cubic() -> None:
    weight = torch.ones(20000, 1, 1)
    pruner = pruner_of(
        "BernoulliFilterPruner_AGP", {"w": weight}, group_type="Filters", initial_sparsity=0.05, final_sparsity=0.8
    )
    timing = Timing(starting_epoch=0, ending_epoch=10, frequency=2)
    for epoch, share in zip(range(0, 10, 2), [0.05, 0.4836, 0.7063, 0.7883, 0.8], strict=True):
        mask = pruner.masks({"w": weight}, {}, Moment(epoch=epoch, timing=timing))["w"]
        assert abs(float((mask == 0).double().mean()) - share) < 5 * math.sqrt(share * (1 - share) / 20000) + 5e-5


def test_bernoulli_never_drops_all() -> None:
    weight = torch.tensor([1.0, -3.0, 2.0]).reshape(3, 1, 1)
    pruner = pruner_of("BernoulliFilterPruner", {"w": weight}, group_type="Filters", desired_sparsity=1.0)
    assert pruner.masks({"w": weight}, {}, NOW)["w"].flatten().tolist() == [0, 3, 0]
