"""What follows a thinning: optimizer, record, parametrizations, modes and dtypes; and what is refused."""

from __future__ import annotations

import copy
import io
import sys
from typing import Any

import pytest
import torch
from thinned_models import images, stack, widths, zero_filters
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import SGD, AdamW

from trainables.compression.thinning import Kind, crop, thin, thin_again
from trainables.errors import UserError


class OfOneDtype(nn.Module):
    """Makes a tensor of its own, which is not of double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x @ torch.eye(3))
        return result


def test_a_model_of_one_dtype() -> None:
    model, x = OfOneDtype(), images(5, 3).float()
    zero_filters([model.layers[0]], [2, 4])
    before = model(x).detach()
    found = thin(model, x)
    assert found.exact
    assert found.removed["layers.2.weight"] == {1: [2, 4]}
    assert torch.allclose(model(x), before, atol=1e-6)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_optimizer_goes_on_as_if_the_model_had_always_been_thin(kind: str) -> None:
    """Channels that are zero on both sides get no gradient, so training with them goes the same way."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        groups = [{"params": named[:3], "lr": 1e-4}, {"params": named[3:], "lr": 2e-4}]
        return SGD(groups, momentum=0.9) if kind == "sgd" else AdamW(groups, weight_decay=0.1)

    model, x = stack(), images(4, 3, 8, 8)
    zero_filters([model[0]], [1, 3])
    with torch.no_grad():
        model[2].weight[:, [1, 3]] = 0
    optimizer = make(model)
    trained(model, optimizer, x, 3)
    thin_model = copy.deepcopy(model)
    thin_optimizer = make(thin_model)
    thin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    names = [group["param_names"] for group in thin_optimizer.param_groups]
    found = thin(thin_model, x, thin_optimizer, kind="structures")
    assert widths(thin_model)["0"] == (6, 3, 1)
    assert [group["param_names"] for group in thin_optimizer.param_groups] == names
    in_groups = [p for group in thin_optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in in_groups] == [id(p) for p in thin_model.parameters()]
    assert set(thin_optimizer.state) == set(in_groups)
    trained(model, optimizer, x, 3)
    trained(thin_model, thin_optimizer, x, 3)
    for (name, ours), theirs in zip(thin_model.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, crop(theirs.detach(), found.removed.get(name, {})), rtol=1e-9, atol=1e-12), name


def test_a_run_goes_on_bit_for_bit_from_record_and_state() -> None:
    """Twice thinned; rebuilt from both records one after the other, in plain types."""
    model, x = stack(), images(4, 3, 8, 8)
    optimizer = SGD(model.parameters(), lr=1e-4, momentum=0.9)
    trained(model, optimizer, x, 1)
    record: list[Any] = []
    for filters in ([1, 3], [0]):
        zero_filters([model[0]], filters)
        record += thin(model, x, optimizer, kind="filters").record
    file = io.BytesIO()
    torch.save({"record": record, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = stack()
    other_optimizer = SGD(other.parameters(), lr=1e-4, momentum=0.9)
    removed = thin_again(other, state["record"], other_optimizer)
    assert removed["0.weight"] == {0: [0, 1, 3]}
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    trained(model, optimizer, x, 3)
    trained(other, other_optimizer, x, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Scaled(nn.Module):
    """Quantizes with a scale for each filter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", weight.detach().abs().amax((1, 2, 3), keepdim=True) + 1e-3)

    def forward(self, weight: Tensor) -> Tensor:
        return (weight / self.scale * 7).round() / 7 * self.scale


def test_quantized_weights() -> None:
    model, x = stack(), images(4, 3, 8, 8)
    zero_filters([model[0]], [1, 3])
    parametrize.register_parametrization(model[0], "weight", Scaled(model[0].weight))
    original, before = copy.deepcopy(model), model(x).detach()
    found = thin(model, x, kind="filters")
    assert found.removed["0.weight"] == {0: [1, 3]}
    assert torch.allclose(model(x), before, atol=1e-9)
    assert model[0].parametrizations.weight[0].scale.shape == (6, 1, 1, 1)
    assert torch.equal(original(x), before)  # the class that both share is as it was


def test_wrong_arguments() -> None:
    kind: Any = "rows"
    with pytest.raises(
        UserError, match=r"^kind of a thinning must be one of filters, channels, structures, got 'rows'$"
    ):
        thin(stack(), images(1, 3, 8, 8), kind=kind)
    good: Kind = "filters"
    with pytest.raises(UserError, match=r"^round_to must be >= 1, got 0$"):
        thin(stack(), images(1, 3, 8, 8), kind=good, round_to=0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([["9", 0, [1]]], "it cuts '9', which is nothing here"),
        ([["1", 0, [1]]], "it cuts '1', which is a ReLU here"),
        ([["0", 0, [8]]], "of 8 output channels of '0' here it cuts 8"),
        ([["2", 1, [1]], ["2", 1, [7]]], "of 7 input channels of '2' here it cuts 7"),
        ([["0", 0, list(range(8))]], "of 8 output channels of '0' here it cuts 0, 1, 2, 3, 4, 5, 6, 7"),
    ],
)
def test_a_record_of_another_model(record: list[Any], message: str) -> None:
    model = stack()
    before = widths(model)
    with pytest.raises(UserError, match=f"^the record of a thinning is of another model: {message}$"):
        thin_again(model, record)
    assert widths(model) == before


def test_without_torch_pruning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(UserError, match=r"pip install 'tune-cac\[thin\]'$"):
        thin(stack(), images(1, 3, 8, 8))


class Wrapped(nn.Linear):
    """A layer that returns its output in a dictionary."""

    def forward(self, x: Tensor) -> Any:
        return {"scores": super().forward(x)}


def test_a_model_that_cannot_be_followed() -> None:
    with pytest.raises(UserError, match=r"^the model cannot be thinned, for torch_pruning cannot follow it: "):
        thin(nn.Sequential(nn.Linear(3, 3), Wrapped(3, 2)), images(1, 3))
