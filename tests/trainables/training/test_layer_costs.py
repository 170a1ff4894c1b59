"""FLOPs by layer: closed forms, the cost table's totals, and what the table says when one layer alone stands still.

Shapes: images (B, C, H, W); sequences (B, T, E).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_workload import Tiny
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from trainables.training.flops import OUTSIDE, CostTable, LayerCost, layer_costs, saved_shares
from trainables.workloads.base import Batch
from trainables.workloads.digits import Digits

B = 4


class SquaredOutput(Tiny):
    """Any model; the loss is the mean square of what it returns."""

    def __init__(self, name: str) -> None:
        self.name = name

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        output = model(*batch)
        return (output["out"] if isinstance(output, dict) else output).square().mean()


class Net(nn.Module):
    """Layers by name, in the order of their registration, and a forward pass of (net, inputs)."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self._run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self._run(self, x)


def residual() -> Net:
    """Residual connections, ReLUs in place, and a shortcut that is registered before what runs before it."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.relu(m.norm(m.stem(x)))
        x = m.relu(m.conv1(x) + x)
        x = F.relu_(m.conv2(x) + m.shortcut(x))
        found: Tensor = m.head(x.mean((2, 3)))
        return found

    return Net(
        run, shortcut=nn.Conv2d(6, 10, 1, stride=2), stem=nn.Conv2d(3, 6, 3, padding=1), norm=nn.BatchNorm2d(6),
        conv1=nn.Conv2d(6, 6, 3, padding=1), conv2=nn.Conv2d(6, 10, 3, stride=2, padding=1, bias=False),
        relu=nn.ReLU(inplace=True), head=nn.Linear(10, 5),
    )  # fmt: skip


def called_twice() -> Net:
    """One linear layer at two places."""
    layers = {"first": nn.Linear(7, 6), "again": nn.Linear(6, 6), "last": nn.Linear(6, 2)}
    return Net(lambda m, x: m.last(m.again(F.relu_(m.again(m.first(x))))), **layers)


def functional() -> Net:
    """The model itself uses a layer's weight without calling it, and multiplies on its own."""

    def run(m: Any, x: Tensor) -> dict[str, Tensor]:
        x = m.first(x)
        x = F.linear(x @ x.transpose(1, 2) @ x, m.first.weight)
        return {"out": m.second(x)}

    return Net(run, first=nn.Linear(6, 6), second=nn.Linear(6, 6))


def tied() -> Net:
    """The output layer has the embedding's weight."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = Net(
        lambda m, x: m.output(m.encoder(m.embedding(x))),
        embedding=nn.Embedding(11, 8), encoder=encoder, output=nn.Linear(8, 11),
    )  # fmt: skip
    model.output.weight = model.embedding.weight  # type: ignore[union-attr]
    return model


def recomputed(reentrant: bool) -> Net:
    """Activation checkpointing: the backward pass runs the middle once more."""
    return Net(
        lambda m, x: m.last(checkpoint(m.middle, m.first(x), use_reentrant=reentrant)),
        first=nn.Linear(6, 6), middle=nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)), last=nn.Linear(6, 6),
    )  # fmt: skip


class LastState(nn.GRU):
    """A recurrent layer that returns its outputs alone."""

    def __init__(self) -> None:
        super().__init__(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def images() -> Batch:
    return (torch.zeros(B, 3, 8, 8),)


def sequences(width: int) -> Batch:
    return (torch.zeros(B, 5, width),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "residual": (residual, images()),
    "called twice": (called_twice, sequences(7)),
    "functional": (functional, sequences(6)),
    "tied": (tied, (torch.zeros(B, 5, dtype=torch.int64),)),
    "recomputed": (lambda: recomputed(False), sequences(6)),
    "recomputed, reentrant": (lambda: recomputed(True), sequences(6)),
    "parametrised": (
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 2)), sequences(6)
    ),
    "recurrent": (lambda: nn.Sequential(nn.Linear(6, 4), LastState()), sequences(6)),
    "without weights": (lambda: nn.Sequential(nn.PReLU()), sequences(6)),
}  # fmt: skip


def costs_of(name: str) -> tuple[dict[str, LayerCost], nn.Module, Batch]:
    make, batch = MODELS[name]
    model = make()
    found = layer_costs(SquaredOutput(name), model, batch)
    assert found[-1].name == OUTSIDE
    assert found[-1].numbers == ()
    return {cost.name: cost for cost in found}, model, batch


def counted_here(model: nn.Module, batch: Batch) -> tuple[int, int]:
    """The plain counter on the model itself: forward, backward."""
    with FlopCounterMode(display=False) as forward:
        loss = SquaredOutput("any").loss(model, batch)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_what_the_real_device_computes_and_the_cost_tables(name: str) -> None:
    costs, model, batch = costs_of(name)
    dense = CostTable(SquaredOutput(f"layer costs: {name}"), model).dense_step(batch)
    counted = counted_here(model.train(), batch)
    assert (dense.forward_flops, dense.backward_flops) == counted
    assert sum(cost.forward_flops for cost in costs.values()) == counted[0]
    assert sum(cost.backward_flops for cost in costs.values()) == counted[1]


def conv_flops(conv: nn.Conv2d, size: int) -> int:
    """2 * B * C_out * H_out * W_out * C_in / groups * k^2 multiplications and additions."""
    (k, _), out = conv.kernel_size, size // conv.stride[0]
    return 2 * B * conv.out_channels * out * out * conv.in_channels // conv.groups * k * k


def test_convolutions_have_the_closed_form() -> None:
    """An input and a weight gradient each, as dear as the forward pass; the first layer's input needs none."""
    costs, model, _ = costs_of("residual")
    forward = {name: conv_flops(getattr(model, name), 8) for name in ("shortcut", "stem", "conv1", "conv2")}
    forward |= {"head": 2 * B * 10 * 5, "norm": 0, OUTSIDE: 0}
    assert {name: cost.forward_flops for name, cost in costs.items()} == forward
    backward = {name: (1 if name == "stem" else 2) * flops for name, flops in forward.items()}
    assert {name: cost.backward_flops for name, cost in costs.items()} == backward
    assert {name: cost.numbers for name, cost in costs.items()} == {
        "shortcut": (0, 1), "stem": (2, 3), "norm": (4, 5), "conv1": (6, 7), "conv2": (8,), "head": (9, 10), OUTSIDE: ()
    }  # fmt: skip


def test_a_frozen_front_costs_nothing_backward() -> None:
    model = residual()
    for module in (model.stem, model.norm):
        module.requires_grad_(False)
    costs = {cost.name: cost for cost in layer_costs(SquaredOutput("frozen"), model, images())}
    conv1 = conv_flops(model.conv1, 8)
    assert costs["stem"].backward_flops == 0
    assert costs["stem"].forward_flops == conv_flops(model.stem, 8)
    assert costs["conv1"].backward_flops == conv1  # its input needs no gradient any more
    assert costs["conv2"].backward_flops == 2 * conv_flops(model.conv2, 8)


@pytest.mark.parametrize("name", ["residual", "called twice"])
def test_a_layers_backward_is_twice_what_its_weight_alone_costs(name: str) -> None:
    """Independent of any attribution: hold one weight still and see what the whole step no longer costs."""
    costs, model, batch = costs_of(name)
    _, dense = counted_here(model, batch)
    first = {"residual": "stem", "called twice": "first"}[name]
    for layer, module in model.named_children():
        if not isinstance(module, (nn.Conv2d, nn.Linear)):
            continue
        module.weight.requires_grad_(False)
        without = counted_here(model, batch)[1]
        module.weight.requires_grad_(True)
        gradients = 1 if layer == first else 2
        assert costs[layer].backward_flops == gradients * (dense - without) > 0


def test_attention_is_its_modules_and_a_shared_weight_has_one_number() -> None:
    """torch's attention uses its output projection without calling it: that is in the row of the attention itself."""
    costs, model, _ = costs_of("tied")
    names = [name for name, _ in model.named_parameters()]
    tokens = 2 * B * 5
    assert names[0] == "embedding.weight"
    assert "output.weight" not in names
    assert costs["output"].numbers == (0, names.index("output.bias"))
    assert costs["embedding"].numbers == (0,)
    assert costs["embedding"].forward_flops == 0
    assert costs["output"].forward_flops == tokens * 8 * 11
    assert costs["encoder.linear1"].forward_flops == costs["encoder.linear2"].forward_flops == tokens * 8 * 16
    assert costs["encoder.self_attn"].forward_flops == tokens * 8 * (3 * 8 + 8) + 2 * tokens * 5 * 8
    assert costs["encoder.self_attn.out_proj"].forward_flops == 0
    for name in ("output", "encoder.linear1", "encoder.linear2", "encoder.self_attn"):
        assert costs[name].backward_flops == 2 * costs[name].forward_flops
    assert costs[OUTSIDE].forward_flops == 0


def test_a_parametrised_weight_is_its_layers() -> None:
    costs, model, _ = costs_of("parametrised")
    assert [name for name, _ in model.named_parameters()][1] == "0.parametrizations.weight.original"
    assert costs["0"].numbers == (0, 1)
    assert set(costs) == {"0", "1", OUTSIDE}
    assert costs["0"].forward_flops > 2 * B * 5 * 6 * 6  # the map to an orthogonal matrix, too
    assert costs[OUTSIDE].forward_flops == costs[OUTSIDE].backward_flops == 0


def test_digits_and_its_untouched_model() -> None:
    workload = Digits()
    model = workload.make_model()
    batch = next(workload.train_batches(0, 0))
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    found = layer_costs(workload, model.eval(), batch)
    dense = CostTable(workload, model).dense_step(batch)
    assert sum(cost.forward_flops for cost in found) == dense.forward_flops
    assert sum(cost.backward_flops for cost in found) == dense.backward_flops
    assert found[0].backward_flops == found[0].forward_flops == 2 * 64 * 8 * 16 * 16 * 9
    assert not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


def test_what_is_saved_is_what_the_model_itself_no_longer_computes() -> None:
    """The shortcut is registered first and runs late: stopping it alone ends no backward pass."""
    model = residual()
    model.norm.bias.requires_grad_(False)
    forward, dense = counted_here(model, images())
    expected = {}
    for end in (1, 5, 7, 8):
        for parameter in list(model.parameters())[: end + 1]:
            parameter.requires_grad_(False)
        expected[end] = 1 - (forward + counted_here(model, images())[1]) / (forward + dense)
    model.requires_grad_(True)
    model.norm.bias.requires_grad_(False)
    assert saved_shares(SquaredOutput("saved"), model, images()) == pytest.approx(expected, rel=1e-12)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["norm.bias"]
    some = saved_shares(SquaredOutput("saved"), model, images(), most=2)
    assert some == {1: None, 5: pytest.approx(expected[5]), 7: None, 8: pytest.approx(expected[8])}
