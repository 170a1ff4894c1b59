"""A packed state is the state again, bit for bit, through a file that holds only plain types and tensors."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from trainables.stage_tree.checkpoint_policy import pack, unpack


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(pack(state), file)
    file.seek(0)
    return unpack(torch.load(file, weights_only=True))


def alike(one: Any, other: Any) -> bool:
    """Equal in types, order and bits."""
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        return same and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other)


def test_every_kind_of_value_comes_back() -> None:
    wide = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    state = {
        "floats": [torch.tensor([0.1, float("nan"), -0.0]), torch.tensor(3.5), torch.zeros(0, 4)],
        "others": (torch.tensor([2**62, -1]), torch.tensor([True, False]), torch.tensor([1, 255], dtype=torch.uint8)),
        "narrow": {0: torch.tensor([1.5], dtype=torch.bfloat16), 1: torch.tensor([1e300], dtype=torch.float64)},
        "strided": [wide, torch.arange(6.0)[::2], torch.arange(4.0).reshape(2, 2).t()],
        "large": torch.randn(40_000),
        "plain": [1, 2.5, None, "text", True, ("packed tensor", 1), [("a", 2)]],
    }
    assert alike(through_a_file(state), state)


def test_a_module_and_its_optimizer_go_on_from_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    optimizer.step()
    found = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert alike(found["model"], model.state_dict())
    assert alike(found["optimizer"], optimizer.state_dict())
    assert isinstance(found["model"], OrderedDict)
    assert found["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def test_what_comes_back_shares_no_memory_and_nothing_was_changed() -> None:
    whole = torch.arange(6.0)
    state = {"first": whole[:3], "last": whole[3:], "again": whole[:3]}
    packed = pack(state)
    whole.fill_(7)
    found = unpack(packed)
    found["first"].fill_(9)
    assert found["again"].tolist() == [0, 1, 2]
    assert found["last"].tolist() == [3, 4, 5]
    assert found["last"].untyped_storage().nbytes() == 12
    assert state["first"].tolist() == [7, 7, 7]
