"""Shares of the elements: exact counts, ties, the cubic, and the published AlexNet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainables.compression.pruners import build_pruner
from trainables.compression.pruners.ranked import level_mask
from trainables.compression.schedule.configs import PRUNERS
from trainables.compression.schedule.timing import Moment, Timing


def masks(class_: str, tensors: dict[str, Tensor], moment: Moment, **arguments: object) -> dict[str, Tensor]:
    """One decision on bare weights."""
    model = nn.ParameterDict({name: nn.Parameter(weight) for name, weight in tensors.items()})
    pruner = build_pruner("p", PRUNERS[class_](**arguments), model, seed=0)
    return pruner.masks(tensors, {}, moment)


def moment(epoch: int = 0, **timing: int) -> Moment:
    return Moment(epoch=epoch, timing=Timing(**timing))  # type: ignore[arg-type]


def test_the_smallest_absolute_values_go() -> None:
    weight = torch.tensor([[0.5, -0.1], [-2.0, 0.2], [0.3, -0.4]])
    found = masks("SparsityLevelParameterPruner", {"w": weight}, moment(), levels={"w": 0.5})
    assert found["w"].tolist() == [[1, 0], [1, 0], [0, 1]]
    assert found["w"].dtype == weight.dtype


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.77, 1.0])
def test_of_equal_weights_exactly_the_share_goes_the_first_ones(share: float) -> None:
    weight = torch.cat([torch.full((13,), -0.5), torch.full((12,), 0.5)])
    count = int(share * 25)
    assert level_mask(weight, share).tolist() == [0.0] * count + [1.0] * (25 - count)


def test_the_cubic_of_zhu_and_gupta() -> None:
    # Epochs 0 to 10 every second one, from 0.05 to 0.8: the numbers of a published schedule.
    timing = {"starting_epoch": 0, "ending_epoch": 10, "frequency": 2}
    weight = torch.rand(10000, generator=torch.Generator().manual_seed(0)) + 0.1
    pruned = []
    for epoch in range(0, 10, 2):
        found = masks(
            "AutomatedGradualPruner",
            {"w": weight},
            moment(epoch, **timing),
            initial_sparsity=0.05,
            final_sparsity=0.8,
            weights=["w"],
        )
        pruned.append(int((found["w"] == 0).sum()))
    assert pruned == [500, 4835, 7062, 7882, 8000]


def test_the_cubic_takes_the_last_share_where_there_is_one_epoch() -> None:
    found = masks(
        "AutomatedGradualPruner",
        {"w": torch.arange(1.0, 11.0)},
        moment(3, starting_epoch=3, ending_epoch=4),
        initial_sparsity=0.0,
        final_sparsity=0.5,
        weights=["w"],
    )
    assert found["w"].tolist() == [0] * 5 + [1] * 5


@pytest.mark.slow
def test_the_public_alexnet_schedule_leaves_what_was_published() -> None:
    # Final shares of IntelLabs/distiller, examples/agp-pruning/alexnet.schedule_agp.yaml; its table has the counts.
    layers = {
        (64, 3, 11, 11): 0.0,
        (192, 64, 5, 5): 0.62,
        (384, 192, 3, 3): 0.65,
        (256, 384, 3, 3): 0.43,
        (256, 256, 3, 3): 0.43,
        (4096, 9216): 0.91,
        (4096, 4096): 0.91,
        (1000, 4096): 0.75,
    }
    generator = torch.Generator().manual_seed(0)
    total, left = 0, []
    for shape, share in layers.items():
        mask = level_mask(torch.randn(shape, generator=generator), share)
        total += mask.numel()
        left.append(int(mask.sum()))
    assert left == [23232, 116736, 232244, 504300, 336200, 3397387, 1509950, 1024000]
    assert (sum(left), total) == (7144049, 61090496)
