"""Activation checkpointing: the same training, with less kept and more computed."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from trainables.config import TrialConfig
from trainables.errors import UserError
from trainables.training.recipe.recipe import apply_checkpointing, blocks_of, computed_again
from trainables.training.run import TrainingRun
from trainables.workloads import models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout(0.3)
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = value + self.body(value)
        return found


def residual() -> nn.Module:
    torch.manual_seed(0)
    layers = [("stem", nn.Conv2d(1, 8, 3, padding=1)), *((f"block{n}", Block(8)) for n in range(4))]
    return nn.Sequential(OrderedDict([*layers, ("flat", nn.Flatten()), ("head", nn.Linear(8 * 36, 3))]))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Upsample(scale_factor=2), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(8 * 36, 3),
    )  # fmt: skip


def kept_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes that a forward pass leaves allocated for the backward pass, as torch's allocator counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = model(inputs)
    found = sum(event.self_cpu_memory_usage for event in seen.key_averages())
    del loss
    return found


def trained(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 1, 6, 6)).square().mean().backward()
        optimizer.step()
    return [t.clone() for t in model.state_dict().values()]


@pytest.mark.parametrize("kind", ["cheap", "blocks"])
@pytest.mark.parametrize("make", [residual, chain])
def test_training_is_bit_for_bit_the_same_with_norms_dropout_and_layers_in_place(make: object, kind: str) -> None:
    model, plain = make(), make()  # type: ignore[operator]
    apply_checkpointing(model, kind)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(trained(model), trained(plain), strict=True))


@pytest.mark.parametrize("make", [residual, chain])
def test_less_is_kept_for_the_backward_pass(make: object) -> None:
    kept = {}
    for kind in ("none", "cheap", "blocks"):
        model = make()  # type: ignore[operator]
        if kind != "none":
            apply_checkpointing(model, kind)
        kept[kind] = kept_bytes(model, torch.randn(64, 1, 6, 6))
    assert kept["blocks"] < 0.5 * kept["none"]
    # The products' outputs are kept, the norms', activations' and samplings' are not.
    assert kept["blocks"] < kept["cheap"] < 0.8 * kept["none"]


def test_a_copy_is_checkpointed_with_its_own_weights() -> None:
    model = residual()
    apply_checkpointing(model, "blocks")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert "block0 blocks" in computed_again(other)
    assert isinstance(other.get_submodule("block0"), Block)
    assert not torch.equal(model(torch.ones(1, 1, 6, 6)), other(torch.ones(1, 1, 6, 6)))


def test_the_blocks_of_known_models() -> None:
    assert list(blocks_of(residual())) == ["block0", "block1", "block2", "block3"]
    assert list(blocks_of(chain())) == [""]
    assert list(blocks_of(models.build_model("resnet20", 10, 32)))[:2] == ["layer1.0", "layer1.1"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    assert list(blocks_of(encoder)) == ["layers.0", "layers.1", "layers.2"]
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2)
    assert list(blocks_of(decoder)) == ["layers.0", "layers.1"]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"activation_checkpointing=cheap needs a model with blocks .* got Linear"):
        apply_checkpointing(nn.Linear(2, 2), "cheap")


@pytest.mark.thorough
@pytest.mark.slow
def test_what_is_computed_again_is_counted() -> None:
    rows = {}
    for kind in (None, "cheap", "blocks"):
        with TrainingRun(TrialConfig(method="none", epochs=1, activation_checkpointing=kind)) as run:
            rows[kind] = run.train_epoch()
    plain, again = rows[None], rows["blocks"]
    assert again["dense_flops"] == plain["dense_flops"]
    # All but the products that are the last operation of a block, of which nothing after them needs the result.
    assert 0 < again["executed_flops"] - plain["executed_flops"] <= plain["forward_flops"]
    assert again["compute_saved"] < rows["cheap"]["compute_saved"] <= 0
    assert again["train_loss"] == plain["train_loss"]
